"""What a kvbus takes of its machine, sampled again and again, and whether that grows."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvbus.state.sqlite import CHECKPOINT_AFTER
from tests.chaos.bus import Metrics, parse_metrics, total
from tests.chaos.tally import ENOUGH, ends

if TYPE_CHECKING:
    from tests.chaos.bus import Bus

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
"""How much more each may be at the end than after the warm-up, and how much of what it was then: the greater counts.
A series comes with the first of its kind, such as a reason for which a router went; the state, a log of what has come, is
written anew when it has grown by so much."""


@dataclass
class Samples:
    """Of one life of a process, with the seconds at which they were taken."""

    at: list[float] = field(default_factory=list)
    seen: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def growth(self) -> dict[str, dict[str, Any]]:
        """Of each: after the warm-up, at the end, what the difference is in an hour, and whether that is too much.

        Nothing where there are too few samples to tell.
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


class Sampler:
    """Looks at a kvbus, and knows what it saw the last time.

    Args:
        state: its ``state_dir``.
    """

    def __init__(self, bus: Bus, state: Path) -> None:
        self.lives: dict[int, Samples] = defaultdict(Samples)
        self.names: set[str] = set()
        """Of all series that were ever there."""
        self.new: list[tuple[float, str]] = []
        """Of those that came later than the first sample, with the seconds."""
        self._bus = bus
        self._state = state
        self._begin = time.monotonic()
        self._life = 0
        self._last = (0.0, 0.0, 0.0, 0)

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begin

    @property
    def longest(self) -> Samples:
        """The life with the most samples."""
        return max(self.lives.values(), key=lambda samples: len(samples.at), default=Samples())

    def sample(self, text: str) -> tuple[Metrics, dict[str, float]]:
        """What ``/metrics`` says, and what it takes; nothing of that at the first look at a new process."""
        child, now = self._bus.child, self.now
        metrics, series = parse_metrics(text), [line for line in text.splitlines() if not line.startswith("#")]
        names = {line.rpartition(" ")[0] for line in series}
        self.new += [(now, name) for name in sorted(names - self.names) if self.names]
        self.names |= names
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        cpu, batches = (int(fields[11]) + int(fields[12])) * 10.0, total(metrics, "kvbus_source_batches_total")
        lines = child.log.read_bytes().count(b"\n")
        then, (self._last, life, self._life) = self._last, ((now, cpu, batches, lines), self._life, child.starts)
        if life != child.starts:
            return metrics, {}
        taken = {
            "memory, MiB": child.rss() / 2**20,
            "descriptors": child.descriptors(),
            "threads": int(fields[17]),
            "series": len(series),
            "state, KiB": sum(path.stat().st_size for path in self._state.rglob("*") if path.is_file()) / 1024,
            "journal, batches": total(metrics, "kvbus_output_journal_batches"),
            "log, lines a minute": (lines - then[3]) * 60 / (now - then[0]),
            "CPU, ms a batch": (cpu - then[1]) / max(1.0, batches - then[2]),
        }
        samples = self.lives[life]
        samples.at.append(now)
        for what, value in taken.items():
            samples.seen[what].append(value)
        return metrics, taken
