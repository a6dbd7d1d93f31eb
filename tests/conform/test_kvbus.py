"""Tests that judge kvbus as a publisher on what the profiles' streams do not show: large states, snapshots and
CURVE.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvbus.tools.conform.engine.probes import Target
from kvbus.tools.conform.engine.watch import Watch
from kvbus.tools.conform.report import Outcome
from kvbus.tools.conform.vectors import pack, stored
from kvbus.transport.engine.publisher import EnginePublisher
from tests.conform.profiles import of_states
from tests.doubles.bus import PATIENCE, eventually, running_bus

if TYPE_CHECKING:
    from pathlib import Path


async def test_kvbus_keeps_the_clauses_about_large_states_snapshots_and_curve(tmp_path: Path) -> None:
    report = await of_states(tmp_path)
    found = {str(each.clause): (each.outcome, each.message) for each in report.verdicts}
    shown = {number: found[number] for number in ("5.1", "5.3", "5.4", "5.5", "11.3", "14.1")}
    assert {outcome for outcome, _ in shown.values()} == {Outcome.KEPT}, shown
    assert found["4.4"][0] is Outcome.KEPT


@pytest.mark.parametrize("on_subscribe", ["state", "nothing"])
async def test_kvbus_sends_no_clear_in_the_first_epoch_without_state_on_subscription(on_subscribe: str) -> None:
    """If routers get no state on subscription, kvbus sends no clear in the first epoch of its output.

    Clause 11.3 of the specification (docs/spec) asks for a clear at the beginning of each epoch, so kvbus does not keep
    this clause then. Routers notice the new epoch anyway: a new kvbus process has new connections, so they have to
    subscribe again.
    """
    async with (
        running_bus(output={"on_subscribe": on_subscribe}) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        watch = Watch(Target(bus.out, bus.out_replay, seconds=0.5))
        running = asyncio.ensure_future(watch.run())
        await eventually(lambda: watch.connected, "the kit is connected")
        engine.publish(pack([1.5, [stored(1)], 0]))
        async with asyncio.timeout(PATIENCE):
            await running
    found = {str(each.clause): each.outcome for each in watch.report().verdicts}
    wanted = Outcome.KEPT if on_subscribe == "state" else Outcome.BROKEN
    assert (found["5.1"], found["11.3"]) == (wanted, wanted)
