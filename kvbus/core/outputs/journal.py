"""The newest batches of one output stream, kept for replay.

Bounded in batches and in bytes, both over what is stored; empty batches (heartbeats) in a row are one entry however
many they are, so that an idle night does not push the day out of the journal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final

from kvbus.core.outputs.journal_entry import Entry

RUNS: Final = 64
"""Entries that are given at a time."""

RUNS_BYTES: Final = 16 * 1024
"""Payload bytes that are given at a time, about. Whoever has them may hold them long after the journal let go."""

Run = tuple[int, bytes, int]
"""Batches with one payload: the first one's seq, the payload, how many."""


class Journal:
    """A ring of entries addressed by seq; entries also have absolute positions, which do not change when it trims."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.max_batches = max_batches
        self.max_bytes = max_bytes
        self.bytes = 0
        self._entries: deque[Entry] = deque()
        self.trimmed = 0
        """Entries ever dropped from the front, for a limit: the absolute position of the first one kept."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def first_seq(self) -> int | None:
        """The oldest batch kept, None while empty."""
        return self._entries[0].seq if self._entries else None

    @property
    def beat(self) -> bytes | None:
        """The newest batch if it is an empty one: what goes on its run is the same, so that a replay gives it back."""
        return self._entries[-1].payload if self._entries and self._entries[-1].empty else None

    def append(self, seq: int, payload: bytes, *, empty: bool = False) -> None:
        """Keep one batch; the oldest ones go when a limit is passed, the newest never does."""
        entries = self._entries
        if empty and entries and entries[-1].empty:
            entries[-1].count += 1
            return
        entries.append(Entry(seq, payload, 1, empty))
        self.bytes += len(payload)
        while len(entries) > 1 and (len(entries) > self.max_batches or self.bytes > self.max_bytes):
            self.bytes -= len(entries.popleft().payload)
            self.trimmed += 1

    def position(self, seq: int) -> int:
        """Absolute position of the entry that holds ``seq``, or of the oldest one if ``seq`` is gone."""
        at = bisect_right(self._entries, seq, key=lambda entry: entry.seq) - 1
        return self.trimmed + max(at, 0)

    def runs(self, seq: int, end: int) -> list[Run]:
        """Some of the batches from ``seq`` to ``end``, in order from ``seq`` on; none if ``seq`` is not kept."""
        position = self.position(seq)
        found: list[Run] = []
        size = 0
        while seq < end and len(found) < RUNS and size < RUNS_BYTES:
            entry = self.at(position)
            if entry is None or not entry.seq <= seq < entry.seq + entry.count:
                break
            after = min(end, entry.seq + entry.count)
            found.append((seq, entry.payload, after - seq))
            size += len(entry.payload)
            seq = after
            position += 1
        return found

    def at(self, position: int) -> Entry | None:
        """The entry at an absolute position; the oldest if that one was trimmed, None past the end."""
        at = max(position - self.trimmed, 0)
        return self._entries[at] if at < len(self._entries) else None
