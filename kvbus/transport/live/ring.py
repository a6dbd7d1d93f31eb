"""The newest encoded batches of a stream, kept once for all routers that read more slowly than kvbus publishes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

import msgspec

OVERHEAD: Final = 200
"""Approximate memory in bytes that a batch in a stream's ring of recent batches needs in addition to its message."""


class Entry(msgspec.Struct, gc=False):
    """One published batch in the ring of recent batches of its stream.

    Attributes:
        message: the encoded message.
        events: number of events in the batch.
        at: the event loop's time when the batch was published.
    """

    message: bytes
    events: int
    at: float


class Share:
    """A byte limit that the rings (recent batches) of several streams share.

    The oldest batch of all rings is dropped first.

    Args:
        send_bytes: maximum number of bytes in all rings together, with :data:`OVERHEAD` bytes for each batch. The last
            batch is kept even if it is larger.
    """

    def __init__(self, send_bytes: int) -> None:
        self.bytes = 0
        self.entries = 0
        self._send_bytes = send_bytes
        self._order: deque[tuple[Ring, int]] = deque()
        """One entry for each batch of the rings, oldest first: the batch's ring, and its position in this ring.

        Some of these batches may have been dropped already.
        """

    def add(self, ring: Ring, position: int, size: int) -> None:
        """Count a batch that a ring has added.

        Args:
            ring: the ring.
            position: the batch's position in the ring.
            size: number of bytes of the batch's message.
        """
        self.bytes += size + OVERHEAD
        self.entries += 1
        self._order.append((ring, position))
        if len(self._order) > 2 * self.entries + 100:
            self._order = deque((ring, at) for ring, at in self._order if ring.first <= at < ring.end)

    def remove(self, size: int) -> None:
        """Subtract a batch that a ring has dropped from the batches and bytes of all rings that share this limit.

        ``size`` is the number of bytes of the batch's message.
        """
        self.bytes -= size + OVERHEAD
        self.entries -= 1

    def make_room(self) -> None:
        """Drop the oldest batches of all rings until the rings together are within the byte limit."""
        while self.bytes > self._send_bytes and self.entries > 1:
            ring, position = self._order.popleft()
            if ring.first <= position < ring.end and ring.give_up is not None:
                ring.give_up()


class Ring:
    """The newest batches of a stream, each at its position. Positions count the published batches of the stream from 0.

    Above a limit, the oldest batches are dropped.

    Args:
        send_hwm: maximum number of batches.
        send_bytes: maximum bytes of all messages. The newest batch is kept even if it is larger.
        share: a byte limit shared with other rings, which replaces ``send_bytes``; None for no shared limit.
    """

    def __init__(self, send_hwm: int, send_bytes: int, share: Share | None = None) -> None:
        self.first = 0
        """Position of the oldest batch in the ring."""
        self.bytes = 0
        self.give_up: Callable[[], None] | None = None
        """Called by :meth:`Share.make_room` to drop the oldest batch. It must call :meth:`pop`."""
        self.send_hwm = send_hwm
        self.send_bytes = send_bytes
        self._share = share
        self._entries: deque[Entry] = deque()

    @property
    def end(self) -> int:
        """Position of the batch that is added next."""
        return self.first + len(self._entries)

    def append(self, entry: Entry) -> None:
        """Add a batch at the end of the ring."""
        if self._share is not None:
            self._share.add(self, self.end, len(entry.message))
        self._entries.append(entry)
        self.bytes += len(entry.message)

    def skip(self, count: int) -> None:
        """Drop all batches, and use up ``count`` positions for new batches without storing these batches.

        Call this if no router needs any of these batches.
        """
        if self._entries:
            self.trim(self.end)
        self.first += count

    def trim(self, position: int) -> None:
        """Drop all batches before a position, because no router needs these batches any more."""
        entries = self._entries
        while self.first < position and entries:
            self.pop()

    def pop(self) -> Entry:
        """Drop the oldest batch and return it."""
        entry = self._entries.popleft()
        self.bytes -= len(entry.message)
        self.first += 1
        if self._share is not None:
            self._share.remove(len(entry.message))
        return entry

    def overflow(self) -> Entry | None:
        """Drop and return the oldest batch if the ring exceeds a limit. Otherwise return None."""
        entries = self._entries
        within = self._share is not None or self.bytes <= self.send_bytes
        if len(entries) < 2 or (len(entries) <= self.send_hwm and within):
            return None
        return self.pop()

    def read(self, position: int, max_bytes: int, end: int | None = None) -> tuple[list[bytes], int]:
        """Return the messages of the batches from a position on, and the position after these batches.

        The result has at most ``max_bytes`` bytes. But it always has at least one message, even if that is larger. The
        batches end before the position ``end``, if it is given.
        """
        found: list[bytes] = []
        size = 0
        for entry in islice(self._entries, position - self.first, None if end is None else end - self.first):
            if found and size + len(entry.message) > max_bytes:
                break
            found.append(entry.message)
            size += len(entry.message)
        return found, position + len(found)

    def events_from(self, position: int) -> int:
        """Return the number of events in all batches from a position on."""
        return sum(entry.events for entry in islice(self._entries, position - self.first, None))

    def published(self, position: int) -> float | None:
        """Return the event loop's time when the batch at a position was published; None if no batch is there yet."""
        at = position - self.first
        return self._entries[at].at if at < len(self._entries) else None
