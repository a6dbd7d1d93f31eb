"""A router rebuilds from zero at any time, however long the engine is up and whatever restarts; then live, without a hole.

The engine is simulated, the truth is its own. The router is a strict one: it applies the rules of the strictest client
known (llm-d's), on top of the plainest index there is.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import pytest
import uvloop
import zmq

from kvbus.core.compaction import Cut
from kvbus.core.types import medium_key
from kvbus.sim.engine import EngineOptions, SimEngine
from kvbus.sim.workload import synthetic
from kvbus.transport.publisher import EnginePublisher
from tests.system.bus import PATIENCE, Bus, eventually, running_bus
from tests.system.test_kill import Process, killed_at_the_end
from tests.wire.captures import Key, PlainSetRouter

JOURNAL: Final = 100
"""Batches in the output's journal: whatever a router asks for from 0, it is behind it."""

BUFFER: Final = 50
"""Batches the engine keeps for replay."""

END: Final = b"\xff" * 8


class Engine:
    """A simulated engine rank on a real publisher; its blocks are small, so that a few hundred tokens make many events."""

    def __init__(self, publisher: EnginePublisher, *, blocks: int = 600, drop: float = 0.0) -> None:
        jobs = synthetic(1, turn_tokens=24, output_tokens=24, system_tokens=32, max_tokens=256)
        self.sim = SimEngine("vllm-0.33", jobs, options=EngineOptions(blocks=blocks, block_size=4, max_running=2))
        self.publisher = publisher
        self.dropped = 0
        self._drop = drop
        self._rng = random.Random(7)

    async def publish(self, count: int) -> None:
        """Publish batches; each is lost on its way with the probability `drop`."""
        for at in range(count):
            payload = self.sim.step(1.0)
            assert payload is not None
            self._send(payload)
            if at % 10 == 0:
                await asyncio.sleep(0)

    def settle(self) -> set[Key]:
        """Publish what is left of the last step; what is cached now is what was published."""
        for payload in self.sim.flush(1.0):
            self._send(payload)
        return {(block["group_idx"], str(medium_key(block["medium"])), block["hash"]) for block in self.sim.truth()}

    def restart(self) -> None:
        """Die and come back with nothing."""
        self.publisher.restart()
        self.sim.restart()

    def _send(self, payload: bytes) -> None:
        lost = self._rng.random() < self._drop
        self.dropped += lost
        self.publisher.publish(payload, live=not lost)


class StrictRouter:
    """Buffers live while it rebuilds; takes no answer that is not contiguous, whole, of four frames and in time."""

    IDLE: Final = 2.0
    TOTAL: Final = 120.0

    def __init__(self, endpoint: str, replay_endpoint: str, *, hwm: int = 0) -> None:
        self.view = PlainSetRouter()
        self.next = 0
        self.holes = 0
        """Live batches that did not follow what was known."""
        self.went_back = 0
        """Live batches numbered no higher than one before."""
        self._newest = -1
        self._held: deque[tuple[int, bytes]] = deque()
        self._replay_endpoint = replay_endpoint
        self._hwm = hwm
        self._context = zmq.Context()
        self._dealer: zmq.Socket[bytes] | None = None
        self._asked_at = 0.0
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, 0)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._live.connect(endpoint)

    @property
    def blocks(self) -> set[Key]:
        return set(self.view.blocks)

    def ask(self) -> None:
        """Send the standard request for everything from the next seq on."""
        assert self._dealer is None
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.RCVHWM, self._hwm)
        self._dealer.connect(self._replay_endpoint)
        self._dealer.send_multipart([b"", self.next.to_bytes(8, "big")])
        self._asked_at = asyncio.get_running_loop().time()

    async def read(self, count: int = -1) -> None:
        """Read so many messages of the answer (all of it by default)."""
        while self._dealer is not None and count:
            await self._there_is_a_message(self._dealer)
            count -= 1
            empty, topic, seq, payload = self._dealer.recv_multipart()
            assert empty == b""
            if seq == END:
                assert (topic, payload) == (b"", b"")
                self._dealer.close(0)
                self._dealer = None
                return
            assert int.from_bytes(seq, "big") == self.next, "an answer is contiguous from the seq asked for"
            self._take(payload)

    async def _there_is_a_message(self, dealer: zmq.Socket[bytes]) -> None:
        loop = asyncio.get_running_loop()
        waiting_since = loop.time()
        await asyncio.sleep(0)
        while not dealer.poll(0):
            now = loop.time()
            assert now < waiting_since + self.IDLE, f"no message for {self.IDLE} s: given up at {self.next}"
            assert now < self._asked_at + self.TOTAL, f"not whole after {self.TOTAL} s: given up at {self.next}"
            self._hold()
            await asyncio.sleep(0.001)

    async def rebuild(self) -> None:
        """Ask and read the whole answer, however the live stream goes on meanwhile."""
        self.ask()
        await self.read()

    async def follow(self) -> int:
        """Take in the live stream as far as it is there; the next seq."""
        self._hold()
        while self._held:
            seq, payload = self._held.popleft()
            if seq <= self._newest:
                self.went_back += 1
                self.view, self.next = PlainSetRouter(), 0
                await self.rebuild()
            self._newest = seq
            if seq > self.next:
                self.holes += 1
                await self.rebuild()
                assert seq <= self.next, "what was sent live can be replayed"
            if seq == self.next:
                self._take(payload)
        return self.next

    def _hold(self) -> None:
        while self._live.poll(0):
            _, seq, payload = self._live.recv_multipart()
            assert len(seq) == 8
            self._held.append((int.from_bytes(seq, "big"), payload))

    def _take(self, payload: bytes) -> None:
        self.view.apply(self.next, payload)
        self.next += 1

    def close(self) -> None:
        if self._dealer is not None:
            self._dealer.close(0)
        self._live.close(0)
        self._context.term()


