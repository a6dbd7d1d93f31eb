"""Fingerprints of the newest batches. They distinguish a late copy from a batch of a new epoch with the same seq."""

from __future__ import annotations

from typing import Any, Final
from zlib import crc32

RING: Final = 1024
"""Number of batches that can be compared without asking the publisher."""


def fingerprint(payload: bytes) -> int:
    """Return length and CRC-32 of a payload. The value outlives the process (``state_dir``), so it must not vary."""
    return len(payload) << 32 | crc32(payload)


def length(known: int) -> int:
    """Return the length of the payload with this fingerprint."""
    return known >> 32


class Fingerprints:
    """:func:`fingerprint` of the last :data:`RING` delivered batches, and of the epoch's batch 0."""

    __slots__ = ("_first", "_ring")

    def __init__(self) -> None:
        self._ring: list[int | None] = [None] * RING
        self._first: int | None = None

    def add(self, seq: int, payload: bytes) -> int:
        """Record the delivery of batch ``seq``, which is now the newest one; return its fingerprint."""
        known = fingerprint(payload)
        self._ring[seq % RING] = known
        if seq == 0:
            self._first = known
        return known

    def skip(self, first: int, end: int) -> None:
        """Record that batches ``[first, end)`` were lost."""
        for seq in range(max(first, end - RING), end):
            self._ring[seq % RING] = None

    def learn(self, seq: int, payload: bytes, following: int) -> None:
        """Record batch ``seq``, which a snapshot has covered or which was given up, and which has come after all."""
        if following - RING <= seq < following and not self._knows(seq):
            self.add(seq, payload)

    def matches(self, seq: int, payload: bytes, following: int) -> bool | None:
        """Return whether this is the batch delivered under ``seq``; None if unknown.

        Args:
            seq: the number.
            payload: the payload to compare.
            following: the number after the newest delivered batch.
        """
        recent = following - RING <= seq < following
        known = self._first if seq == 0 else self._ring[seq % RING] if recent else None
        return None if known is None else known == fingerprint(payload)

    def newest(self, following: int) -> int:
        """Return the highest number below ``following`` whose fingerprint is known; -1 if none is known."""
        return next((seq for seq in range(following - 1, max(following - RING, 0) - 1, -1) if self._knows(seq)), -1)

    def run_to(self, last: int, most: int) -> int:
        """Return the start of the run of known fingerprints that ends at ``last``.

        The run has at most ``most`` batches.
        """
        start = last
        while start > 0 and last - start + 1 < min(most, RING) and self._knows(start - 1):
            start -= 1
        return start

    def _knows(self, seq: int) -> bool:
        return self._ring[seq % RING] is not None

    def dump(self) -> list[Any]:
        """Return plain data for a restart."""
        return [self._first, self._ring]

    def load(self, data: list[Any]) -> None:
        """Restore the result of :meth:`dump`."""
        self._first, self._ring = data
