"""Tests for routers that get the state on subscription and never request a replay: they hold exactly the engine's
blocks.

The routers join late, stall, lose their connection, or come by the hundred, and kvbus restarts. Some routers apply
every batch, as real ones do. Others drop repeated batches by their seq. The engine is simulated and knows its true
blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import zmq

from kvbus.core.outputs.stream import OutputStream
from kvbus.core.stats import RouterView
from kvbus.parts.outputs.zmq import ZmqOutput
from tests.doubles.bus import Bus, eventually
from tests.doubles.engine import Engine
from tests.doubles.socket_routers import Context, Deaf
from tests.system.test_rebuild import circuit, run

CROWD: Final = 100


@contextlib.asynccontextmanager
async def deaf(bus: Bus, count: int = 1, **options: Any) -> AsyncIterator[list[Deaf]]:
    made = [Deaf(bus.out, **options) for _ in range(count)]
    try:
        yield made
    finally:
        for router in made:
            router.close()


async def exact(engine: Engine, *routers: Deaf) -> None:
    truth = engine.settle()
    for router in routers:
        await eventually(lambda router=router: router.read() == truth, "the engine's blocks")
        assert router.view.violations == []


async def publish(bus: Bus, engine: Engine, count: int) -> None:
    """Publish batches no faster than the bus reads them, because the engine's replay buffer is small."""
    for _ in range(0, count, 50):
        await engine.publish(50)
        await eventually(lambda: bus.caught_up(engine.publisher.next_seq - 1), "what was published")


def stats_of(bus: Bus) -> Any:
    return bus.daemon.outputs.stats[0]


def stream_of(bus: Bus) -> OutputStream:
    return bus.daemon.relay.outputs[0].streams[0]


def test_a_stalled_router_gets_the_state_without_a_request_or_disconnection() -> None:
    async def test() -> None:
        async with (
            circuit(batches=200, send_hwm=50) as (bus, engine),
            deaf(bus, buffer=4096) as (slow,),
            deaf(bus) as (healthy,),
        ):
            await exact(engine, slow, healthy)
            dropped = stats_of(bus).dropped_batches
            while dropped["slow_router"] < 500:
                await publish(bus, engine, 100)
                healthy.read()
            assert stats_of(bus).states_sent == {"subscribed": 2}
            (view,) = [view for view in live(bus) if view.dropped_batches]
            assert view.state == "stalled"
            assert view.dropped_batches == dropped["slow_router"]
            loop = asyncio.get_running_loop()
            since, busy = loop.time(), time.process_time()
            await exact(engine, slow, healthy)
            # The test measures CPU time instead of elapsed time, because other processes may delay this one.
            assert time.process_time() - busy < 5
            assert loop.time() - since < 30
            assert stats_of(bus).states_sent == {"subscribed": 2, "lost": 1}
            assert not slow.disconnected()
            assert sum(stats_of(bus).router_disconnects.values()) == 0

    run(test())


def test_hundreds_of_reconnecting_routers_share_states() -> None:
    async def test() -> None:
        async with circuit(batches=300) as (bus, engine):
            context: Context = zmq.Context()
            context.set(zmq.MAX_SOCKETS, 4 * CROWD)
            stop = asyncio.Event()

            async def traffic() -> None:
                while not stop.is_set():
                    await engine.publish(2)
                    await asyncio.sleep(0.01)

            flow = asyncio.create_task(traffic())
            try:
                for _ in range(2):
                    before = stream_of(bus).next_seq
                    async with deaf(bus, CROWD, context=context) as crowd:
                        expected = stats_of(bus).states_sent["subscribed"] + CROWD
                        await eventually(lambda: stats_of(bus).routers == CROWD, "all of them connected")
                        await eventually(lambda expected=expected: states(bus) >= expected, "a state for each")
                        async with asyncio.timeout(60):
                            while any(view.state != "live" for view in live(bus)):
                                for router in crowd:
                                    router.read()
                                await asyncio.sleep(0.01)
                        stop.set()
                        await flow
                        await exact(engine, *crowd)
                        incomplete = stream_of(bus).incomplete
                        assert len(incomplete) <= 60
                        assert stream_of(bus).next_seq > before
                    await eventually(lambda: stats_of(bus).routers == 0, "all of them gone")
                    stop.clear()
                    flow = asyncio.create_task(traffic())
            finally:
                stop.set()
                await flow
                context.term()

    run(test())


def live(bus: Bus) -> list[RouterView]:
    driver = bus.daemon.outputs.drivers[0]
    assert isinstance(driver, ZmqOutput)
    return [view for view in driver.routers if view.left is None]


def states(bus: Bus) -> int:
    return int(stats_of(bus).states_sent["subscribed"])
