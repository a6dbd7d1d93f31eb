"""The relay's clock: seconds in which this process was running.

A process that is stopped (SIGSTOP, a frozen cgroup, a node without CPU, a long collection) leaves what its peers have
sent unread. When it goes on, every deadline has passed by the clock on the wall, and nobody has been late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

LONGEST_STEP: Final = 0.2
"""Seconds between two readings that count as running; the daemon's tick reads twice as often."""


class RunningClock:
    """A monotonic clock that leaves out pauses: of a longer step only :data:`LONGEST_STEP` counts.

    Args:
        read: the clock underneath, in seconds.
    """

    __slots__ = ("_last", "_read", "paused")

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._last = read()
        self.paused = 0.0
        """Seconds that were left out so far."""

    def time(self) -> float:
        """Seconds, comparable with earlier readings only."""
        now = self._read()
        step = now - self._last
        self._last = now
        if step > LONGEST_STEP:
            self.paused += step - LONGEST_STEP
        return now - self.paused