@contextlib.asynccontextmanager
async def routers(bus: Bus, count: int = 1, *, replay: str | None = None, hwm: int = 0) -> AsyncIterator[Any]:
    """Strict routers, subscribed."""
    stats = bus.daemon.relay.outputs[0].stats
    before = stats.subscribers
    made = [StrictRouter(bus.out, replay or bus.out_replay, hwm=hwm) for _ in range(count)]
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
    """A bus that is there from the start, and an engine that has published so many batches."""
    output = {"journal_batches": JOURNAL, **output}
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
    """Every batch published is with the routers, and they hold exactly what the engine holds."""
    truth = engine.settle()
    await eventually(lambda: bus.caught_up(engine.publisher.next_seq - 1), "every batch relayed")
    stream = bus.daemon.relay.outputs[0].streams[0]
    for router in followers:
        await soon(router, lambda router=router: router.next == stream.next_seq, "the router up to date")
        assert router.blocks == truth
        assert router.view.violations == []


async def soon(router: StrictRouter, condition: Callable[[], bool], what: str) -> None:
    """Follow the live stream until the condition holds."""
    end = asyncio.get_running_loop().time() + PATIENCE
    while True:
        await router.follow()
        if condition():
            return
        assert asyncio.get_running_loop().time() < end, f"not within {PATIENCE:g} s: {what}"
        await asyncio.sleep(0.002)


