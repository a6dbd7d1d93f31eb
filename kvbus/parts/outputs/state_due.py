"""When a log gets a stream's state again, though nothing is missing. Pure.

For readers that begin, so that they read little: a state is due as soon as the batches behind the newest one have as
many bytes as it has, and 4 MiB at least. So all states but the newest have at most the bytes of all batches, and at
most twice the batches' bytes are written.

For retention: a state is due after a fixed time, and where the log has let go of the newest one already. A log may keep
nothing for long. So that kvbus does not write states alone to it, each such state doubles the time to the next look.
"""

from __future__ import annotations

from typing import Final

from kvbus.parts.log.follower import LEASE

OVERDUE: Final = 10.0
"""Seconds that a state may be late before somebody hears of it."""

LEAST_TAIL: Final = 4 * 1024 * 1024
"""Bytes behind a state before a smaller one is written again."""


class StateDue:
    """Of one stream.

    Args:
        every: seconds after which the state is due.
        now: when the stream was opened.

    Attributes:
        position: of the newest state of this turn; None if there is none.
        trimmed: the log has that state no more.
    """

    def __init__(self, every: float, now: float) -> None:
        self._every = every
        self._written_at = now
        """When the newest state of all turns was written; before it, when the stream was opened."""
        self._tail_bytes = self._state_bytes = 0
        self._state_at = self._look_at = 0.0
        self._pause = LEASE
        self.position: int | None = None
        self.trimmed = False

    def begin(self, now: float) -> None:
        """A turn begins. Its first state is missing, and not due: the appender asks for that one."""
        self._state_at = now
        self.position, self.trimmed = None, False

    def wrote_batches(self, size: int) -> None:
        """Records of batches were appended, of so many bytes."""
        self._tail_bytes += size

    def wrote_state(self, size: int, position: int, now: float) -> None:
        """A state was appended, of so many bytes, for whatever reason."""
        self._tail_bytes, self._state_bytes, self.position = 0, size, position
        self._state_at = self._written_at = now
        self._pause = min(2 * self._pause, max(LEASE, self._every)) if self.trimmed else self._pause
        self._look_at = now + self._pause
        self.trimmed = False

    def due(self, now: float) -> bool:
        """Whether the state is due."""
        paid = self._tail_bytes >= max(self._state_bytes, LEAST_TAIL)
        return paid or self.trimmed or now - self._state_at >= self._every

    def overdue(self, now: float) -> bool:
        """Whether the newest state is older than it may be."""
        return now - self._written_at > self._every + OVERDUE

    def looks(self, now: float) -> bool:
        """Whether it is time to see if the log has the newest state still."""
        return self.position is not None and not self.trimmed and now >= self._look_at

    def looked(self, now: float, *, kept: bool) -> None:
        """What was seen."""
        self.trimmed = not kept
        if kept:
            self._pause = LEASE
            self._look_at = now + LEASE
