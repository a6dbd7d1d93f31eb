"""Fingerprints of delivered batches. They distinguish a late copy from a batch of a new epoch with the same seq."""

from __future__ import annotations

from typing import Any, Final
from zlib import crc32

RING: Final = 1024
"""Number of newest batches whose fingerprints are kept.

If a batch is older, only an answer of the publisher can show to which epoch it belongs.
"""


def fingerprint(payload: bytes) -> int:
    """Return the fingerprint of a payload: its length and its CRC-32.

    kvbus saves fingerprints in ``state_dir``, so they must be the same in every process and version.
    """
    return len(payload) << 32 | crc32(payload)


def length(known: int) -> int:
    """Return the length in bytes of the payload that has the fingerprint ``known``."""
    return known >> 32


class Fingerprints:
    """The fingerprints of the last :data:`RING` delivered batches, and of batch 0 of the epoch."""

    __slots__ = ("_first", "_ring")

    def __init__(self) -> None:
        self._ring: list[int | None] = [None] * RING
        self._first: int | None = None

    def add(self, seq: int, payload: bytes) -> int:
        """Record the fingerprint of batch ``seq``, which is now the newest delivered one, and return it."""
        known = self._ring[seq % RING] = fingerprint(payload)
        if seq == 0:
            self._first = known
        return known

    def skip(self, first: int, end: int) -> None:
        """Record that batches ``[first, end)`` were never received, so that they have no fingerprints."""
        for seq in range(max(first, end - RING), end):
            self._ring[seq % RING] = None

    def learn(self, seq: int, payload: bytes, following: int) -> None:
        """Record the fingerprint of batch ``seq``, which arrived only after kvbus had continued without it.

        A snapshot included the batch, or kvbus had given it up.
        """
        if following - RING <= seq < following and not self._knows(seq):
            self.add(seq, payload)

    def matches(self, seq: int, payload: bytes, following: int) -> bool | None:
        """Return whether a batch equals the batch that was delivered under the same seq.

        Return None if the fingerprint of the delivered batch is not known: only those of batch 0 and of the newest
        delivered batches are kept.

        Args:
            seq: the seq of the batch.
            payload: the payload of the batch.
            following: the seq after that of the newest delivered batch.
        """
        recent = following - RING <= seq < following
        known = self._first if seq == 0 else self._ring[seq % RING] if recent else None
        return None if known is None else known == fingerprint(payload)

    def newest(self, following: int) -> int:
        """Return the highest seq below ``following`` whose fingerprint is known; -1 if no fingerprint is known."""
        return next((seq for seq in range(following - 1, max(following - RING, 0) - 1, -1) if self._knows(seq)), -1)

    def run_to(self, last: int, most: int) -> int:
        """Return the first seq of the run of consecutive seqs with known fingerprints that ends at ``last``.

        The run has at most ``most`` seqs.
        """
        start = last
        while start > 0 and last - start + 1 < min(most, RING) and self._knows(start - 1):
            start -= 1
        return start

    def _knows(self, seq: int) -> bool:
        return self._ring[seq % RING] is not None

    def dump(self) -> list[Any]:
        """Return the fingerprints as plain data, which a new process can load after a restart."""
        return [self._first, self._ring]

    def load(self, data: list[Any]) -> None:
        """Restore the fingerprints from the result of :meth:`dump`."""
        self._first, self._ring = data
