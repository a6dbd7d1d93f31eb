"""Tests that a router can rebuild all blocks at any time, and then follows the live stream without a gap.

It does not matter how long the engine has run, or which process has restarted. The engine is simulated and knows its
true blocks. The router applies the rules of the strictest known client (llm-d's) and keeps a simple set of blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, Final

import pytest
import uvloop

from kvbus.core.blocks.compaction import StateSnapshot
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.engine import Engine
from tests.doubles.socket_routers import StrictRouter, soon

JOURNAL: Final = 100
"""Number of batches in the output's journal. A replay from 0 always begins before it."""

BUFFER: Final = 50
"""Number of batches in the engine's replay buffer."""


@contextlib.asynccontextmanager
async def routers(bus: Bus, count: int = 1, *, replay: str | None = None, **options: Any) -> AsyncIterator[Any]:
    """Yield ``count`` strict routers, after their subscriptions have arrived at kvbus."""
    stats = bus.daemon.outputs.stats[0]
    before = stats.subscribers
    made = [StrictRouter(bus.out, replay or bus.out_replay, **options) for _ in range(count)]
    try:
        await eventually(lambda: stats.subscribers == before + count, "the subscriptions")
        yield made
    finally:
        for router in made:
            router.close()
        await eventually(lambda: stats.subscribers == before, "the subscriptions' end")


@contextlib.asynccontextmanager
async def circuit(
    *, batches: int = 0, blocks: int = 600, buffer: int = BUFFER, drop: float = 0.0, **output: Any
) -> AsyncIterator[tuple[Bus, Engine]]:
    """Yield a running bus and an engine that has already published some batches."""
    output = {"journal_batches": JOURNAL, "profile": "llm-d", "topic": "kv@pod@model", **output}
    async with (
        running_bus(output=output) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, buffer_steps=buffer, bind=True) as publisher,
    ):
        engine = Engine(publisher, blocks=blocks, drop=drop)
        await eventually(lambda: bus.source.state == "live", "the bus in sync with an engine that is new")
        await engine.publish(batches)
        await eventually(lambda: bus.caught_up(publisher.next_seq - 1), "every batch relayed")
        yield bus, engine


async def in_step(bus: Bus, engine: Engine, *followers: StrictRouter) -> None:
    """Wait until the routers have every published batch, and check that they hold exactly the engine's blocks."""
    truth = engine.settle()
    await eventually(lambda: bus.caught_up(engine.publisher.next_seq - 1), "every batch relayed")
    stream = bus.daemon.relay.outputs[0].streams[0]
    for router in followers:
        await soon(router, lambda router=router: router.next == stream.next_seq, "the router up to date")
        assert router.blocks == truth
        assert router.view.violations == []


def run(test: Awaitable[None]) -> None:
    async def main() -> None:
        await test

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which the fixture appends the seq of each state snapshot that kvbus makes."""
    made: list[int] = []

    class CountedCut(StateSnapshot):
        def __init__(self, seq: int, *rest: Any, **options: Any) -> None:
            made.append(seq)
            super().__init__(seq, *rest, **options)

    monkeypatch.setattr("kvbus.core.answering.StateSnapshot", CountedCut)
    return made


def test_late_routers_share_a_snapshot_during_live_traffic(cuts: list[int], tmp_path: Path) -> None:
    count = 6
    replay = f"ipc://{tmp_path}/replay"

    async def test() -> None:
        async with (
            circuit(batches=3000, blocks=10_000, replay_endpoint=replay) as (bus, engine),
            # The routers read only a little at a time, so that all answers have begun before one ends.
            routers(bus, count, replay=replay, hwm=1) as late,
        ):
            output = bus.daemon.relay.outputs[0]
            newest = output.streams[0].next_seq - 1
            for router in late:
                router.ask()
            await eventually(lambda: bus.daemon.outputs.drivers[0].busy == count, "every request in work")
            for router in late:
                await router.read(1)
            await engine.publish(JOURNAL // 2)
            await asyncio.gather(*(router.read() for router in late), engine.publish(JOURNAL // 4))
            await in_step(bus, engine, *late)
            assert cuts == [newest]
            assert bus.daemon.outputs.stats[0].replay_requests["compacted"] == count
            assert [router.holes for router in late] == [0] * count

    run(test())
