"""The journal: the newest batches of one output stream, kept for replays to routers.

The journal has a maximum number of entries and a maximum size in bytes. Consecutive empty batches (heartbeats) share
one entry, so that the heartbeats of an idle stream do not push older batches out of the journal.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from typing import Final, NamedTuple

SPARE: Final = 1024
"""Number of dropped entries at which the journal deletes the seqs of all these entries from its array together.

Deleting them one by one would be slow, because each deletion moves all later seqs.
"""


class Entry(NamedTuple):
    """Consecutive batches with the same payload. Only empty batches share an entry; any other batch has its own.

    ``seq`` is the seq of the first batch, and ``batches`` the number of batches. ``empty`` marks empty batches.
    """

    seq: int
    payload: bytes
    batches: int = 1
    empty: bool = False


class Journal:
    """The newest batches of one stream, as a ring buffer of entries, which are found by seq.

    Entries also have absolute positions. A position does not change when older entries are dropped. Each stream has up
    to ten thousand entries, so to save memory an entry is not a Python object. It consists of a payload and eight bytes
    for the seq. An entry of consecutive empty batches also has their number.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.max_batches = max_batches
        self.max_bytes = max_bytes
        self.bytes = 0
        self._payloads: deque[bytes] = deque()
        self._seqs: array[int] = array("Q")
        """The seq of the first batch of each entry.

        The array begins with the seqs of :attr:`_spare` dropped entries. They are removed only when there are
        :data:`SPARE` of them, because each removal moves the complete array.
        """
        self._spare = 0
        """Number of items at the beginning of :attr:`_seqs` whose entries were dropped."""
        self._empty: dict[int, int] = {}
        """Number of batches in each entry that holds empty batches.

        The key is the absolute position of the entry, counted from the first entry ever added to the journal.
        """
        self.trimmed = 0
        """Number of entries dropped so far because of a limit.

        It is also the absolute position of the oldest entry, counted from the first entry ever added to the journal.
        """

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def first_seq(self) -> int | None:
        """The seq of the oldest batch in the journal; None if the journal is empty."""
        return self._seqs[self._spare] if self._payloads else None

    @property
    def beat(self) -> bytes | None:
        """The payload of the newest batch if that batch is empty; otherwise None.

        A further empty batch must have the same payload, because both share an entry and a replay must repeat them
        exactly.
        """
        return self._payloads[-1] if self._newest in self._empty else None

    @property
    def _newest(self) -> int:
        """The absolute position of the newest entry, counted from the first entry ever added to the journal.

        If the journal is empty, it is the position of the last dropped entry; -1 if there was none.
        """
        return self.trimmed + len(self._payloads) - 1

    def append(self, seq: int, payload: bytes, *, empty: bool = False) -> None:
        """Add one batch. If the journal then exceeds a limit, drop the oldest entries, but never the newest one."""
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
        """Return the absolute position of the entry that contains ``seq``, counted from the first entry ever added.

        If that entry was dropped, return the position of the oldest entry.
        """
        at = bisect_right(self._seqs, seq, self._spare) - 1 - self._spare
        return self.trimmed + max(at, 0)

    def entries(self) -> list[Entry]:
        """Return all entries of the journal, the oldest entry first."""
        positions = range(self.trimmed, self.trimmed + len(self))
        return [entry for position in positions if (entry := self.at(position)) is not None]

    def find(self, seq: int) -> Entry | None:
        """Return the entry that contains ``seq``; None if the journal does not contain it."""
        entry = self.at(self.position(seq))
        return entry if entry is not None and entry.seq <= seq < entry.seq + entry.batches else None

    def at(self, position: int) -> Entry | None:
        """Return the entry at an absolute position, counted from the first entry ever added to the journal.

        If that entry was dropped, return the oldest entry. Return None if the position is after the newest entry.
        """
        at = max(position - self.trimmed, 0)
        if at >= len(self._payloads):
            return None
        count = self._empty.get(self.trimmed + at, 0)
        return Entry(self._seqs[self._spare + at], self._payloads[at], max(count, 1), count > 0)
