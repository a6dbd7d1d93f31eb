"""The blocks that an engine's cache currently holds (the index), and the events that announce them to a new router.

The normalizer changes an index. Other packages look up blocks in the index, and read its live blocks as events or as
the batches of a state snapshot. A snapshot shares a large table with the index. Later changes are then stored in a
layer on top of the table (module ``index``). The package may import ``wire`` and ``types``.
"""
