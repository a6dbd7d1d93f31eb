"""kvbus is stopped for some seconds while engines with short buffers go on: everything it missed waits in its sockets."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import PATIENCE, eventually
from tests.doubles.engine import Engine
from tests.doubles.kvbus_process import Process
from tests.doubles.link import Link
from tests.doubles.socket_routers import StrictRouter, soon

BUFFER = 50
"""Batches an engine keeps for replay: an eighth of what it publishes during the pause."""

PAUSE_S = 4.0
"""Longer than a question may take to be answered, several times the silence after which one is asked."""

ASKED = 4
"""Questions about a silence of 0.2 s, three seconds of them: six times as long as an answer may take in that test."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Rank:
    """One engine rank, and a router of its stream."""

    def __init__(self, publisher: EnginePublisher, process: Process, rank: int) -> None:
        _, _, out, out_replay = process.endpoints(rank)
        self.engine = Engine(publisher, blocks=500, seed=rank, rank=rank)
        self.router = StrictRouter(out, out_replay)

    async def publish(self, count: int, seconds: float) -> None:
        """Publish at an even pace."""
        for _ in range(count):
            await self.engine.publish(1)
            await asyncio.sleep(seconds / count)

    async def exact(self) -> None:
        truth = self.engine.settle()
        await soon(self.router, lambda: self.router.blocks == truth, "the router holds what the engine holds")
        assert self.router.view.violations == []


@pytest.mark.parametrize(("ranks", "flood"), [(1, False), (8, True)], ids=["one rank", "flood of eight"])
async def test_a_pause_is_no_engine_restart(tmp_path: Path, ranks: int, flood: bool) -> None:
    process = Process(tmp_path, keeps_state=False, ranks=ranks)
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for rank in range(ranks):
            live, replay, _, _ = process.endpoints(rank)
            publisher = EnginePublisher(live, replay, bind=True, buffer_steps=BUFFER)
            made.append(Rank(await stack.enter_async_context(publisher), process, rank))
            stack.callback(made[-1].router.close)
        stack.enter_context(process)
        for one in made:
            await one.engine.publisher.wait_for_subscriber(PATIENCE)
        await asyncio.gather(*(one.publish(300, 1.5) for one in made))
        for one in made:
            await one.exact()
        cleared = [one.router.view.clears for one in made]

        process.pause()
        try:
            await asyncio.gather(*(one.publish(8 * BUFFER, PAUSE_S) for one in made))
        finally:
            process.resume()
        if flood:
            await asyncio.gather(*(one.publish(8 * BUFFER, 1.0) for one in made))
        for one in made:
            await one.exact()

        assert [one.router.view.clears for one in made] == cleared, "nothing was taken back"
        for source in await asyncio.to_thread(process.sources):
            assert (source["state"], source["partial"], source["epoch"]) == ("live", False, 0), source
            assert source["counts"]["restarts"] == source["counts"]["lost"] == 0, source


async def test_what_tcp_brings_late_after_a_pause_is_not_lost(tmp_path: Path) -> None:
    """While kvbus stood still TCP's intervals have grown. So the live stream comes later than answers do."""
    process = Process(tmp_path, keeps_state=False, replay_timeout=0.5)
    live, replay, _, _ = process.endpoints(0)
    async with contextlib.AsyncExitStack() as stack:
        publisher = EnginePublisher("tcp://127.0.0.1:*", replay, bind=True, buffer_steps=BUFFER)
        one = Rank(await stack.enter_async_context(publisher), process, 0)
        stack.callback(one.router.close)
        port, behind = (int(endpoint.rpartition(":")[2]) for endpoint in (live, publisher.endpoint))
        link = Link("live", port, behind)
        await link.start()
        stack.push_async_callback(link.close)
        stack.enter_context(process)
        await publisher.wait_for_subscriber(PATIENCE)
        await one.publish(100, 0.5)
        await one.exact()

        link.stall()
        process.pause()
        try:
            await one.publish(8 * BUFFER, 2 * PAUSE_S)
        finally:
            process.resume()
        asked = publisher.replay_requests
        await eventually(lambda: publisher.replay_requests >= asked + ASKED, "kvbus to ask about the silence")
        link.flow()
        await one.exact()

        (source,) = await asyncio.to_thread(process.sources)
        assert (source["state"], source["partial"], source["epoch"]) == ("live", False, 0), source
        assert source["counts"]["restarts"] == source["counts"]["lost"] == 0, source
