"""Tests that the hour-long run (:mod:`.hours`) reports resource usage that grows, and a router that is wrong."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tests.doubles.growth import Samples

from . import hours
from .hours import Hours, complained, table


def samples(memory: list[float]) -> Samples:
    found = Samples()
    for at, each in enumerate(memory):
        found.at.append(60.0 * at)
        found.seen["memory, MiB"].append(each)
    return found


def test_the_long_run_reports_memory_that_grows_after_the_warm_up() -> None:
    told = samples([60.0 + at for at in range(60)]).growth()["memory, MiB"]
    assert (told["first"], told["last"], told["grown"]) == (83.0, 116.0, True)
    assert told["an hour"] == pytest.approx(60.0)
    filled = samples([60.0 + min(at, 15) for at in range(60)]).growth()["memory, MiB"]
    assert (filled["first"], filled["an hour"], filled["grown"]) == (75.0, 0.0, False)
    assert samples([60.0, 80.0, 100.0]).growth() == {}


def test_the_long_run_counts_warnings_and_errors_by_their_text() -> None:
    log = "\x1b[31mERROR\x1b[0m seq 17 lost\nall is well\nERROR seq 4711 lost\nWARN slow\n"
    assert complained(log) == {"ERROR seq # lost": 2, "WARN slow": 1}


@pytest.mark.slow
async def test_the_long_run_recognizes_exact_routers_and_a_wrong_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Hours(tmp_path, rate=10)
    if not play.engines or not play.seats:
        pytest.skip("\n".join(play.lacking))
    nothing = partial(asyncio.sleep, 0)
    async with play.running():
        await play.round("start", nothing, 4)
        await play.round("an engine restarts", play.engines[0].restart, 4)
        await play.round("kvbus restarts", play.restart_bus, 4)
        assert play.failures == []
        assert {seat.exact for seat in play.seats} == {3}
        found = play.verdict()
        assert (found["kvbus"]["starts"], found["events heard"] > 0) == (2, True)
        assert all(any(seat.kind.name in row for row in table(found)) for seat in play.seats)
        play.engines[0].cache.batch()  # a change of the cache that is never published
        monkeypatch.setattr(hours, "EXACT_WITHIN", 1.0)
        await play.round("nothing", nothing, 0)
    wrong = "\n".join(play.failures)
    assert all(f"{seat.kind.name} misses 3, has " in wrong for seat in play.seats), wrong
