"""Tests for the timeline of the changes of state of sources and routers, which kvbus shows.

The numbers of the changes have no gap, and the timeline has a maximum size.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import OutputStats, RouterView
from kvbus.core.wire.profiles import PROFILES
from kvbus.http.timeline import MAX_CHANGES, Timeline


def test_the_timeline_keeps_the_newest_changes_with_consecutive_numbers() -> None:
    timeline = Timeline()
    assert (timeline.first, timeline.last, list(timeline.since(0))) == (1, 0, [])
    for n in range(MAX_CHANGES + 5):
        timeline.add("state", "engine", "live", str(n))
    assert (timeline.first, timeline.last) == (6, MAX_CHANGES + 5)
    assert [each.number for each in timeline.since(0)] == list(range(6, MAX_CHANGES + 6))
    assert [each.number for each in timeline.since(MAX_CHANGES + 3)] == [MAX_CHANGES + 4, MAX_CHANGES + 5]
    assert list(timeline.since(MAX_CHANGES + 5)) == []
    assert Timeline().process != timeline.process


class Routers:
    """A simulated output driver, which returns the given routers and counts how often it is read."""

    queue_max, behind_seconds = 0, 0.0

    def __init__(self) -> None:
        self.known: list[RouterView] = []
        self.looks = 0

    @property
    def routers(self) -> list[RouterView]:
        self.looks += 1
        return self.known


def test_the_timeline_reads_routers_only_after_a_counter_changes() -> None:
    relay = Relay([SourceSpec("engine", 0)], [OutputSpec("out", PROFILES["vllm"], [b""])])
    driver, stats, timeline = Routers(), OutputStats(), Timeline()

    def looked() -> list[tuple[str, str]]:
        last = timeline.last
        timeline.look_at_routers(relay, [driver], [stats])
        return [(each.after, each.text) for each in timeline.since(last)]

    def view(peer: str, **more: Any) -> RouterView:
        return structs.replace(RouterView(0, peer, 5.0, [], 1, "live", 1, 5.0, 0, 0, 0.0, 0, 0), **more)

    assert looked() == []
    looks = driver.looks
    assert looked() == []
    assert driver.looks == looks
    driver.known = [view("10.0.0.1:5")]
    stats.routers = 1
    assert looked() == [("connected", "router 10.0.0.1:5 connected")]
    driver.known = [view("10.0.0.1:5", left="broken", left_at=6.0, dropped_batches=1200)]
    stats.routers = 0
    stats.router_disconnects["broken"] += 1
    assert looked() == [("left", "router 10.0.0.1:5 disconnected (broken); 1,200 batches did not reach it")]
    # This router has connected and disconnected between two readings of the driver.
    driver.known = [*driver.known, view("10.0.0.2:6", left="left", left_at=7.0)]
    stats.router_disconnects["left"] += 1
    assert [after for after, _ in looked()] == ["connected", "left"]
    stats.routers = 1
    driver.known = [*driver.known, view("10.0.0.1:5", since=9.0)]
    assert looked() == [("connected", "router 10.0.0.1:5 connected")]
