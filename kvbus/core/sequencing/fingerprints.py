"""Fingerprints of the newest batches: content, not number, tells a late copy from a batch of a new epoch."""

from __future__ import annotations

from typing import Any, Final
from zlib import crc32

RING: Final = 1024
"""How many batches back this works without asking the publisher."""


def fingerprint(payload: bytes) -> int:
    """Length and CRC-32 of a payload. It is the same in every process, because it outlives this one (``state_dir``)."""
    return len(payload) << 32 | crc32(payload)


def length(known: int) -> int:
    """The length of the payload that has this fingerprint."""
    return known >> 32


class Fingerprints:
    """:func:`fingerprint` of the last :data:`RING` batches delivered, and of batch 0 as long as the epoch lasts."""

    __slots__ = ("_first", "_ring")

    def __init__(self) -> None:
        self._ring: list[int | None] = [None] * RING
        self._first: int | None = None

    def add(self, seq: int, payload: bytes) -> int:
        """Batch ``seq`` was delivered, and is the newest one now. Returns its fingerprint."""
        known = fingerprint(payload)
        self._ring[seq % RING] = known
        if seq == 0:
            self._first = known
        return known

    def skip(self, first: int, end: int) -> None:
        """Batches ``[first, end)`` were lost."""
        for seq in range(max(first, end - RING), end):
            self._ring[seq % RING] = None

    def learn(self, seq: int, payload: bytes, following: int) -> None:
        """Batch ``seq``, which a snapshot has covered or which was given up, has been seen after all."""
        if following - RING <= seq < following and not self._knows(seq):
            self.add(seq, payload)

    def matches(self, seq: int, payload: bytes, following: int) -> bool | None:
        """Whether this is the batch delivered under ``seq``; None if that is not known.

        Args:
            seq: its number.
            payload: what came under it now.
            following: the number after the newest one delivered.
        """
        recent = following - RING <= seq < following
        known = self._first if seq == 0 else self._ring[seq % RING] if recent else None
        return None if known is None else known == fingerprint(payload)

    def newest(self, following: int) -> int:
        """The highest number below ``following`` whose fingerprint is known, -1 if none is."""
        return next((seq for seq in range(following - 1, max(following - RING, 0) - 1, -1) if self._knows(seq)), -1)

    def run_to(self, last: int, most: int) -> int:
        """Where the run of known fingerprints that ends at ``last`` begins; ``most`` of them at most."""
        start = last
        while start > 0 and last - start + 1 < min(most, RING) and self._knows(start - 1):
            start -= 1
        return start

    def _knows(self, seq: int) -> bool:
        return self._ring[seq % RING] is not None

    def dump(self) -> list[Any]:
        """Plain data for a restart."""
        return [self._first, self._ring]

    def load(self, data: list[Any]) -> None:
        """The reverse of :meth:`dump`."""
        self._first, self._ring = data
