"""Blocks: what an engine's cache holds at this moment, and how it is announced to a router that is new.

In: changes from the normalizer. Out: look-ups, and the live blocks as events or as a state snapshot's batches.
A snapshot shares a large table, and later changes go to a layer on top (``index``). The package may use ``wire`` and
``types``.
"""
