"""Two publishers on one endpoint: lives that follow one another on a standing connection.

An engine that restarts drops its connection. Where new lives begin without that, several publishers are behind the
endpoint, and nothing on the wire tells their batches apart. Each change of life costs routers a clear and the engine a
replay of everything, so it is stopped: for a pause nothing is taken in, and then it is tried again.
"""

from __future__ import annotations

from collections import deque
from typing import Final

MAX_EPOCHS: Final = 4
"""New lives on one connection, within :data:`WINDOW`, that are taken for restarts behind a proxy."""

WINDOW: Final = 10.0
FIRST_PAUSE: Final = 5.0
MAX_PAUSE: Final = 60.0


class Conflict:
    """Counts lives and says when to pause; times in seconds on any monotonic clock."""

    __slots__ = ("_begun", "_ended", "_pause", "until")

    def __init__(self) -> None:
        self.until: float | None = None
        """When the pause ends, None while there is none."""
        self._begun: deque[float] = deque(maxlen=MAX_EPOCHS)
        self._pause = FIRST_PAUSE
        self._ended = float("-inf")

    def epoch_began(self, now: float) -> bool:
        """A new life begins; True if that makes too many, and a pause has begun."""
        if len(self._begun) == MAX_EPOCHS and now - self._begun[0] < WINDOW:
            if now - self._ended > MAX_PAUSE:
                self._pause = FIRST_PAUSE
            self.until = now + self._pause
            self._pause = min(self._pause * 2, MAX_PAUSE)
            self._begun.clear()
            return True
        self._begun.append(now)
        return False

    def over(self, now: float) -> bool:
        """Whether a pause ends now; it is forgotten then."""
        if self.until is None or now < self.until:
            return False
        self.until = None
        self._ended = now
        return True

    def reconnected(self) -> None:
        """The connection is another one: what follows on it is not held against it."""
        self.until = None
        self._begun.clear()
