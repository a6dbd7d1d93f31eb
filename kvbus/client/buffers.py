"""What the sequence machine keeps: batches held back for order, and how to recognise the ones delivered."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvbus.client.timeouts import BufferLimits


@dataclass(frozen=True, slots=True)
class Waiting:
    """A batch as it came, not decoded yet."""

    topic: bytes
    payload: bytes
    replayed: bool


class ReorderBuffer:
    """Batches held back for order, by seq; bounded in number and in payload bytes."""

    def __init__(self, limits: BufferLimits) -> None:
        self.overflow = False
        """Batches were dropped since this was last set to False."""
        self.overflowed = 0
        """Batches dropped in all."""
        self._limits: Final = limits
        self._batches: dict[int, Waiting] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, seq: int, batch: Waiting) -> bool:
        """Keep a batch, unless there is no room for it; False if its seq is held already."""
        if seq in self._batches:
            return False
        size = len(batch.payload)
        full = len(self) >= self._limits.held_batches or self._bytes + size > self._limits.held_bytes
        if full and self._batches:  # one is always held, however big, or a hole could never be passed
            self.overflowed += 1
            self.overflow = True
        else:
            self._batches[seq] = batch
            self._bytes += size
        return True

    def pop(self, seq: int) -> Waiting | None:
        """Take a batch out, None if it is not there."""
        batch = self._batches.pop(seq, None)
        if batch is not None:
            self._bytes -= len(batch.payload)
        return batch

    def drop_before(self, seq: int) -> None:
        """Forget the batches older than this one."""
        for old in [held for held in self._batches if held < seq]:
            self.pop(old)

    def oldest(self) -> int | None:
        """The lowest seq held."""
        return min(self._batches, default=None)

    def clear(self) -> None:
        """Forget every batch."""
        self._batches.clear()
        self._bytes = 0


class Recent:
    """Digests of the batches delivered last: what tells a duplicate from another life's batch."""

    def __init__(self, size: int) -> None:
        self._size: Final = size
        self._digests: OrderedDict[int, tuple[int, bool]] = OrderedDict()

    def __contains__(self, seq: int) -> bool:
        return seq in self._digests

    def add(self, seq: int, batch: Waiting) -> None:
        """Remember a batch that is delivered."""
        self._digests[seq] = (hash(batch.payload), not batch.replayed)
        if len(self._digests) > self._size:
            self._digests.popitem(last=False)

    def same(self, seq: int, payload: bytes) -> bool:
        """Whether this very batch was delivered under this seq; False if it was another or is not known."""
        known = self._digests.get(seq)
        return known is not None and known[0] == hash(payload)

    def other(self, seq: int, payload: bytes) -> bool:
        """Whether the live stream brought another batch under this seq; an answer may tell it differently."""
        known = self._digests.get(seq)
        return known is not None and known[1] and known[0] != hash(payload)

    def clear(self) -> None:
        """Forget every digest."""
        self._digests.clear()
