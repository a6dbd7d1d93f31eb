"""The blocks that an engine's cache currently holds, and how they are announced to a new router.

The input is changes from the normalizer. The output is look-ups, and the live blocks as events or as the batches of a
state snapshot. A snapshot shares a large table with the index, and later changes are stored in a layer on top of the
table (``index``). The package may use ``wire`` and ``types``.
"""
