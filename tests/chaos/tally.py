"""What a campaign has done so far, and what it found."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

ENOUGH: Final = 12
"""Samples, from which on it can be told whether something grows."""

_SLACK_BYTES: Final = 6 << 20
_SLACK_SHARE: Final = 0.10
_SLACK_DESCRIPTORS: Final = 4


def ends(samples: Sequence[float]) -> tuple[float, float]:
    """Median of a part after the warm-up, a third of the campaign, and of the same length at the end.

    A process takes what its first long answers need and keeps it; what leaks goes on growing.
    """
    part, warm = max(3, len(samples) // 8), len(samples) // 3
    return statistics.median(samples[warm : warm + part]), statistics.median(samples[-part:])


@dataclass
class Growth:
    """Samples of one long-lived process at its quiescences."""

    rss: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def add(self, rss: int, descriptors: int) -> None:
        self.rss.append(rss)
        self.descriptors.append(descriptors)

    @property
    def enough(self) -> bool:
        return len(self.rss) >= ENOUGH

    @property
    def memory(self) -> tuple[float, float]:
        return ends(self.rss)

    @property
    def open_files(self) -> tuple[float, float]:
        return ends(self.descriptors)

    def grown(self) -> str | None:
        """None if it is flat, or too short to tell; else how it is not."""
        if not self.enough:
            return None
        (first, last), (few, many) = self.memory, self.open_files
        if last > first + max(_SLACK_BYTES, first * _SLACK_SHARE):
            return f"memory grew from {first / 2**20:.1f} to {last / 2**20:.1f} MiB"
        if many > few + _SLACK_DESCRIPTORS:
            return f"descriptors grew from {few:g} to {many:g}"
        return None


@dataclass
class Tally:
    """Counts of everything."""

    faults: Counter[str] = field(default_factory=Counter)
    void: Counter[str] = field(default_factory=Counter)
    """Faults that found nothing to hit; they do not count."""
    recovery: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Worst time by kind, from the end of the last fault and of the traffic to exact views, in any round with it."""
    checks: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    rounds: int = 0
    blocks: int = 0
    """Blocks that were compared in exact views."""
    given_up: int = 0
    """Questions of routers that nobody answered while kvbus, or the way to it, was gone."""
    latest: float = 0.0
    """Worst time from the engine to a router beside one that was ill-treated, in seconds."""
    growth: dict[str, Growth] = field(default_factory=lambda: defaultdict(Growth))
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.faults.values())

    def hit(self, kind: str, evidence: str | None) -> None:
        (self.faults if evidence else self.void)[kind] += 1

    def recovered(self, kinds: set[str], seconds: float) -> None:
        for kind in kinds:
            self.recovery[kind] = max(self.recovery[kind], seconds)
