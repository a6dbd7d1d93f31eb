"""The newest batches of a stream, encoded, kept once for all routers that are behind."""

from __future__ import annotations

from collections import deque
from itertools import islice

import msgspec


class Entry(msgspec.Struct, gc=False):
    """One batch: its encoded message, the events in it, and the loop's time when it was published."""

    message: bytes
    events: int
    at: float


class Ring:
    """Entries by position. A position never changes; the oldest entries go when a limit is passed.

    Args:
        max_batches: entries kept.
        max_bytes: bytes kept; the newest entry is kept whatever its size.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.first = 0
        """Position of the oldest entry."""
        self.bytes = 0
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._entries: deque[Entry] = deque()

    @property
    def end(self) -> int:
        """The position of the next entry."""
        return self.first + len(self._entries)

    def append(self, entry: Entry) -> None:
        """Keep one more entry."""
        self._entries.append(entry)
        self.bytes += len(entry.message)

    def skip(self, count: int) -> None:
        """Let ``count`` positions pass: nobody is behind, so nothing is kept."""
        if self._entries:
            self.trim(self.end)
        self.first += count

    def trim(self, position: int) -> None:
        """Let go of everything before a position."""
        entries = self._entries
        while self.first < position and entries:
            self.bytes -= len(entries.popleft().message)
            self.first += 1

    def overflow(self) -> Entry | None:
        """Let go of the oldest entry if a limit is passed, and return it; else None."""
        entries = self._entries
        if len(entries) < 2 or (len(entries) <= self._max_batches and self.bytes <= self._max_bytes):
            return None
        entry = entries.popleft()
        self.bytes -= len(entry.message)
        self.first += 1
        return entry

    def read(self, position: int, max_bytes: int) -> tuple[bytes, int]:
        """Return messages from a position on, joined, at least one; and the position behind them."""
        found: list[bytes] = []
        size = 0
        for entry in islice(self._entries, position - self.first, None):
            if found and size + len(entry.message) > max_bytes:
                break
            found.append(entry.message)
            size += len(entry.message)
        return b"".join(found), position + len(found)

    def events_from(self, position: int) -> int:
        """How many events the entries from a position on hold."""
        return sum(entry.events for entry in islice(self._entries, position - self.first, None))

    def published(self, position: int) -> float | None:
        """When the entry at a position was published; None at the end."""
        at = position - self.first
        return self._entries[at].at if at < len(self._entries) else None
