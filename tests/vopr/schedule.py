"""The virtual time of a simulated world: a schedule that orders all events of the world."""

from __future__ import annotations

import heapq
import random
import zlib
from collections.abc import Callable
from typing import Any

EPOCH = 1_700_000_000.0
"""Wall-clock time at the start of a world, in Unix seconds."""


class Schedule:
    """The future events of a world, in the order of time. Events of the same time run in the order of their scheduling.

    Args:
        seed: seed of all random numbers of the world.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 100.0
        self.steps = 0
        """Number of executed events: events of the world, and callbacks of processes."""
        self.wall_offset = EPOCH
        self.digest = 0
        """Checksum of the bytes that routers have received. Two runs of a seed have the same checksum."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def chance(self, name: str) -> random.Random:
        """Return a generator of random numbers for one purpose, which ``name`` states.

        Each purpose has its own generator, so that removing a fault from a plan changes little else.
        """
        return random.Random(zlib.crc32(f"{self.seed} {name}".encode()))

    def wall(self) -> float:
        """Return the simulated wall-clock time in Unix seconds."""
        return self.now + self.wall_offset

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        """Schedule a call of ``what`` at a time of the world's clock, in seconds."""
        self._order += 1
        heapq.heappush(self._heap, (max(when, self.now), self._order, what, args))

    def after(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        """Schedule a call of ``what`` after this many seconds of virtual time."""
        self.at(self.now + seconds, what, *args)

    def run_until(self, end: float) -> None:
        """Run all scheduled events up to a time of the world's clock."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= end:
            self.now, _, what, args = pop(heap)
            self.steps += 1
            what(*args)
        self.now = end

    def note(self, data: bytes) -> None:
        """Add bytes that a router received to the checksum of the run."""
        self.digest = zlib.crc32(data, self.digest)