def run(test: Awaitable[None]) -> None:
    async def main() -> None:
        await test

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seqs of the cuts made."""
    made: list[int] = []

    class CountedCut(Cut):
        def __init__(self, seq: int, *rest: Any) -> None:
            made.append(seq)
            super().__init__(seq, *rest)

    monkeypatch.setattr("kvbus.core.relay.Cut", CountedCut)
    return made


# -- joining late ------------------------------------------------------------------------------------------------------


def test_a_router_joins_an_engine_that_is_long_up(cuts: list[int]) -> None:
    async def test() -> None:
        async with circuit(batches=20_000) as (bus, engine), routers(bus) as (router,):
            stream = bus.daemon.relay.outputs[0].streams[0]
            assert stream.journal.first_seq == stream.next_seq - JOURNAL
            assert stream.next_seq > 19_000
            assert engine.publisher.buffered == BUFFER
            newest = stream.next_seq - 1
            await router.rebuild()
            assert router.next == newest + 1
            assert cuts == [newest]
            await engine.publish(3 * JOURNAL)
            await in_step(bus, engine, router)
            assert router.holes == 0
            assert bus.source.stats.missing == 0

    run(test())


def test_late_routers_share_one_cut_while_traffic_goes_on(cuts: list[int], tmp_path: Path) -> None:
    count = 6
    replay = f"ipc://{tmp_path}/replay"

    async def test() -> None:
        async with (
            circuit(batches=3000, blocks=10_000, replay_endpoint=replay) as (bus, engine),
            # they take little at a time, so that no answer is over before the last one has begun
            routers(bus, count, replay=replay, hwm=1) as late,
        ):
            output = bus.daemon.relay.outputs[0]
            newest = output.streams[0].next_seq - 1
            for router in late:
                router.ask()
            await eventually(lambda: output.stats.replay_sessions == count, "every request in work")
            for router in late:
                await router.read(1)
            await engine.publish(JOURNAL // 2)
            await asyncio.gather(*(router.read() for router in late), engine.publish(JOURNAL // 4))
            await in_step(bus, engine, *late)
            assert cuts == [newest]
            assert output.stats.replay_requests["compacted"] == count
            assert [router.holes for router in late] == [0] * count

    run(test())


@pytest.mark.parametrize("journal", [JOURNAL, 3000])
def test_a_requester_so_slow_that_the_journal_is_trimmed_past_it(cuts: list[int], tmp_path: Path, journal: int) -> None:
    """It waits while the state is told (small journal), or while the journal itself is (large journal)."""
    replay = f"ipc://{tmp_path}/replay"

    async def test() -> None:
        async with (
            # a state too large for the buffers between the two
            circuit(batches=4000, blocks=10_000, replay_endpoint=replay, journal_batches=journal) as (bus, engine),
            routers(bus, replay=replay, hwm=1) as (router,),
        ):
            output = bus.daemon.relay.outputs[0]
            stream = output.streams[0]
            if journal > JOURNAL:
                assert stream.journal.first_seq is not None
                router.next = stream.journal.first_seq + 1
            first, newest = router.next, stream.next_seq - 1
            router.ask()
            await router.read(3)
            await engine.publish(journal + JOURNAL)
            await eventually(lambda: bus.caught_up(engine.publisher.next_seq - 1), "every batch relayed")
            assert stream.journal.first_seq is not None
            assert stream.journal.first_seq > newest + 1
            assert output.stats.replay_batches < newest - first, "most of the answer waits for the requester"
            trimmed = stream.next_seq - 1
            await router.read()
            assert cuts == ([newest] if journal == JOURNAL else [trimmed])
            await in_step(bus, engine, router)
            assert router.holes == 0

    run(test())


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_the_engine_restarts_fifty_times() -> None:
    async def test() -> None:
        rng = random.Random(50)
        async with circuit(batches=2 * JOURNAL) as (bus, engine), routers(bus) as (router,):
            await router.rebuild()
            for life in range(1, 51):
                engine.restart()
                await engine.publish(rng.randint(1, BUFFER - 10))
                await eventually(lambda life=life: bus.source.stats.restarts == life, "the new life noticed")
                await in_step(bus, engine, router)
            assert (router.holes, router.went_back) == (0, 0)
            assert router.view.clears == 51  # one for each life that is over, and the first event of the answer

    run(test())


def test_the_router_restarts_fifty_times() -> None:
    async def test() -> None:
        async with circuit(batches=2 * JOURNAL) as (bus, engine):
            for _ in range(50):
                async with routers(bus) as (router,):
                    await asyncio.gather(router.rebuild(), engine.publish(20))
                    await engine.publish(10)
                    await in_step(bus, engine, router)
                    assert (router.holes, router.view.clears) == (0, 1)
            assert bus.daemon.relay.outputs[0].stats.replay_requests["compacted"] == 50

    run(test())


def test_everything_restarts_and_batches_are_lost() -> None:
    async def test() -> None:
        rng = random.Random(51)
        async with circuit(buffer=1000, drop=0.05) as (bus, engine), routers(bus) as (faithful,):
            for _ in range(20):
                async with routers(bus) as (router,):
                    if rng.random() < 0.6:
                        engine.restart()
                    await asyncio.gather(router.rebuild(), engine.publish(rng.randint(1, 60)))
                    if rng.random() < 0.6:
                        # else the next thing happens before the bus has even found the engine again
                        await engine.publisher.wait_for_subscriber(PATIENCE)
                        await engine.publish(rng.randint(1, 60))
                    await router.follow()
                    await faithful.follow()
            async with routers(bus) as (router,):
                truth = engine.settle()
                for one in (faithful, router):
                    await soon(one, lambda one=one: one.blocks == truth, "exactly what the engine holds")
                await in_step(bus, engine, faithful, router)
            stats = bus.source.stats
            assert stats.restarts > 5
            assert engine.dropped > 20
            assert stats.missing == stats.recovered + stats.lost
            assert stats.recovered > 5
            assert (faithful.holes, faithful.went_back) == (0, 0)

    run(test())


@pytest.mark.parametrize("keeps_state", [True, False])
def test_kvbus_is_killed_again_and_again(tmp_path: Path, keeps_state: bool) -> None:
    async def test() -> None:
        async with EnginePublisher(process.engine, process.engine_replay, bind=True) as publisher:
            engine = Engine(publisher)
            router = StrictRouter(process.out, process.out_replay)
            try:
                await publisher.wait_for_subscriber(PATIENCE)
                for kill in range(4):
                    await engine.publish(40)
                    truth = engine.settle()
                    await soon(router, lambda truth=truth: router.blocks == truth, f"exact after {kill} kills")
                    before = router.next
                    process.kill()
                    await engine.publish(40)
                    process.start()
                    truth = engine.settle()
                    await soon(router, lambda truth=truth: router.blocks == truth, "exact when it is back")
                    assert router.next > before
                assert router.went_back == 0
                assert router.view.violations == []
                late = StrictRouter(process.out, process.out_replay)
                try:
                    await late.rebuild()
                    assert late.blocks == truth
                finally:
                    late.close()
            finally:
                router.close()

    with killed_at_the_end(Process(tmp_path, keeps_state=keeps_state)) as process:
        run(test())
