"""Virtual time: everything that happens in a simulated world, in one order."""

from __future__ import annotations

import heapq
import random
import zlib
from collections.abc import Callable
from typing import Any

EPOCH = 1_700_000_000.0
"""The wall clock of a world at its beginning."""


class Schedule:
    """Events by time. Those of one time happen in the order in which they were asked for.

    Args:
        seed: every chance in the world comes from it.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 100.0
        self.steps = 0
        """Events handled so far: those of the world, and each callback of a process."""
        self.wall_offset = EPOCH
        self.digest = 0
        """A checksum of what routers have received, and when: two runs of one seed have the same."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def chance(self, name: str) -> random.Random:
        """Return a stream of chance of its own, so that a fault left out changes as little as possible elsewhere."""
        return random.Random(zlib.crc32(f"{self.seed} {name}".encode()))

    def wall(self) -> float:
        """Return the time of day."""
        return self.now + self.wall_offset

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        """Call ``what`` at a time."""
        self._order += 1
        heapq.heappush(self._heap, (max(when, self.now), self._order, what, args))

    def after(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        """Call ``what`` in so many seconds."""
        self.at(self.now + seconds, what, *args)

    def run_until(self, end: float) -> None:
        """Let everything happen until a time."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= end:
            self.now, _, what, args = pop(heap)
            self.steps += 1
            what(*args)
        self.now = end

    def note(self, data: bytes) -> None:
        """Add to the checksum."""
        self.digest = zlib.crc32(data, self.digest)
