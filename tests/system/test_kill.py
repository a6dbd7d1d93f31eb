"""Tests that end kvbus at random times under traffic: every router then gets the engine's blocks, and no seq goes back.

`tests.vopr` tries more orders of events. Here the process, its sockets and its file system are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Final

import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import PATIENCE, eventually
from tests.doubles.engine import Engine
from tests.doubles.kvbus_process import QuickProcess
from tests.doubles.socket_routers import StrictRouter
from tests.long import LONG

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ENDS: Final = 100 if LONG else 15
BETWEEN: Final = 160
"""Maximum number of batches between two ends of kvbus. A start takes about as long as 80 batches."""

COMPARED_EVERY: Final = 5
"""Number of ends of kvbus after which the router's blocks are compared with the engine's."""


@pytest.mark.parametrize(("end", "keeps_state"), [("kill", True), ("kill", False), ("exhaust", True)])
async def test_routers_are_exact_after_kvbus_was_killed_at_random_times(
    tmp_path: Path, end: str, keeps_state: bool
) -> None:
    """kvbus is killed at random times, or fails with MemoryError, and starts again. Routers get the engine's blocks.

    If kvbus keeps its state on disk, the engine's replay buffer lacks the first batches, so that only the saved state
    can have their blocks.
    """
    rng = random.Random(0)
    buffer = 1000 if keeps_state else 10_000
    process = QuickProcess(tmp_path, keeps_state=keeps_state)
    publisher = EnginePublisher(process.engine, process.engine_replay, bind=True, buffer_steps=buffer)
    with contextlib.closing(process), process:
        router = StrictRouter(process.out, process.out_replay, idle=0.5, resumes=True)
        async with publisher, asyncio.TaskGroup() as group:
            following = group.create_task(follow(router))
            await publisher.wait_for_subscriber(PATIENCE)
            engine = Engine(publisher, blocks=300)

            async def publish(batches: int) -> None:
                """Publish batches, at most half the engine's replay buffer ahead of the router."""
                for _ in range(batches):
                    await engine.publish(1)
                    await asyncio.sleep(0.0005)
                    await eventually(lambda: engine.published - router.newest_ts < buffer // 2, "kvbus is back")

            await publish(2 * buffer if keeps_state else 0)
            for number in range(1, ENDS + 1):
                await publish(rng.randint(0, BETWEEN))
                getattr(process, end)()
                process.start()
                if number % COMPARED_EVERY == 0:
                    truth = engine.settle()
                    await eventually(lambda truth=truth: router.blocks == truth, "the engine's blocks")
                    assert (router.went_back, router.view.violations) == (0, [])
            following.cancel()  # it may still be reading an answer, whose socket the restart closes
            await asyncio.wait([following])
            router.restart()  # a late router requests a replay from 0
            following = group.create_task(follow(router))
            await eventually(lambda: router.blocks == truth, "the same for a late router")
            assert router.view.violations == []
            following.cancel()
        router.close()
    assert ("out of memory: kvbus ends" in process.log.read_text()) == (end == "exhaust")
    errors = [line for line in process.log.read_text().splitlines() if '"level": "error"' in line]
    assert errors == [] or end == "exhaust", errors


async def follow(router: StrictRouter) -> None:
    while True:
        await router.follow()
        await asyncio.sleep(0.001)
