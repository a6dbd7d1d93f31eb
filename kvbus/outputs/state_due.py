"""When a log gets a stream's state again, though nothing is missing. Pure.

For readers that begin, so that they read little: as soon as the batches behind the newest state have as many bytes as
it has. What such states take is paid for by batches, byte for byte, and what one takes beyond that is owed by the next:
at any moment they have at most the bytes of all batches and of one state, so twice the batches' bytes are written.

For retention: after a fixed time, and where the log has let go of the newest state already. That a log keeps none of
what it is given shall not make it all that is written, so each such state doubles the time to the next look.
"""

from __future__ import annotations

from typing import Final

from kvbus.log.follower import LEASE

LEAST_TAIL: Final = 4 * 1024 * 1024
"""Bytes behind a state before a smaller one is written again."""


class StateDue:
    """Of one stream.

    Args:
        every: seconds after which the state is due.

    Attributes:
        position: of the newest state of this turn; None if there is none.
        trimmed: the log has that state no more.
    """

    def __init__(self, every: float) -> None:
        self._every = every
        self._paid = 0
        """Bytes of batches that no state has used up; below 0 where the newest state took more."""
        self._state_bytes = 0
        self._state_at = self._look_at = 0.0
        self._pause = LEASE
        self.position: int | None = None
        self.trimmed = False

    def begin(self, now: float) -> None:
        """A turn begins; its first state is missing, so it is no matter of this."""
        self._state_at = now
        self.position, self.trimmed = None, False

    def wrote_batches(self, size: int) -> None:
        """Records of batches were appended, of so many bytes."""
        self._paid += size

    def wrote_state(self, size: int, position: int, now: float, *, missing: bool) -> None:
        """A state was appended. One that was missing, or for retention, is paid for by nobody; what is owed stays."""
        self._paid = min(0, self._paid if missing or not self._earned else self._paid - size)
        self._state_bytes, self.position = size, position
        self._state_at = now
        self._pause = min(2 * self._pause, max(LEASE, self._every)) if self.trimmed else self._pause
        self._look_at = now + self._pause
        self.trimmed = False

    def due(self, now: float) -> bool:
        """Whether the state is due."""
        return self._earned or self.trimmed or now - self._state_at >= self._every

    @property
    def _earned(self) -> bool:
        return self._paid >= max(self._state_bytes, LEAST_TAIL)

    def looks(self, now: float) -> bool:
        """Whether it is time to see if the log has the newest state still."""
        return self.position is not None and not self.trimmed and now >= self._look_at

    def looked(self, now: float, *, kept: bool) -> None:
        """What was seen."""
        self.trimmed = not kept
        if kept:
            self._pause = LEASE
            self._look_at = now + LEASE
