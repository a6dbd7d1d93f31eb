"""Samples of a running process, and a check whether its memory, descriptors or other values grow without limit."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvbus.state.sqlite import CHECKPOINT_AFTER

ENOUGH: Final = 12
"""Minimum number of samples that the check for growth needs."""

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
"""How much each value may grow after the warm-up, as an amount in the value's unit and as a share of its first value.

The larger of these two limits applies. Two limits have special reasons: the first router that leaves for a reason adds
a metric series, and kvbus writes its state again when the write-ahead log has grown to `CHECKPOINT_AFTER` bytes.
"""


def ends(samples: Sequence[float]) -> tuple[float, float]:
    """Return two medians of the samples: one right after the warm-up (the first third of the samples), and one at
    the end.

    Both medians are of equally many samples. The warm-up does not count, because a process keeps the memory that its
    first long answers needed. Memory that grows after the warm-up is a leak.
    """
    part, warm = max(3, len(samples) // 8), len(samples) // 3
    return statistics.median(samples[warm : warm + part]), statistics.median(samples[-part:])


@dataclass
class Samples:
    """Samples of the values of one process, and the time of each sample in seconds."""

    at: list[float] = field(default_factory=list)
    seen: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, now: float, taken: Mapping[str, float]) -> None:
        self.at.append(now)
        for what, value in taken.items():
            self.seen[what].append(value)

    def growth(self) -> dict[str, dict[str, Any]]:
        """Return the development of each sampled value: its two medians, its growth per hour, and the verdict.

        One median is from right after the warm-up, the other is from the end. The verdict ``grown`` is whether the
        value grew by more than `SLACK` permits. Return an empty dict if there are fewer than `ENOUGH` samples.
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
