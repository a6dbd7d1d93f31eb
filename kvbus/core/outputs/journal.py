"""The newest batches of one output stream, kept for replay.

Bounded in batches and in bytes, both over what is stored; empty batches (heartbeats) in a row are one entry however
many they are, so that an idle night does not push the day out of the journal.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from typing import Final, NamedTuple

SPARE: Final = 1024
"""Numbers of entries that are gone which are still kept, at most: they are let go together."""


class Entry(NamedTuple):
    """So many ``batches`` from ``seq`` on with the same payload; more than one only if the batch is ``empty``."""

    seq: int
    payload: bytes
    batches: int = 1
    empty: bool = False


class Journal:
    """A ring of entries addressed by seq; entries also have absolute positions, which do not change when it trims.

    There are ten thousand entries for each stream, so an entry is no object: it has a payload, eight bytes of number,
    and if it is empty a count.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.max_batches = max_batches
        self.max_bytes = max_bytes
        self.bytes = 0
        self._payloads: deque[bytes] = deque()
        self._seqs: array[int] = array("Q")
        """Of the first batch of each entry, behind those of entries that are gone."""
        self._spare = 0
        """So many of these are gone."""
        self._empty: dict[int, int] = {}
        """By absolute position: how many empty batches."""
        self.trimmed = 0
        """Entries ever dropped from the front, for a limit: the absolute position of the first one kept."""

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def first_seq(self) -> int | None:
        """The oldest batch kept, None while empty."""
        return self._seqs[self._spare] if self._payloads else None

    @property
    def beat(self) -> bytes | None:
        """The newest batch if it is an empty one: what goes on its run is the same, so that a replay gives it back."""
        return self._payloads[-1] if self._newest in self._empty else None

    @property
    def _newest(self) -> int:
        """The absolute position of the newest entry; of none if there is none."""
        return self.trimmed + len(self._payloads) - 1

    def append(self, seq: int, payload: bytes, *, empty: bool = False) -> None:
        """Keep one batch; the oldest ones go when a limit is passed, the newest never does."""
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
        """Absolute position of the entry that holds ``seq``, or of the oldest one if ``seq`` is gone."""
        at = bisect_right(self._seqs, seq, self._spare) - 1 - self._spare
        return self.trimmed + max(at, 0)

    def entries(self) -> list[Entry]:
        """Return all entries, the oldest first."""
        positions = range(self.trimmed, self.trimmed + len(self))
        return [entry for position in positions if (entry := self.at(position)) is not None]

    def find(self, seq: int) -> Entry | None:
        """Return the entry that holds ``seq``, None if the journal does not have it."""
        entry = self.at(self.position(seq))
        return entry if entry is not None and entry.seq <= seq < entry.seq + entry.batches else None

    def at(self, position: int) -> Entry | None:
        """The entry at an absolute position; the oldest if that one was trimmed, None past the end."""
        at = max(position - self.trimmed, 0)
        if at >= len(self._payloads):
            return None
        count = self._empty.get(self.trimmed + at, 0)
        return Entry(self._seqs[self._spare + at], self._payloads[at], max(count, 1), count > 0)
