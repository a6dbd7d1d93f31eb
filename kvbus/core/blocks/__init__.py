"""Blocks: what an engine's cache holds at this moment, and how it is announced to a router that is new.

In: changes from the normalizer. Out: look-ups, and the live blocks as events or as a state snapshot's batches.
A snapshot freezes the index while it goes on changing (``overlay``). It may use ``wire`` and ``types``.
"""
