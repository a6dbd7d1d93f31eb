"""How many answers all replay and snapshot servers of one output may send at once, handed out first come, first served.

A place that is free belongs to the server that has waited longest. Otherwise one that has requests waiting all the time
would take every place that it releases, and another one's requesters would never have their turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvbus.core.stats import OutputStats


class Budget:
    """The places of one output.

    Args:
        limit: how many there are.
        stats: counters of the output.
    """

    def __init__(self, limit: int, stats: OutputStats) -> None:
        self.limit = limit
        self.stats = stats
        self._waiting: deque[Callable[[], None]] = deque()
        stats.replay_sessions_limit = limit

    def take(self, when_free: Callable[[], None]) -> bool:
        """Take a place, or return False and call ``when_free`` once there is one. Then take it, or :meth:`leave`."""
        waiting = self._waiting
        if self.stats.replay_sessions >= self.limit or (waiting and waiting[0] != when_free):
            if when_free not in waiting:
                waiting.append(when_free)
            return False
        if waiting:
            waiting.popleft()
        self.stats.replay_sessions += 1
        self._call_next()
        return True

    def release(self, count: int) -> None:
        """Release the places of ``count`` finished answers."""
        self.stats.replay_sessions -= count
        self._call_next()

    def leave(self, when_free: Callable[[], None]) -> None:
        """Wait no more."""
        if when_free in self._waiting:
            self._waiting.remove(when_free)
            self._call_next()

    def _call_next(self) -> None:
        if self._waiting and self.stats.replay_sessions < self.limit:
            self._waiting[0]()
