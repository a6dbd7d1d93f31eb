"""The counted faults and checks of a fault campaign, and its findings."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tests.doubles.growth import Samples


@dataclass
class Tally:
    """All counters and findings of a fault campaign."""

    faults: Counter[str] = field(default_factory=Counter)
    void: Counter[str] = field(default_factory=Counter)
    """Number of faults that had no effect, by kind: there was nothing that they could affect.

    `faults` does not include them.
    """
    recovery: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Maximum seconds, by kind of fault, from the end of a round's traffic and faults to exact views."""
    checks: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    rounds: int = 0
    blocks: int = 0
    """Number of blocks in routers' views that a check found exact."""
    given_up: int = 0
    """Number of routers' requests that were not answered while kvbus, or a network path to it, was unavailable."""
    latest: float = 0.0
    """Maximum delay in seconds from the engine to a healthy router while another router had faults."""
    growth: dict[str, Samples] = field(default_factory=lambda: defaultdict(Samples))
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.faults.values())

    def hit(self, kind: str, evidence: str | None) -> None:
        (self.faults if evidence else self.void)[kind] += 1

    def recovered(self, kinds: set[str], seconds: float) -> None:
        for kind in kinds:
            self.recovery[kind] = max(self.recovery[kind], seconds)
