"""Samples of a process over time, and whether what it takes of its machine grows."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvbus.state.sqlite import CHECKPOINT_AFTER

ENOUGH: Final = 12
"""Minimum number of samples from which growth can be detected."""

SLACK: Final = {
    "memory, MiB": (6.0, 0.10),
    "descriptors": (4.0, 0.0),
    "threads": (1.0, 0.0),
    "series": (8.0, 0.0),
    "state, KiB": (2 * CHECKPOINT_AFTER / 1024, 0.0),
    "journal, batches": (0.0, 0.05),
    "log, lines a minute": (10.0, 0.5),
    "CPU, ms a batch": (1.0, 0.5),
}
"""How much more each value may be at the end than after the warm-up, and which share of the first value. The larger of
the two counts. The first router that leaves for a reason adds a series. The state is written anew when its log has
grown to `CHECKPOINT_AFTER` bytes."""


def ends(samples: Sequence[float]) -> tuple[float, float]:
    """Return the medians of two parts of equal length: one after the first third, the warm-up, and one at the end.

    A process keeps the memory that its first long answers needed. Only a leak grows after that.
    """
    part, warm = max(3, len(samples) // 8), len(samples) // 3
    return statistics.median(samples[warm : warm + part]), statistics.median(samples[-part:])


@dataclass
class Samples:
    """Samples of one process, with the seconds at which they were taken."""

    at: list[float] = field(default_factory=list)
    seen: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, now: float, taken: Mapping[str, float]) -> None:
        self.at.append(now)
        for what, value in taken.items():
            self.seen[what].append(value)

    def growth(self) -> dict[str, dict[str, Any]]:
        """Return for each value: after the warm-up, at the end, the growth in an hour, and whether that is too much.

        Return nothing if there are too few samples to tell.
        """
        if len(self.at) < ENOUGH:
            return {}
        begin, end = ends(self.at)
        told = {}
        for what, values in self.seen.items():
            first, last = ends(values)
            slack, share = SLACK[what]
            told[what] = {
                "first": first,
                "last": last,
                "an hour": (last - first) * 3600 / (end - begin) if end > begin else None,
                "grown": last > first + max(slack, first * share),
            }
        return told
