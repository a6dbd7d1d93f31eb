"""The last five minutes of the bus, a sample a second: rates and levels of each source and each output.

It is kept whether anybody looks or not, so that a page opened now shows what has been. A source takes 6 KB and an
output 7 KB, however long the bus runs, and 4 us of each second.

A sample of many sources is made in pieces, beside the stream, and is there when all of it is. So it is of the time that
its pieces take, 10 to 50 ms of a thousand sources: each rate is over the time between the source's own two readings.
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

KEPT: Final = 300
"""Samples."""

PLACES: Final = KEPT + 1
"""Where samples are: one more than are kept is being made."""

AT_ONCE: Final = 32
"""Sources that are read in one go: 0.3 ms."""

SOURCE_RATES: Final = ("batches", "events")
SOURCE_LEVELS: Final = ("blocks", "queue")
OUTPUT_RATES: Final = ("batches", "bytes")
OUTPUT_LEVELS: Final = ("routers", "behind", "queue")


class Course:
    """The samples of one thing: what grows as a rate, anything else as it stands. NaN is unknown."""

    def __init__(self, rates: Sequence[str], levels: Sequence[str]) -> None:
        self.latest: dict[str, float] = dict.fromkeys((*rates, *levels), nan)
        """The last sample: another object for each."""
        self._rings = {name: array("f", [nan]) * PLACES for name in self.latest}
        self._rates = tuple(rates)
        self._counted: Sequence[float] | None = None
        self._read = 0.0

    def add(self, place: int, now: float, counted: Sequence[float], levels: Mapping[str, float]) -> None:
        """Take in one sample.

        Args:
            place: where it goes.
            now: seconds of a clock that never goes back.
            counted: what the counters say, in the order of the rates.
            levels: everything else.
        """
        before, self._counted = self._counted, counted
        seconds, self._read = now - self._read, now
        latest: dict[str, float] = {}
        for at, name in enumerate(self._rates):
            known = before is not None and seconds > 0
            latest[name] = max(0.0, counted[at] - before[at]) / seconds if known and before else nan
        latest.update(levels)
        for name, value in latest.items():
            self._rings[name][place] = value
        self.latest = latest

    def samples(self, order: Sequence[int]) -> dict[str, list[float]]:
        """All samples in an order of places, in four digits."""
        return {name: [float(f"{ring[place]:.4g}") for place in order] for name, ring in self._rings.items()}


class History:
    """The courses of all sources, of each and of each output."""

    def __init__(self) -> None:
        self.every = Course((), (*SOURCE_RATES, *SOURCE_LEVELS))
        """All sources together."""
        self.sources: dict[str, Course] = {}
        self.outputs: dict[str, Course] = {}
        self.newest: dict[str, Any] = {}
        """The newest sample as plain data, empty before the first."""
        self._times = array("d", [nan]) * PLACES
        self._taken = 0

    def sample(
        self,
        relay: Relay,
        drivers: Sequence[Driver],
        stats: Sequence[OutputStats],
        clock: Callable[[], float],
        wall: float,
    ) -> Generator[None, None, None]:
        """Take one sample of everything, a few sources at a time. It is there when all of it is.

        Args:
            relay: its sources and outputs.
            drivers: those of the outputs, in order.
            stats: what the drivers count, in order.
            clock: seconds; it never goes back.
            wall: time of day.
        """
        place = self._taken % PLACES
        self._times[place] = wall
        courses: dict[str, Course] = {}
        total = dict.fromkeys(self.every.latest, 0.0)
        for number, source in enumerate(relay.present, 1):
            if not source.gone:  # it may have gone since the first piece
                label = source.spec.label
                course = courses[label] = self.sources.get(label) or Course(SOURCE_RATES, SOURCE_LEVELS)
                _sample_source(course, source, place, clock())
                for name, value in course.latest.items():
                    total[name] += 0.0 if isnan(value) else value
            if not number % AT_ONCE:
                yield
        self.every.add(place, clock(), (), total)
        for output, driver, counted in zip(relay.outputs, drivers, stats, strict=False):
            course = self.outputs.setdefault(output.spec.name, Course(OUTPUT_RATES, OUTPUT_LEVELS))
            levels = {
                "routers": counted.routers,
                "behind": driver.behind_seconds,
                "queue": max(counted.queue_depth, driver.queue_max),
            }
            course.add(place, clock(), (counted.batches, counted.bytes), levels)
        self.sources = courses
        self.newest = {
            "at": wall,
            "all": self.every.latest,
            "sources": {name: course.latest for name, course in courses.items()},
            "outputs": {name: course.latest for name, course in self.outputs.items()},
        }
        self._taken += 1

    def times(self) -> list[float]:
        """When the samples were taken, oldest first."""
        return [round(self._times[place], 1) for place in self._order()]

    def samples(self, course: Course) -> dict[str, list[float]]:
        """The samples of a course, oldest first."""
        return course.samples(self._order())

    def _order(self) -> list[int]:
        return [place % PLACES for place in range(max(0, self._taken - KEPT), self._taken)]


def _sample_source(course: Course, source: Source, place: int, now: float) -> None:
    stats, sequencer = source.stats, source.sequencer
    levels = {
        "blocks": 0 if source.expired else len(source.normalizer.index),
        "queue": len(sequencer.held) + len(sequencer.actions),
    }
    course.add(place, now, (stats.batches, stats.stored + stats.removed + stats.cleared), levels)
