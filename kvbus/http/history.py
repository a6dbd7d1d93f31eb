"""The last five minutes of the bus: rates and levels of each source and each output, with one sample a second.

The history is recorded even if no page is open, so that a new page can show the past. It takes 6 KB for a source and 7
KB for an output, and 4 µs of the event loop's time a second for each of them.

kvbus takes a sample of many sources in slices, between which it handles batches. A sample becomes visible when it is
complete. With a thousand sources the slices take 10 to 50 ms in total. Therefore each rate is computed from the times
at which its own source was read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from math import isnan, nan
from typing import Any, Final

from kvbus.core.relay import Relay
from kvbus.core.source import Source
from kvbus.core.stats import OutputStats
from kvbus.telemetry.readings import Driver

MAX_SAMPLES: Final = 300
"""Number of samples that the history keeps of each source and output: five minutes, with one sample a second."""

ARRAY_LENGTH: Final = MAX_SAMPLES + 1
"""Length of each array of samples: one more than :data:`MAX_SAMPLES`, for the sample that is being taken."""

AT_ONCE: Final = 32
"""Number of sources that are read in one iteration of the event loop; reading 32 sources takes 0.3 ms."""

SOURCE_RATES: Final = ("batches", "events")
SOURCE_LEVELS: Final = ("blocks", "queue")
OUTPUT_RATES: Final = ("batches", "bytes")
OUTPUT_LEVELS: Final = ("routers", "behind", "queue")


class Course:
    """The samples of one source or output: one a second, of the last five minutes. NaN means unknown.

    A sample has rates, such as batches a second, and levels, such as the number of blocks.

    Args:
        rates: the names of the counters whose rates are stored.
        levels: the names of the values that are stored unchanged.
    """

    def __init__(self, rates: Sequence[str], levels: Sequence[str]) -> None:
        self.latest: dict[str, float] = dict.fromkeys((*rates, *levels), nan)
        """The newest sample: rates and other values, by name. Each sample is a new dictionary."""
        self._rings = {name: array("f", [nan]) * ARRAY_LENGTH for name in self.latest}
        self._rates = tuple(rates)
        self._counted: Sequence[float] | None = None
        self._read = 0.0

    def add(self, slot: int, now: float, counted: Sequence[float], levels: Mapping[str, float]) -> None:
        """Add one sample.

        Args:
            slot: the index of the sample in the arrays of samples.
            now: the time of a monotonic clock, in seconds.
            counted: the values of the counters, in the order of ``rates``, the names that the constructor got.
            levels: the other values, by name.
        """
        before, self._counted = self._counted, counted
        seconds, self._read = now - self._read, now
        latest: dict[str, float] = {}
        for at, name in enumerate(self._rates):
            known = before is not None and seconds > 0
            latest[name] = max(0.0, counted[at] - before[at]) / seconds if known and before else nan
        latest.update(levels)
        for name, value in latest.items():
            self._rings[name][slot] = value
        self.latest = latest

    def samples(self, order: Sequence[int]) -> dict[str, list[float]]:
        """Return the samples at the indexes ``order``, in this order, for the name of each value.

        Values have four significant digits.
        """
        return {name: [float(f"{ring[slot]:.4g}") for slot in order] for name, ring in self._rings.items()}


class History:
    """The samples of the last five minutes, of each source, of each output, and of all sources together.

    A sample consists of rates and levels, such as batches a second and the number of blocks.
    """

    def __init__(self) -> None:
        self.every = Course((), (*SOURCE_RATES, *SOURCE_LEVELS))
        """The samples of all sources together: the sums of the sources' rates and of their other values."""
        self.sources: dict[str, Course] = {}
        self.outputs: dict[str, Course] = {}
        self.newest: dict[str, Any] = {}
        """The newest sample of all sources and outputs, as plain data for JSON; empty before the first sample."""
        self._times = array("d", [nan]) * ARRAY_LENGTH
        self._taken = 0

    def sample(
        self,
        relay: Relay,
        drivers: Sequence[Driver],
        stats: Sequence[OutputStats],
        clock: Callable[[], float],
        wall: float,
    ) -> Generator[None, None, None]:
        """Take one sample of every source and output, a few sources in each step.

        The sample becomes visible when it is complete.

        Args:
            relay: the relay with the sources and outputs.
            drivers: the drivers of the outputs, in the order of the configuration.
            stats: the counters of these outputs, in the same order.
            clock: returns the time of a monotonic clock, in seconds.
            wall: the time of day, in seconds.
        """
        slot = self._taken % ARRAY_LENGTH
        self._times[slot] = wall
        courses: dict[str, Course] = {}
        total = dict.fromkeys(self.every.latest, 0.0)
        for number, source in enumerate(relay.present, 1):
            if not source.gone:  # the source may have been removed during an earlier step
                label = source.spec.label
                course = courses[label] = self.sources.get(label) or Course(SOURCE_RATES, SOURCE_LEVELS)
                _sample_source(course, source, slot, clock())
                for name, value in course.latest.items():
                    total[name] += 0.0 if isnan(value) else value
            if not number % AT_ONCE:
                yield
        self.every.add(slot, clock(), (), total)
        for output, driver, counted in zip(relay.outputs, drivers, stats, strict=False):
            course = self.outputs.setdefault(output.spec.name, Course(OUTPUT_RATES, OUTPUT_LEVELS))
            levels = {
                "routers": counted.routers,
                "behind": driver.behind_seconds,
                "queue": max(counted.queue_depth, driver.queue_max),
            }
            course.add(slot, clock(), (counted.batches, counted.bytes), levels)
        self.sources = courses
        self.newest = {
            "at": wall,
            "all": self.every.latest,
            "sources": {name: course.latest for name, course in courses.items()},
            "outputs": {name: course.latest for name, course in self.outputs.items()},
        }
        self._taken += 1

    def times(self) -> list[float]:
        """Return the times of day of all samples, oldest first."""
        return [round(self._times[slot], 1) for slot in self._order()]

    def samples(self, course: Course) -> dict[str, list[float]]:
        """Return all samples of a source or output, oldest first, by the name of the value."""
        return course.samples(self._order())

    def _order(self) -> list[int]:
        return [slot % ARRAY_LENGTH for slot in range(max(0, self._taken - MAX_SAMPLES), self._taken)]


def _sample_source(course: Course, source: Source, slot: int, now: float) -> None:
    stats, sequencer = source.stats, source.sequencer
    levels = {
        "blocks": 0 if source.expired else len(source.normalizer.index),
        "queue": len(sequencer.reorder_buffer) + len(sequencer.actions),
    }
    course.add(slot, now, (stats.batches, stats.stored + stats.removed + stats.cleared), levels)
