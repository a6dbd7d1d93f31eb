"""Two publishers on one endpoint: epochs that follow one another on a standing connection.

An engine that restarts drops its connection. If new epochs begin without that, several publishers are behind the
endpoint, and nothing on the wire tells their batches apart. Each new epoch costs routers a clear and the engine a
replay of everything. So kvbus takes nothing in for a pause, and then tries again.
"""

from __future__ import annotations

from collections import deque
from typing import Final

MAX_EPOCHS: Final = 4
"""So many new epochs on one connection may be restarts behind a proxy, within :data:`WINDOW` seconds. One more not."""

WINDOW: Final = 10.0
FIRST_PAUSE: Final = 5.0
MAX_PAUSE: Final = 60.0


class Conflict:
    """Counts epochs and says when to pause; times in seconds on any monotonic clock."""

    __slots__ = ("_begun", "_ended", "_pause", "until")

    def __init__(self) -> None:
        self.until: float | None = None
        """When the pause ends, None while there is none."""
        self._begun: deque[float] = deque(maxlen=MAX_EPOCHS)
        self._pause = FIRST_PAUSE
        self._ended = float("-inf")

    def epoch_began(self, now: float) -> bool:
        """A new epoch begins. Returns whether that makes too many; then a pause has begun."""
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
        """The connection is a new one: epochs on the old one do not count any more."""
        self.until = None
        self._begun.clear()
