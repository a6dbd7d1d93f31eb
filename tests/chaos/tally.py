"""A campaign's counters and findings."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

ENOUGH: Final = 12
"""Minimum number of samples from which growth can be detected."""

_SLACK_BYTES: Final = 6 << 20
_SLACK_SHARE: Final = 0.10
_SLACK_DESCRIPTORS: Final = 4


def ends(samples: Sequence[float]) -> tuple[float, float]:
    """Return the medians of two parts of equal length: one after the first third, the warm-up, and one at the end.

    A process keeps the memory that its first long answers needed. Only a leak grows after that.
    """
    part, warm = max(3, len(samples) // 8), len(samples) // 3
    return statistics.median(samples[warm : warm + part]), statistics.median(samples[-part:])


@dataclass
class Growth:
    """Samples of a long-lived process, one after each round."""

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
        """Describe the growth. Return None if there is none, or too few samples."""
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
    """All counters and findings of a campaign."""

    faults: Counter[str] = field(default_factory=Counter)
    void: Counter[str] = field(default_factory=Counter)
    """Number of faults that found nothing to hit, by kind. They are not counted in `faults`."""
    recovery: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Worst seconds, by kind of fault, from the end of a round's traffic and faults to exact views."""
    checks: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    rounds: int = 0
    blocks: int = 0
    """Number of blocks in exact views."""
    given_up: int = 0
    """Number of routers' requests that were not answered while kvbus, or a network path to it, was unavailable."""
    latest: float = 0.0
    """Worst delay in seconds from the engine to a healthy router while another router had faults."""
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
