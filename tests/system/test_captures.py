"""Tests that play every recorded stream over real sockets through the bus to a simple router, which must end with the
engine's blocks.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Literal

import pytest
import uvloop

from kvbus.tools.capture.play import Faults, play
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually, running_bus
from tests.doubles.socket_routers import RouterOnASet
from tests.long import LONG
from tests.wire.captures import CAPTURES, load, matches_truth

CASES = ("there_from_the_start", "joins_at_the_end", "faults", "old_framing", "engine_dials_in")


MATRIX = [
    (name, case)
    for row, name in enumerate(CAPTURES)
    for column, case in enumerate(CASES)
    if LONG or (row - column) % len(CASES) < 2
]
"""Pairs of a recorded stream and a case. If ``TEST_LONG=1``, each stream has every case, otherwise two of them."""


@pytest.mark.parametrize(("name", "case"), MATRIX)
def test_a_router_is_exact_after_kvbus_relayed_a_capture(name: str, case: str) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(through_the_bus(name, case))


async def through_the_bus(name: str, case: str) -> None:
    messages = load(name)
    dials = case == "engine_dials_in"
    faulty = case == "faults"
    faults = Faults(drop=0.05, duplicate=0.03, swap=0.03, seed=zlib.crc32(name.encode())) if faulty else Faults()
    async with running_bus(bind=dials) as bus:
        router = RouterOnASet(bus.out, bus.out_replay)
        try:
            if case != "joins_at_the_end":
                router.subscribe()
                await eventually(lambda: bus.daemon.outputs.stats[0].subscribers, "the router's subscription")
            framing: Literal["3", "4"] = "3" if case == "old_framing" else "4"
            async with EnginePublisher(bus.engine, bus.engine_replay, framing=framing, bind=not dials) as engine:
                await eventually(lambda: bus.source.state == "live", "the bus in sync with an engine that is new")
                played = await play(engine, lambda: messages, rate=4000, subscribers=1, faults=faults)
                await eventually(lambda: bus.caught_up(messages[-1].seq), "every batch relayed")
                stream = bus.daemon.relay.outputs[0].streams[0]
                if case == "joins_at_the_end":
                    assert await router.replay() == list(range(stream.next_seq))
                else:
                    await eventually(lambda: router.read() == stream.next_seq, "the router up to date")
            stats = bus.source.stats
            assert matches_truth(name, router.view) is None
            assert router.view.violations == []
            assert not stats.rejected
            assert stats.missing == stats.recovered + stats.lost
            assert stats.restarts == played.epochs - 1
            if played.epochs == 1:
                # An engine's restart may lose batches that kvbus was still requesting. Without a restart, no batch is lost.
                assert stats.lost == 0
            if faulty:
                assert played.dropped
                # Batches that are dropped while the bus syncs with a new epoch arrive by the replay and do not count as missing.
                assert stats.missing >= (played.dropped if played.epochs == 1 else 1)
                assert stats.duplicates
        finally:
            router.close()
