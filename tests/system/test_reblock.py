"""Over real sockets: blocks that are cut, told to a router that comes late; tails of prompts; a reset of every tier."""

from __future__ import annotations

import asyncio
import random
from typing import Final

import pytest
import uvloop

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually, running_bus
from tests.doubles.engine import Engine
from tests.doubles.payloads import cleared, payload, store
from tests.doubles.socket_routers import StrictRouter, soon
from tests.doubles.stage import cut_states
from tests.properties.test_tails import WHOLE, Pool

ENGINE_BLOCK: Final = 4


@pytest.mark.parametrize("journal", [1, 20])
def test_a_router_joins_late_where_blocks_are_cut(journal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are fewer numbers than an answer of a few blocks a batch needs, as with millions of blocks."""
    cut_states(monkeypatch, 8, 64)

    async def test() -> None:
        async with (
            running_bus(output={"journal_batches": journal}, block_size=1) as bus,
            EnginePublisher(bus.engine, bus.engine_replay, bind=True) as publisher,
        ):
            there, late = (StrictRouter(bus.out, bus.out_replay) for _ in range(2))
            try:
                stats = bus.daemon.outputs.stats[0]
                await eventually(lambda: stats.subscribers == 2, "the subscriptions")
                engine = Engine(publisher)
                await engine.publish(60)
                truth = engine.settle()
                await eventually(lambda: bus.caught_up(publisher.next_seq - 1), "every batch relayed")
                stream = bus.daemon.relay.outputs[0].streams[0]
                await soon(there, lambda: there.next == stream.next_seq, "the router that was there up to date")
                await late.rebuild()
                await soon(late, lambda: late.next == stream.next_seq, "the one that came late up to date")
                await soon(there, lambda: there.next == stream.next_seq, "the other one, too")
                assert late.blocks == there.blocks
                # blocks that begin with the same tokens share pieces
                assert len(truth) < len(late.blocks) <= ENGINE_BLOCK * len(truth)
                assert late.view.violations == there.view.violations == []
            finally:
                there.close()
                late.close()

    run(test())


@pytest.mark.parametrize("block_size", ["auto", WHOLE])
def test_tails_of_prompts_and_a_reset_of_every_tier(block_size: int | str) -> None:
    async def test() -> None:
        rng, pool = random.Random(3), Pool()
        async with (
            running_bus(block_size=block_size) as bus,
            EnginePublisher(bus.engine, bus.engine_replay, bind=True) as publisher,
        ):
            router = StrictRouter(bus.out, bus.out_replay)
            try:
                stats = bus.daemon.outputs.stats[0]
                await eventually(lambda: stats.subscribers, "the subscription")
                for _ in range(200):
                    pool.prompt([rng.randrange(2) for _ in range(rng.randrange(WHOLE, 2 * WHOLE))], True)
                    pool.grow(rng.randrange(30), [rng.randrange(2) for _ in range(3)])
                    pool.evict(rng.randrange(30), rng.randrange(2))
                    publisher.publish(payload(*pool.take_events()))
                publisher.publish(payload(store([1], tokens=[1] * WHOLE, block_size=WHOLE, medium="CPU", group=0)))
                await exact(bus, publisher, router, {(0, "GPU", name) for name in pool.whole} | {(0, "CPU", 1)})
                assert bus.source.stats.filtered["tail"] > 100
                assert not bus.source.stats.rejected
                assert bus.source.normalizer.entries == len(pool.names) + 1
                publisher.publish(payload(cleared(), cleared()))
                await exact(bus, publisher, router, set())
                assert bus.source.normalizer.entries == 0
            finally:
                router.close()

    run(test())


async def exact(bus, publisher, router, expected) -> None:
    await eventually(lambda: bus.caught_up(publisher.next_seq - 1), "every batch relayed")
    stream = bus.daemon.relay.outputs[0].streams[0]
    await soon(router, lambda: router.next == stream.next_seq, "the router up to date")
    assert router.blocks == expected
    assert router.view.violations == []


def run(test) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test)
