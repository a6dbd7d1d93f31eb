"""What the sequence machine keeps: batches that wait for their turn, and digests of delivered ones."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Waiting:
    """A received batch, not decoded yet."""

    topic: bytes
    payload: bytes
    replayed: bool

    def __len__(self) -> int:
        return len(self.payload)


class Recent:
    """Digests of the batches delivered last, to distinguish a duplicate from another epoch's batch."""

    def __init__(self, size: int) -> None:
        self._size: Final = size
        self._digests: OrderedDict[int, tuple[int, bool]] = OrderedDict()

    def __contains__(self, seq: int) -> bool:
        return seq in self._digests

    def add(self, seq: int, batch: Waiting) -> None:
        """Remember a delivered batch."""
        self._digests[seq] = (hash(batch.payload), not batch.replayed)
        if len(self._digests) > self._size:
            self._digests.popitem(last=False)

    def same(self, seq: int, payload: bytes) -> bool:
        """Return whether this batch was delivered under this seq; False for another batch and for an unknown seq."""
        known = self._digests.get(seq)
        return known is not None and known[0] == hash(payload)

    def other(self, seq: int, payload: bytes) -> bool:
        """Return whether the live stream brought another batch under this seq.

        Replayed batches do not count: a compacted answer may have other content under a seq.
        """
        known = self._digests.get(seq)
        return known is not None and known[1] and known[0] != hash(payload)

    def clear(self) -> None:
        """Forget every digest."""
        self._digests.clear()
