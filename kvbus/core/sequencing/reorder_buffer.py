"""Batches that came too early: kept until their turn, in order, bounded in number and in bytes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sized
from typing import Generic, TypeVar

Payload = TypeVar("Payload", bound=Sized)


class ReorderBuffer(Generic[Payload]):
    """A map from seq to payload, or whatever has a payload's length, that knows its lowest and highest number.

    Args:
        max_batches: most batches kept.
        max_bytes: most payload kept; a single batch larger than that is kept all the same.
    """

    __slots__ = ("_from", "_order", "_payloads", "bytes", "max_batches", "max_bytes")

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.max_batches = max_batches
        self.max_bytes = max_bytes
        self.bytes = 0
        self._payloads: dict[int, Payload] = {}
        self._order: list[int] = []
        """Ascending. What lies before ``_from`` is gone; it is deleted when it is half of the list."""
        self._from = 0

    def __len__(self) -> int:
        return len(self._payloads)

    def __contains__(self, seq: int) -> bool:
        return seq in self._payloads

    def __iter__(self) -> Iterator[int]:
        """The numbers, ascending."""
        return iter(self._order[self._from :])

    @property
    def first(self) -> int:
        """The lowest number. There must be one."""
        return self._order[self._from]

    @property
    def last(self) -> int:
        """The highest number. There must be one."""
        return self._order[-1]

    def fits(self, payload: Payload) -> bool:
        """Whether one more batch is within the limits."""
        if not self._payloads:
            return True
        return len(self._payloads) < self.max_batches and self.bytes + len(payload) <= self.max_bytes

    def add(self, seq: int, payload: Payload) -> None:
        """Keep a batch that is not kept yet. Call :meth:`fits` first."""
        if not self._order or seq > self._order[-1]:
            self._order.append(seq)
        else:
            insort(self._order, seq, lo=self._from)
        self._payloads[seq] = payload
        self.bytes += len(payload)

    def get(self, seq: int) -> Payload:
        """The batch ``seq``, which must be kept."""
        return self._payloads[seq]

    def replace(self, seq: int, payload: Payload) -> None:
        """Keep another payload under a number that is kept."""
        self.bytes += len(payload) - len(self._payloads[seq])
        self._payloads[seq] = payload

    def take(self, seq: int) -> Payload | None:
        """Take out the batch ``seq`` if it is the lowest, None if it is not kept."""
        payload = self._payloads.pop(seq, None)
        if payload is None:
            return None
        self.bytes -= len(payload)
        if not self._payloads:
            self.clear()
            return payload
        self._from += 1
        if self._from * 2 > len(self._order):
            del self._order[: self._from]
            self._from = 0
        return payload

    def drop_last(self) -> None:
        """Drop the highest one."""
        self.bytes -= len(self._payloads.pop(self._order.pop()))
        if not self._payloads:
            self.clear()

    def drop_before(self, seq: int) -> int:
        """Drop everything below ``seq``; how many that were."""
        end = bisect_left(self._order, seq, lo=self._from)
        gone = self._order[self._from : end]
        for number in gone:
            self.bytes -= len(self._payloads.pop(number))
        del self._order[:end]
        self._from = 0
        return len(gone)

    def drop_from(self, seq: int) -> int:
        """Drop ``seq`` and everything above it; how many that were."""
        start = bisect_left(self._order, seq, lo=self._from)
        gone = self._order[start:]
        for number in gone:
            self.bytes -= len(self._payloads.pop(number))
        del self._order[start:]
        if not self._payloads:
            self.clear()
        return len(gone)

    def clear(self) -> None:
        """Drop everything."""
        self._payloads.clear()
        self._order.clear()
        self._from = 0
        self.bytes = 0
