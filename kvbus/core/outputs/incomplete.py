"""Seqs of one output stream that are no cursor: whoever stands right before one of them may hold part of a state.

A state snapshot leaves in several batches, and each has a seq. A router whose connection breaks between two of them
asks for a replay from the next seq on. The journal has an empty batch there (the snapshot was for that router alone),
so the journal's answer would leave the router with part of the state for ever. It gets the whole state again.

The rule comes from a run of ten numberings against seven routers (docs/decisions/state-on-subscription.md): a seq may
be a cursor only where the set of blocks is complete at it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

MAX_RANGES: Final = 1000
"""Ranges that are kept apart. Beyond that the two oldest become one: its routers get a state where a few batches of the
journal would do."""


class IncompleteSeqs:
    """Disjoint ranges ``[first, end)`` in ascending order."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []

    def __contains__(self, seq: int) -> bool:
        at = bisect_right(self._firsts, seq) - 1
        return at >= 0 and seq < self._ends[at]

    def __len__(self) -> int:
        return len(self._firsts)

    def add(self, first: int, end: int) -> None:
        """Add ``[first, end)``; an empty range adds nothing."""
        if first >= end:
            return
        low = bisect_right(self._ends, first - 1)
        high = bisect_right(self._firsts, end)
        if low < high:
            first, end = min(first, self._firsts[low]), max(end, self._ends[high - 1])
        self._firsts[low:high] = [first]
        self._ends[low:high] = [end]
        if len(self._firsts) > MAX_RANGES:
            del self._firsts[1], self._ends[0]
