"""Routers that ask for nothing are exact: late, stalled, cut off, by the hundred, and whatever happens to kvbus.

The routers here do what those of the field do: one applies whatever comes, another drops what it has seen by its number
and asks for what it misses. The engine is simulated, the truth is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
import zmq

from kvbus.client import BlockView, Subscriber, Synced
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.stats import RouterView
from kvbus.parts.outputs.zmq import ZmqOutput
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import PATIENCE, Bus, eventually, running_bus
from tests.doubles.engine import Engine
from tests.doubles.router import PlainSetRouter
from tests.doubles.socket_routers import END, Context, Deaf, RouterOnASet, SocketRouter
from tests.system.test_rebuild import JOURNAL, circuit, run

CROWD: Final = 100


class Checking(RouterOnASet):
    """A router that drops what it has seen by its number, and asks where numbers are missing."""

    rebuilds = False

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        super().__init__(endpoint, replay_endpoint)
        self.answered = 0
        self.subscribe()

    async def catch_up(self) -> set[Any]:
        """Take in the live stream: ask once where numbers are missing, and go on whatever the answer brought."""
        for seq, payload in self.arrived():
            if seq > self.next:
                await self.replay(self.next)
            self._take(seq, payload)
        return set(self.view.blocks)

    async def begin_anew(self) -> None:
        """Forget everything and ask from 0, as llm-d does with a pod whose replay has failed."""
        self.view, self.next = PlainSetRouter(), 0
        await self.replay()

    async def replay(self, start: int = 0) -> list[int]:
        seqs = await super().replay(start)
        self.answered += len(seqs)
        return seqs

    def _take(self, seq: int, payload: bytes) -> None:
        if seq >= self.next:
            self.view.take(seq, payload)
            self.next = seq + 1


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
    """Publish no faster than the bus takes it: the engine keeps few batches for a replay."""
    for _ in range(0, count, 50):
        await engine.publish(50)
        await eventually(lambda: bus.caught_up(engine.publisher.next_seq - 1), "what was published")


def stats_of(bus: Bus) -> Any:
    return bus.daemon.outputs.stats[0]


def stream_of(bus: Bus) -> OutputStream:
    return bus.daemon.relay.outputs[0].streams[0]


def test_late_again_and_beside_others() -> None:
    async def test() -> None:
        async with circuit(batches=5 * JOURNAL) as (bus, engine), deaf(bus) as (first,):
            await exact(engine, first)
            before = first.view.clears
            for _ in range(3):
                async with deaf(bus) as (second,):
                    await engine.publish(20)
                    await exact(engine, first, second)
                await engine.publish(20)
            assert first.view.clears == before, "a state is for the router that needs it"
            assert stats_of(bus).states_sent == {"subscribed": 4}

    run(test())


def test_one_that_checks_numbers_and_asks_is_exact_and_its_answer_is_short() -> None:
    async def test() -> None:
        async with circuit(batches=20 * JOURNAL) as (bus, engine):
            router = Checking(bus.out, bus.out_replay)
            try:
                await engine.publish(5)
                truth = engine.settle()
                await eventually(lambda: stats_of(bus).states_sent == {"subscribed": 1}, "the state")
                for _ in range(1000):
                    if await router.catch_up() == truth:
                        break
                    await asyncio.sleep(0.01)
                assert await router.catch_up() == truth
                await eventually(lambda: stats_of(bus).replay_requests["subscription"] == 1, "its request")
                assert await router.catch_up() == truth
                assert router.answered == 0, "END alone"
                await router.begin_anew()
                assert await router.catch_up() == truth, "the state it had does not count any more"
            finally:
                router.close()

    run(test())


def test_a_subscriber_of_the_library_beside_it_rebuilds_by_its_own_replay() -> None:
    async def test() -> None:
        async with circuit(batches=5 * JOURNAL) as (bus, engine), deaf(bus) as (router,):
            await exact(engine, router)
            view = BlockView()
            async with Subscriber(bus.out, bus.out_replay) as subscriber:
                async for update in subscriber:
                    view.update(update)
                    if isinstance(update, Synced):
                        break
            assert len(view) == len(router.read())
            assert stats_of(bus).replay_requests["subscription"] == 0

    run(test())


@pytest.mark.parametrize("number", [10_000, 1_000_000, 100_000_000])
def test_an_answer_costs_the_same_however_long_the_stream_is(number: int) -> None:
    """Counted in messages: what a router is sent until it is exact does not depend on the uptime."""

    async def test() -> None:
        async with circuit(batches=10) as (bus, engine):
            stream_of(bus).next_seq = number  # as if that many had been sent
            await engine.publish(JOURNAL + 50)
            await eventually(lambda: bus.caught_up(engine.publisher.next_seq - 1), "every batch relayed")
            async with deaf(bus) as (router,):
                await eventually(lambda: stats_of(bus).states_sent == {"subscribed": 1}, "the state")
                asked = SocketRouter(bus.out, bus.out_replay)
                dealer = asked.request(0)
                await eventually(lambda: dealer.poll(0), "an answer")
                assert dealer.recv_multipart()[-2] == END
                dealer.close(0)
                asked.close()
                await exact(engine, router)
                assert router.batches < 10

    run(test())


def test_a_router_that_stalls_is_made_right_without_asking_and_without_a_disconnection() -> None:
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
            assert time.process_time() - busy < 5  # bus and routers are this process, which others may keep waiting
            assert loop.time() - since < 30
            assert stats_of(bus).states_sent == {"subscribed": 2, "lost": 1}
            assert not slow.disconnected()
            assert sum(stats_of(bus).router_disconnects.values()) == 0

    run(test())


def test_a_connection_that_breaks_in_the_middle_of_the_state() -> None:
    """A raw peer takes part of a state and goes; the real router behind the same engine is not disturbed."""

    async def test() -> None:
        async with circuit(batches=300, blocks=5000) as (bus, engine), deaf(bus) as (there,):
            await publish(bus, engine, 2000)
            await exact(engine, there)
            port = int(bus.out.rpartition(":")[2])
            for taken in (1, 500, 5000):
                with socket.create_connection(("127.0.0.1", port)) as peer:
                    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"
                    peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
                    peer.sendall(bytes([4, len(ready)]) + ready + b"\x00\x01\x01")
                    await asyncio.to_thread(peer.recv, taken)
            await engine.publish(50)
            async with deaf(bus) as (late,):
                await exact(engine, there, late)

    run(test())


def test_reconnections_by_the_hundred_share_states() -> None:
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


def test_ranks_of_a_merged_stream() -> None:
    async def test() -> None:
        output = {"layout": "merged", "journal_batches": JOURNAL}
        async with (
            running_bus(output=output) as bus,
            EnginePublisher(bus.engine, bus.engine_replay, buffer_steps=50, bind=True) as publisher,
        ):
            engine = Engine(publisher)
            await eventually(lambda: bus.source.state == "live", "the bus in sync with an engine that is new")
            await publish(bus, engine, 500)
            async with deaf(bus) as (router,):
                await exact(engine, router)
                engine.restart()
                await publisher.wait_for_subscriber(PATIENCE)
                await engine.publish(100)
                async with deaf(bus) as (late,):
                    await exact(engine, router, late)

    run(test())
