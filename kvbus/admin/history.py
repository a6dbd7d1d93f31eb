"""The last five minutes of the bus, a sample a second: rates and levels of each source and each output.

It is kept whether anybody looks or not, so that a page opened now shows what has been. A source takes 6 KB and an
output 7 KB, however long the bus runs, and 4 us of each second.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any, Final

from kvbus.core.relay import Relay
from kvbus.core.source import Source
from kvbus.core.stats import OutputStats
from kvbus.telemetry.readings import Driver

KEPT: Final = 300
"""Samples."""

SOURCE_RATES: Final = ("batches", "events")
SOURCE_LEVELS: Final = ("blocks", "queue")
OUTPUT_RATES: Final = ("batches", "bytes")
OUTPUT_LEVELS: Final = ("routers", "behind", "queue")


class Course:
    """The samples of one thing: what grows as a rate, anything else as it stands. NaN is unknown."""

    def __init__(self, rates: Sequence[str], levels: Sequence[str]) -> None:
        self.latest: dict[str, float] = dict.fromkeys((*rates, *levels), nan)
        self._rings = {name: array("f", [nan]) * KEPT for name in self.latest}
        self._rates = tuple(rates)
        self._counted: Sequence[float] | None = None

    def add(self, place: int, seconds: float, counted: Sequence[float], levels: Mapping[str, float]) -> None:
        """Take in one sample.

        Args:
            place: where it goes.
            seconds: since the sample before.
            counted: what the counters say, in the order of the rates.
            levels: everything else.
        """
        before, self._counted = self._counted, counted
        for at, name in enumerate(self._rates):
            known = before is not None and seconds > 0
            self.latest[name] = max(0.0, counted[at] - before[at]) / seconds if known and before else nan
        self.latest.update(levels)
        for name, value in self.latest.items():
            self._rings[name][place] = value

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
        self._times = array("d", [nan]) * KEPT
        self._taken = 0
        self._last = 0.0

    def sample(
        self, relay: Relay, drivers: Sequence[Driver], stats: Sequence[OutputStats], now: float, wall: float
    ) -> None:
        """Take one sample of everything.

        Args:
            relay: its sources and outputs.
            drivers: those of the outputs, in order.
            stats: what the drivers count, in order.
            now: seconds of a clock that never goes back.
            wall: time of day.
        """
        place, seconds, self._last = self._taken % KEPT, now - self._last, now
        self._times[place] = wall
        self._taken += 1
        before, self.sources = self.sources, {}
        for source in relay.present:
            course = before.get(source.spec.label) or Course(SOURCE_RATES, SOURCE_LEVELS)
            self.sources[source.spec.label] = course
            _sample_source(course, source, place, seconds)
        known = [course.latest for course in self.sources.values()]
        total = {name: sum(each[name] for each in known if each[name] == each[name]) for name in self.every.latest}
        self.every.add(place, seconds, (), total)
        for output, driver, counted in zip(relay.outputs, drivers, stats, strict=False):
            course = self.outputs.setdefault(output.spec.name, Course(OUTPUT_RATES, OUTPUT_LEVELS))
            levels = {
                "routers": counted.routers,
                "behind": driver.behind_seconds,
                "queue": max(counted.queue_depth, driver.queue_max),
            }
            course.add(place, seconds, (counted.batches, counted.bytes), levels)

    @property
    def newest(self) -> dict[str, Any]:
        """The newest sample as plain data."""
        return {
            "at": self._times[(self._taken - 1) % KEPT],
            "all": self.every.latest,
            "sources": {name: course.latest for name, course in self.sources.items()},
            "outputs": {name: course.latest for name, course in self.outputs.items()},
        }

    def times(self) -> list[float]:
        """When the samples were taken, oldest first."""
        return [round(self._times[place], 1) for place in self._order()]

    def samples(self, course: Course) -> dict[str, list[float]]:
        """The samples of a course, oldest first."""
        return course.samples(self._order())

    def _order(self) -> list[int]:
        return [place % KEPT for place in range(max(0, self._taken - KEPT), self._taken)]


def _sample_source(course: Course, source: Source, place: int, seconds: float) -> None:
    stats, sequencer = source.stats, source.sequencer
    levels = {
        "blocks": 0 if source.expired else len(source.normalizer.index),
        "queue": len(sequencer.held) + len(sequencer.actions),
    }
    course.add(place, seconds, (stats.batches, stats.stored + stats.removed + stats.cleared), levels)
