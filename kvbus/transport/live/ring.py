"""The newest batches of a stream, encoded, kept once for all routers that are behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

import msgspec

OVERHEAD: Final = 200
"""Bytes that an entry takes beside its message, about."""


class Entry(msgspec.Struct, gc=False):
    """One batch: its encoded message, the events in it, and the loop's time when it was published."""

    message: bytes
    events: int
    at: float


class Share:
    """The bytes that several rings may keep together. The entry that is the oldest of all goes first.

    Args:
        send_bytes: maximum number of bytes in all rings, with :data:`OVERHEAD` for each entry. One entry is kept
            whatever its size.
    """

    def __init__(self, send_bytes: int) -> None:
        self.bytes = 0
        self.entries = 0
        self._send_bytes = send_bytes
        self._order: deque[tuple[Ring, int]] = deque()
        """Ring and position of every entry, the oldest first; also of some that are gone."""

    def add(self, ring: Ring, position: int, size: int) -> None:
        """A ring keeps one more entry."""
        self.bytes += size + OVERHEAD
        self.entries += 1
        self._order.append((ring, position))
        if len(self._order) > 2 * self.entries + 100:
            self._order = deque((ring, at) for ring, at in self._order if ring.first <= at < ring.end)

    def remove(self, size: int) -> None:
        """A ring has let go of an entry."""
        self.bytes -= size + OVERHEAD
        self.entries -= 1

    def make_room(self) -> None:
        """Have the oldest entries dropped, until the rest is within the limit."""
        while self.bytes > self._send_bytes and self.entries > 1:
            ring, position = self._order.popleft()
            if ring.first <= position < ring.end and ring.give_up is not None:
                ring.give_up()


class Ring:
    """Entries by position. A position never changes; the oldest entries go when a limit is passed.

    Args:
        send_hwm: maximum number of entries.
        send_bytes: maximum number of bytes. The newest entry is kept whatever its size.
        share: the bytes that this ring shares with other rings; it takes the place of ``send_bytes``.
    """

    def __init__(self, send_hwm: int, send_bytes: int, share: Share | None = None) -> None:
        self.first = 0
        """Position of the oldest entry."""
        self.bytes = 0
        self.give_up: Callable[[], None] | None = None
        """What :meth:`Share.make_room` calls: it has to :meth:`pop` the oldest entry."""
        self.send_hwm = send_hwm
        self.send_bytes = send_bytes
        self._share = share
        self._entries: deque[Entry] = deque()

    @property
    def end(self) -> int:
        """The position of the next entry."""
        return self.first + len(self._entries)

    def append(self, entry: Entry) -> None:
        """Keep one more entry."""
        if self._share is not None:
            self._share.add(self, self.end, len(entry.message))
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
            self.pop()

    def pop(self) -> Entry:
        """Let go of the oldest entry, and return it."""
        entry = self._entries.popleft()
        self.bytes -= len(entry.message)
        self.first += 1
        if self._share is not None:
            self._share.remove(len(entry.message))
        return entry

    def overflow(self) -> Entry | None:
        """Let go of the oldest entry if a limit is passed, and return it; else None."""
        entries = self._entries
        within = self._share is not None or self.bytes <= self.send_bytes
        if len(entries) < 2 or (len(entries) <= self.send_hwm and within):
            return None
        return self.pop()

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
