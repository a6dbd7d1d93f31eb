"""Sample the memory, CPU time and other resources of a kvbus process repeatedly, to see whether they grow."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.bus import Metrics, parse_metrics, total
from tests.doubles.growth import Samples

if TYPE_CHECKING:
    from tests.chaos.bus import BusProcess


class Sampler:
    """A sampler of the resource usage of one kvbus and of its restarted processes. It remembers its last sample.

    Args:
        state: the ``state_dir`` of the kvbus.
    """

    def __init__(self, bus: BusProcess, state: Path) -> None:
        self.lives: dict[int, Samples] = defaultdict(Samples)
        self.names: set[str] = set()
        """Names of all metric series that a sample has ever had."""
        self.new: list[tuple[float, str]] = []
        """Metric series that were first seen after the first sample, with the seconds since the start."""
        self._bus = bus
        self._state = state
        self._begin = time.monotonic()
        self._life = 0
        self._last = (0.0, 0.0, 0.0, 0)

    @property
    def now(self) -> float:
        """Seconds since the sampler was created."""
        return time.monotonic() - self._begin

    @property
    def longest(self) -> Samples:
        """The samples of resource usage of one kvbus process: the process that was sampled most often."""
        return max(self.lives.values(), key=lambda samples: len(samples.at), default=Samples())

    def sample(self, text: str) -> tuple[Metrics, dict[str, float]]:
        """Return the metrics of a ``/metrics`` page, and the process's resource usage since the last sample.

        The usage is empty at the first sample of a new process.
        """
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
        samples.add(now, taken)
        return metrics, taken
