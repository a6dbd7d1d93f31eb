"""Tests for the conformance kit for routers.

The kit judges doubles with known defects, kvbus's client library, and a kvbus between the kit and a router.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Final

import pytest

from kvbus.tools.conform.report import Outcome, Report
from kvbus.tools.conform.router.adapters import Adapter, Client, Driver, Stream
from kvbus.tools.conform.router.cases import CASES
from kvbus.tools.conform.router.play import Player, Settings, chosen, judge
from kvbus.tools.conform.router.views import MASK, HeldBlock, Known, View
from tests.doubles.bus import running_bus
from tests.doubles.socket_routers import ClearsByPod, NeverAsks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvbus.tools.conform.router.cases import Case

pytestmark = pytest.mark.slow

PATIENT: Final = Settings(settle=60.0)
"""Settings with a long time limit, for cases in which the router should be right.

The kit stops waiting once the view is right, so a long limit costs nothing.
"""


class Double(Adapter):
    """A simulated router in this process, whose socket is read all the time.

    An unread SUB socket would not send its subscription again after a reconnection.
    """

    fresh = True

    def __init__(self, double: type[NeverAsks]) -> None:
        self._double = double

    async def start(self, streams: Sequence[Stream]) -> None:
        self._reader = self._double([stream.live for stream in streams])
        self._reading = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        while True:
            self._reader.read()
            await asyncio.sleep(0.01)

    async def view(self, known: Known) -> View:
        return View(frozenset(HeldBlock(block & MASK) for block in self._reader.read()))

    async def stop(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._reader.close()


async def play(adapter: Adapter, cases: Sequence[Case], settings: Settings = PATIENT) -> Report:
    report = Report("router", "a router")
    player = Player(adapter, settings)
    try:
        await judge(player, cases, report, str)
    finally:
        player.close()
    return report


def failed_cases(report: Report) -> dict[str, tuple[str, dict[str, int]]]:
    """Return what is wrong in each case that the router does not keep: the outcome, and the numbers of wrong blocks."""
    bad = [each for each in report.verdicts if each.outcome is not Outcome.KEPT]
    return {each.case: (str(each.outcome), dict(each.counts)) for each in bad}


async def test_the_client_library_keeps_every_clause_for_readers():
    report = await play(Client(), CASES)
    assert failed_cases(report) == {}
    assert report.seen == f"{len(CASES)} cases"
    assert report.exit_code(strict=True) == 0


MISTAKES: Final[dict[type[NeverAsks], dict[str, dict[str, int]]]] = {
    NeverAsks: {
        "flow": {},
        "two-ranks-clear": {},
        "tail-loss": {"missing": 10, "dead": 10},
        "trimmed": {"missing": 10, "dead": 18},
        "restart": {"dead": 24},
        "restart-behind": {},
        "late-join": {"missing": 24},
        "duplicate-number": {"dead": 1},
    },
    ClearsByPod: {"two-ranks-clear": {"missing": 2}, "clear": {}},
}
"""Expected missing and dead blocks of routers that ignore seqs or do not distinguish ranks; empty for cases they
keep.
"""


@pytest.mark.parametrize("double", MISTAKES)
async def test_the_kit_finds_the_defect_of_a_wrong_router(double):
    expected = MISTAKES[double]
    report = await play(Double(double), chosen(expected), Settings(settle=2.0))
    none = {"missing": 0, "dead": 0}
    assert failed_cases(report) == {name: ("broken", none | counts) for name, counts in expected.items() if counts}
    assert report.exit_code() == 1


class OneByOne(Double):
    """A router that must be asked for one block after the other, so its answer mixes the blocks of two points in
    time.
    """

    _before: frozenset[HeldBlock] = frozenset()

    async def view(self, known: Known) -> View:
        before, self._before = self._before, (await super().view(known)).held
        return View(before | self._before)


async def test_a_view_that_mixes_two_moments_is_read_again_before_it_counts():
    report = await play(OneByOne(ClearsByPod), chosen(["two-ranks", "flow"]), Settings(settle=10.0))
    assert failed_cases(report) == {"two-ranks": ("broken", {"missing": 1, "dead": 0})}


OWN_STREAM: Final = {"high-numbers", "bytes-hash", "heartbeats", "two-ranks", "two-ranks-clear", "two-ranks-restart"}
"""Cases that need a stream of their own, and cannot be played to a router that follows one continuous stream."""


async def test_a_router_at_kvbus_passes_cases_that_it_fails_at_the_engine():
    """Two routers read kvbus, which reads the kit's simulated engine. One is the client library.

    The other router never requests a replay. If it reads the engine directly, it has wrong blocks after some cases.
    Behind kvbus, both routers have the engine's blocks also after these cases.
    """
    never = [case for case in CASES if case.name in {"loss", "tail-loss", "reordered", "restart", "late-join"}]
    async with running_bus(source={"clears": "all"}, output={"heartbeat": 1.0, "profile": "vllm"}) as bus:
        settings = Settings(
            endpoints=[(bus.engine, bus.engine_replay)], streams=[Stream(bus.out, bus.out_replay)], settle=60.0
        )
        report = await play(Client(copies=False), CASES, settings)
        assert {name: outcome for name, (outcome, _) in failed_cases(report).items()} == dict.fromkeys(
            OWN_STREAM, "not seen"
        )
        assert failed_cases(await play(Double(NeverAsks), never, settings)) == {}


class RunningRouter(Adapter):
    """A running router that `kvbus conform` cannot restart. It has a defect: it never removes a block."""

    def __init__(self, live: str) -> None:
        self._reader = NeverAsks([live])
        self._ever: set[int] = set()

    async def view(self, known: Known) -> View:
        self._ever |= self._reader.read()
        return View(frozenset(HeldBlock(block & MASK) for block in self._ever))

    def close(self) -> None:
        self._reader.close()


async def test_a_running_router_with_stale_blocks_is_not_judged_by_later_cases(tmp_path):
    endpoints = (f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay")
    router = RunningRouter(endpoints[0])
    try:
        settings = Settings(endpoints=[endpoints], settle=0.5)
        report = await play(router, chosen(["empty-batch", "late-join", "two-ranks", "high-numbers"]), settings)
    finally:
        router.close()
    said = {each.case: each.message.partition(": ")[2] for each in report.verdicts if each.outcome is Outcome.NOT_SEEN}
    assert set(said) == {"empty-batch", "late-join", "two-ranks", "high-numbers"}
    assert "restart it" in said["empty-batch"]
    assert "second rank" in said["two-ranks"]
    assert [str(each.outcome) for each in report.verdicts if each.case == "stores"] == ["kept"]


async def test_the_kit_does_not_wait_for_a_driver_that_ends_at_its_start():
    driver = Driver([sys.executable, "-c", "raise SystemExit(3)"])
    report = await asyncio.wait_for(play(driver, CASES, Settings(connect=10**6)), 60)
    assert (report.tried, report.exit_code()) == (False, 69)
    assert "exit code 3) before it subscribed" in report.verdicts[0].message


class Deaf(Adapter):
    """A router with a defect: it subscribes to no topic, so it receives nothing."""

    fresh = True

    async def view(self, known: Known) -> View:
        return View(frozenset())


async def test_the_kit_plays_no_case_if_no_router_subscribes():
    report = await asyncio.wait_for(play(Deaf(), CASES, Settings(connect=0.2)), 60)
    assert (report.tried, len(report.verdicts), report.exit_code()) == (False, 1, 69)
    assert "no router subscribes" in report.verdicts[0].message
