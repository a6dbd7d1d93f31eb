"""The newest encoded batches of a stream, kept once for all routers that are behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

import msgspec

OVERHEAD: Final = 200
"""Approximate memory of an entry in bytes, without its message."""


class Entry(msgspec.Struct, gc=False):
    """One batch: its encoded message, its number of events, and the event loop's time of publication."""

    message: bytes
    events: int
    at: float


class Share:
    """The byte limit that several rings share. The oldest entry of all rings is dropped first.

    Args:
        send_bytes: maximum number of bytes in all rings, with :data:`OVERHEAD` for each entry. The last entry is kept
            even if it is larger.
    """

    def __init__(self, send_bytes: int) -> None:
        self.bytes = 0
        self.entries = 0
        self._send_bytes = send_bytes
        self._order: deque[tuple[Ring, int]] = deque()
        """Ring and position of every entry, the oldest first. Some of these entries may be dropped already."""

    def add(self, ring: Ring, position: int, size: int) -> None:
        """Count an entry that a ring has added; ``size`` is its message's bytes."""
        self.bytes += size + OVERHEAD
        self.entries += 1
        self._order.append((ring, position))
        if len(self._order) > 2 * self.entries + 100:
            self._order = deque((ring, at) for ring, at in self._order if ring.first <= at < ring.end)

    def remove(self, size: int) -> None:
        """Count an entry that a ring has dropped; ``size`` is its message's bytes."""
        self.bytes -= size + OVERHEAD
        self.entries -= 1

    def make_room(self) -> None:
        """Drop the oldest entries until the rings are within the limit."""
        while self.bytes > self._send_bytes and self.entries > 1:
            ring, position = self._order.popleft()
            if ring.first <= position < ring.end and ring.give_up is not None:
                ring.give_up()


class Ring:
    """Entries by position. An entry's position never changes. Above a limit the oldest entries are dropped.

    Args:
        send_hwm: maximum number of entries.
        send_bytes: maximum number of bytes. The newest entry is kept even if it is larger.
        share: a byte limit shared with other rings; it replaces ``send_bytes``.
    """

    def __init__(self, send_hwm: int, send_bytes: int, share: Share | None = None) -> None:
        self.first = 0
        """Position of the oldest entry."""
        self.bytes = 0
        self.give_up: Callable[[], None] | None = None
        """Called by :meth:`Share.make_room`; it must :meth:`pop` the oldest entry."""
        self.send_hwm = send_hwm
        self.send_bytes = send_bytes
        self._share = share
        self._entries: deque[Entry] = deque()

    @property
    def end(self) -> int:
        """Position of the next entry."""
        return self.first + len(self._entries)

    def append(self, entry: Entry) -> None:
        """Add an entry."""
        if self._share is not None:
            self._share.add(self, self.end, len(entry.message))
        self._entries.append(entry)
        self.bytes += len(entry.message)

    def skip(self, count: int) -> None:
        """Advance by ``count`` positions without entries, and drop all entries: no router needs them."""
        if self._entries:
            self.trim(self.end)
        self.first += count

    def trim(self, position: int) -> None:
        """Drop all entries before a position."""
        entries = self._entries
        while self.first < position and entries:
            self.pop()

    def pop(self) -> Entry:
        """Drop the oldest entry and return it."""
        entry = self._entries.popleft()
        self.bytes -= len(entry.message)
        self.first += 1
        if self._share is not None:
            self._share.remove(len(entry.message))
        return entry

    def overflow(self) -> Entry | None:
        """Drop and return the oldest entry if the ring exceeds a limit; else return None."""
        entries = self._entries
        within = self._share is not None or self.bytes <= self.send_bytes
        if len(entries) < 2 or (len(entries) <= self.send_hwm and within):
            return None
        return self.pop()

    def read(self, position: int, max_bytes: int) -> tuple[bytes, int]:
        """Return joined messages from a position on, and the next position: ``max_bytes`` or at least one message."""
        found: list[bytes] = []
        size = 0
        for entry in islice(self._entries, position - self.first, None):
            if found and size + len(entry.message) > max_bytes:
                break
            found.append(entry.message)
            size += len(entry.message)
        return b"".join(found), position + len(found)

    def events_from(self, position: int) -> int:
        """Return the number of events in the entries from a position on."""
        return sum(entry.events for entry in islice(self._entries, position - self.first, None))

    def published(self, position: int) -> float | None:
        """Return the event loop's time when the entry at a position was published; None at the end."""
        at = position - self.first
        return self._entries[at].at if at < len(self._entries) else None
