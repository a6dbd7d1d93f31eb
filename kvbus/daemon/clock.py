"""The relay's clock: it counts only the seconds in which this process was running.

A stopped process (SIGSTOP, a frozen cgroup, a node without CPU, a long garbage collection) does not read what its
peers send. When it continues, every deadline has passed on a normal clock, though no peer was late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

LONGEST_STEP: Final = 0.2
"""Seconds between two readings that count as running; the daemon's tick reads twice as often."""


class RunningClock:
    """A monotonic clock without pauses: of a step longer than :data:`LONGEST_STEP` it counts only that much.

    Args:
        read: the underlying clock, in seconds.
    """

    __slots__ = ("_announced", "_last", "_read", "paused")

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._last = read()
        self.paused = 0.0
        """Seconds of pauses so far."""
        self._announced = 0.0

    def time(self) -> float:
        """Return the time in seconds; compare it only with earlier readings of this clock."""
        now = self._read()
        step = now - self._last
        self._last = now
        if step > LONGEST_STEP:
            self.paused += step - LONGEST_STEP
        return now - self.paused

    def stood(self) -> float:
        """Return the seconds of pauses since the last call."""
        self.time()
        before, self._announced = self._announced, self.paused
        return self.paused - before
