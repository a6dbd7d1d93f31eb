"""kvbus is killed at random instants under traffic: every router ends with the engine's truth, and no seq goes back.

With `state_dir`, where the engine's buffer has long forgotten the beginning, and without, where it has not; and all at
once: kvbus is killed, the engine restarts, routers restart, batches are lost. ``make test-all`` makes it two
hundred kills each.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest
import uvloop

from kvbus.client import BlockView, Subscriber, Timing
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.engine import Engine
from tests.doubles.kvbus_process import Process, QuickProcess
from tests.doubles.socket_routers import StrictRouter
from tests.long import LONG
from tests.wire.captures import Key

PATIENCE: Final = 60.0
"""Seconds; each kill without a state costs a router some thousand empty batches."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KILLS: Final = 25 if LONG else 15
"""In one test."""

AT_MOST: Final = 160
"""Batches between two kills; a start takes about as long as eighty of them."""

EVERY: Final = 5
"""Kills after which every router is compared with the engine."""


class Follower:
    """A strict router that follows the stream all the time, and asks on where an answer breaks off."""

    def __init__(self, process: Process) -> None:
        self.router = StrictRouter(process.out, process.out_replay, idle=0.5, resumes=True)
        self.restarts = 0
        self._wanted = False

    @property
    def blocks(self) -> set[Key]:
        return self.router.blocks

    def restart(self) -> None:
        """Begin again with nothing, when it has done what it is at."""
        self._wanted = True
        self.restarts += 1

    async def run(self) -> None:
        while True:
            if self._wanted:
                self._wanted = False
                self.router.restart()
            await self.router.follow()
            await asyncio.sleep(0.001)

    def close(self) -> None:
        self.router.close()


class Client:
    """A router that is written with `kvbus.client`."""

    def __init__(self, process: Process) -> None:
        self._view = BlockView()
        self._subscriber = Subscriber(process.out, process.out_replay, timing=Timing(idle_s=0.5))

    @property
    def blocks(self) -> set[Key]:
        return {key[1:] for key in self._view.keys()}  # noqa: SIM118 - iterating a view gives blocks

    async def run(self) -> None:
        async for update in self._subscriber:
            self._view.update(update)

    def close(self) -> None:
        """`run` has closed it."""


class Storm:
    """An engine, the process that is killed, and routers that follow it."""

    def __init__(self, process: Process, engine: Engine, seed: int) -> None:
        self.process = process
        self.engine = engine
        self.rng = random.Random(seed)
        self.followers = [Follower(process), Follower(process)]
        self.routers: list[Follower | Client] = [*self.followers, Client(process)]
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Storm]:
        self._tasks = [asyncio.create_task(router.run()) for router in self.routers]
        try:
            yield self
        finally:
            for task in self._tasks:
                task.cancel()
            results = await asyncio.gather(*self._tasks, return_exceptions=True)
            for router in self.routers:
                router.close()
        assert [result for result in results if not isinstance(result, asyncio.CancelledError)] == []

    async def traffic(self, batches: int, *, ahead: int) -> None:
        """Publish at a pace, and never further ahead of the routers than the engine's buffer reaches."""
        for _ in range(batches):
            await self.engine.publish(1)
            await asyncio.sleep(0.0005)
            await self.until(lambda: self.behind() < ahead, "the bus is back")

    def behind(self) -> float:
        return self.engine.published - max(follower.router.newest_ts for follower in self.followers)

    def kill(self) -> None:
        self.process.kill()
        self.process.start()

    async def until(self, condition: Callable[..., bool], what: str) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE
        while not condition():
            for task in self._tasks:
                if task.done():
                    task.result()
            assert loop.time() < end, f"not within {PATIENCE:g} s: {what}"
            await asyncio.sleep(0.002)

    async def compare(self) -> None:
        """Whoever was there all the time, and whoever comes now, holds what the engine holds."""
        truth = self.engine.settle()
        for number, router in enumerate(self.routers):
            try:
                await self.until(lambda router=router: router.blocks == truth, "the same blocks")
            except AssertionError as late:
                missing, dead = len(truth - router.blocks), len(router.blocks - truth)
                raise AssertionError(
                    f"router {number}: {missing} of {len(truth)} blocks missing, {dead} dead"
                ) from late
        assert [follower.router.went_back for follower in self.followers] == [0, 0]
        assert [follower.router.view.violations for follower in self.followers] == [[], []]

    async def late(self) -> None:
        """One that knows nothing asks from 0."""
        truth = self.engine.settle()
        router = StrictRouter(self.process.out, self.process.out_replay)
        try:
            await router.rebuild()
            assert router.blocks == truth
            assert router.view.violations == []
        finally:
            router.close()


@contextlib.asynccontextmanager
async def storm(process: Process, seed: int, *, buffer: int, drop: float = 0.0) -> AsyncIterator[Storm]:
    async with EnginePublisher(process.engine, process.engine_replay, bind=True, buffer_steps=buffer) as publisher:
        await publisher.wait_for_subscriber(PATIENCE)
        made = Storm(process, Engine(publisher, blocks=300, drop=drop, seed=seed), seed)
        async with made.running():
            yield made


async def killed(process: Process, seed: int, *, keeps_state: bool) -> None:
    """An engine that forgets can be told exactly only by a bus that remembers; one that does not, by any."""
    buffer = 1000 if keeps_state else 10_000
    async with storm(process, seed, buffer=buffer) as it:
        ahead = buffer // 2
        await it.compare()
        while keeps_state and it.engine.published < 2 * buffer:
            await it.engine.publish(ahead)
            await it.compare()
        for number in range(1, KILLS + 1):
            await it.traffic(it.rng.randint(0, AT_MOST), ahead=ahead)
            it.kill()
            if number % EVERY == 0:
                await it.compare()
        await it.late()
        if keeps_state:
            assert it.engine.published - it.engine.publisher.buffered > 0, "the engine has forgotten the beginning"


def run(directory: Path, keeps_state: bool, test: Callable[[Process], Awaitable[None]]) -> None:
    process = QuickProcess(directory, keeps_state=keeps_state)
    run_with(process, test)
    errors = [line for line in process.log.read_text().splitlines() if '"level": "error"' in line]
    assert errors == [], "no state is refused, nothing fails"


def run_with(process: QuickProcess, test: Callable[[Process], Awaitable[None]]) -> None:
    async def main(process: Process) -> None:
        await test(process)

    with (
        contextlib.closing(process),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        process,
    ):
        runner.run(main(process))


@pytest.mark.parametrize("seed", range(200 // KILLS if LONG else 1))
@pytest.mark.parametrize("keeps_state", [True, False], ids=["state_dir", "without"])
def test_killed_at_random_instants(tmp_path: Path, keeps_state: bool, seed: int) -> None:
    run(tmp_path, keeps_state, lambda process: killed(process, seed, keeps_state=keeps_state))


def test_out_of_memory_at_random_instants(tmp_path: Path) -> None:
    """A MemoryError ends the process, wherever it is raised, and the next one goes on exactly."""
    process = QuickProcess(tmp_path, keeps_state=True)
    process.kill = process.exhaust  # type: ignore[method-assign]
    run_with(process, lambda process: killed(process, 0, keeps_state=True))
    assert "out of memory: kvbus ends" in process.log.read_text()
