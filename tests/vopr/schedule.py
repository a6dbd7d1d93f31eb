"""Virtual time: orders all events of a simulated world."""

from __future__ import annotations

import heapq
import random
import zlib
from collections.abc import Callable
from typing import Any

EPOCH = 1_700_000_000.0
"""Wall-clock time at the start of a world, in Unix seconds."""


class Schedule:
    """Events by time. Events of the same time run in the order in which they were scheduled.

    Args:
        seed: source of all random numbers of the world.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 100.0
        self.steps = 0
        """Number of events handled so far: those of the world, and each callback of a process."""
        self.wall_offset = EPOCH
        self.digest = 0
        """A checksum of the bytes that routers have received. It is the same in two runs of a seed."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def chance(self, name: str) -> random.Random:
        """Return random numbers of their own for each name, so that a fault left out changes little elsewhere."""
        return random.Random(zlib.crc32(f"{self.seed} {name}".encode()))

    def wall(self) -> float:
        """Return the wall-clock time."""
        return self.now + self.wall_offset

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        """Call ``what`` at a time."""
        self._order += 1
        heapq.heappush(self._heap, (max(when, self.now), self._order, what, args))

    def after(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        """Call ``what`` after these seconds."""
        self.at(self.now + seconds, what, *args)

    def run_until(self, end: float) -> None:
        """Run all events until a time."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= end:
            self.now, _, what, args = pop(heap)
            self.steps += 1
            what(*args)
        self.now = end

    def note(self, data: bytes) -> None:
        """Add data to the checksum."""
        self.digest = zlib.crc32(data, self.digest)
