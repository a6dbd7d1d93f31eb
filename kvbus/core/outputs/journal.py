"""The newest batches of one output stream, kept for replay.

The journal is limited in batches and in bytes of its entries. Consecutive empty batches (heartbeats) are one entry, so
that an idle night does not push the day's batches out of the journal.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from typing import Final, NamedTuple

SPARE: Final = 1024
"""Maximum number of seqs of dropped entries that are kept. They are deleted together."""


class Entry(NamedTuple):
    """A number of consecutive ``batches`` from ``seq`` on with the same payload.

    Only ``empty`` batches share an entry.
    """

    seq: int
    payload: bytes
    batches: int = 1
    empty: bool = False


class Journal:
    """A ring of entries, found by seq. Entries also have absolute positions, which do not change when it is trimmed.

    There are ten thousand entries for each stream, so an entry is not a Python object: it consists of a payload, eight
    bytes for the seq, and a count if it is empty.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.max_batches = max_batches
        self.max_bytes = max_bytes
        self.bytes = 0
        self._payloads: deque[bytes] = deque()
        self._seqs: array[int] = array("Q")
        """The first seq of each entry, after the seqs of :attr:`_spare` dropped entries."""
        self._spare = 0
        """Number of leading seqs whose entries were dropped."""
        self._empty: dict[int, int] = {}
        """Number of empty batches per entry, by absolute position."""
        self.trimmed = 0
        """Number of entries dropped at a limit so far. It is the absolute position of the first entry kept."""

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def first_seq(self) -> int | None:
        """The oldest seq kept; None if the journal is empty."""
        return self._seqs[self._spare] if self._payloads else None

    @property
    def beat(self) -> bytes | None:
        """The payload of the newest batch if it is empty.

        The next empty batch must have the same one, for exact replay.
        """
        return self._payloads[-1] if self._newest in self._empty else None

    @property
    def _newest(self) -> int:
        """The absolute position of the newest entry; one below the next position if there is none."""
        return self.trimmed + len(self._payloads) - 1

    def append(self, seq: int, payload: bytes, *, empty: bool = False) -> None:
        """Keep one batch. If a limit is exceeded, drop the oldest batches, but never the newest one."""
        payloads = self._payloads
        if empty:
            newest = self._newest
            if newest in self._empty:
                self._empty[newest] += 1
                return
            self._empty[newest + 1] = 1
        payloads.append(payload)
        self._seqs.append(seq)
        self.bytes += len(payload)
        kept = len(payloads)
        while kept > 1 and (kept > self.max_batches or self.bytes > self.max_bytes):
            kept -= 1
            self.bytes -= len(payloads.popleft())
            if self._empty:
                self._empty.pop(self.trimmed, None)
            self.trimmed += 1
            self._spare += 1
            if self._spare == SPARE:
                del self._seqs[:SPARE]
                self._spare = 0

    def position(self, seq: int) -> int:
        """Return the absolute position of the entry that holds ``seq``; of the oldest entry if ``seq`` was dropped."""
        at = bisect_right(self._seqs, seq, self._spare) - 1 - self._spare
        return self.trimmed + max(at, 0)

    def entries(self) -> list[Entry]:
        """Return all entries, the oldest first."""
        positions = range(self.trimmed, self.trimmed + len(self))
        return [entry for position in positions if (entry := self.at(position)) is not None]

    def find(self, seq: int) -> Entry | None:
        """Return the entry that holds ``seq``; None if the journal does not have it."""
        entry = self.at(self.position(seq))
        return entry if entry is not None and entry.seq <= seq < entry.seq + entry.batches else None

    def at(self, position: int) -> Entry | None:
        """Return the entry at an absolute position; the oldest one if that was trimmed, None past the end."""
        at = max(position - self.trimmed, 0)
        if at >= len(self._payloads):
            return None
        count = self._empty.get(self.trimmed + at, 0)
        return Entry(self._seqs[self._spare + at], self._payloads[at], max(count, 1), count > 0)
