"""The sequence machine's buffers: batches that wait for their turn, and fingerprints of delivered ones."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvbus.client.timeouts import BufferLimits


@dataclass(frozen=True, slots=True)
class Waiting:
    """A received batch, not decoded yet."""

    topic: bytes
    payload: bytes
    replayed: bool


class ReorderBuffer:
    """Batches that wait for their turn, by seq; limited in number and in payload bytes."""

    def __init__(self, limits: BufferLimits) -> None:
        self.overflow = False
        """True once a batch was dropped; the machine sets it back to False."""
        self.overflowed = 0
        """Batches dropped so far."""
        self._limits: Final = limits
        self._batches: dict[int, Waiting] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, seq: int, batch: Waiting) -> bool:
        """Keep a batch if there is room for it; return False if the buffer holds its seq already."""
        if seq in self._batches:
            return False
        size = len(batch.payload)
        full = len(self) >= self._limits.held_batches or self._bytes + size > self._limits.held_bytes
        if full and self._batches:  # an empty buffer takes any batch, else the stream could never pass a gap
            self.overflowed += 1
            self.overflow = True
        else:
            self._batches[seq] = batch
            self._bytes += size
        return True

    def pop(self, seq: int) -> Waiting | None:
        """Remove and return a batch, None if it is not here."""
        batch = self._batches.pop(seq, None)
        if batch is not None:
            self._bytes -= len(batch.payload)
        return batch

    def drop_before(self, seq: int) -> None:
        """Drop the batches before this seq."""
        for old in [held for held in self._batches if held < seq]:
            self.pop(old)

    def oldest(self) -> int | None:
        """Return the lowest seq held, None if the buffer is empty."""
        return min(self._batches, default=None)

    def clear(self) -> None:
        """Drop every batch."""
        self._batches.clear()
        self._bytes = 0


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
