"""Tests for Dynamo's state agent, which reads kvbus: one topic for each rank from one PUB socket.

Dynamo's KvRouter reads the agent.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import running_bus
from tests.ports import ports_in_a_row

from .cache import BLOCK_SIZE, Cache
from .dynamo import MASK
from .test_dynamo_plane import Frontend
from .test_sidecar import HERE, PLANES

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]


TOPICS = {"layout": "per_topic", "topic": "kv@{source}.{rank}", "replay_endpoint": None}


@pytest.mark.parametrize(("ranks", "one_port"), [(1, False), (2, False), (1, True)])
async def test_a_router_has_the_engines_blocks_through_dynamos_state_agent(
    tmp_path: Path, ranks: int, one_port: bool
) -> None:
    """The agent joins late, batches are lost, and a rank restarts.

    With two ranks, kvbus sends both on one port, each under its own topic. With ``one_port``, the agent connects to the
    address that the engine connects to, and kvbus listens there.
    """
    live, replay = ports_in_a_row(ranks), ports_in_a_row(ranks)
    places = [(f"tcp://127.0.0.1:{live + rank}", f"tcp://127.0.0.1:{replay + rank}") for rank in range(ranks)]
    source = {"replay_endpoint": places[0][1], "data_parallel_size": ranks}
    source |= {} if one_port else {"endpoint": places[0][0]}
    output = {"profile": "dynamo", **(TOPICS if ranks > 1 else {})}
    async with running_bus(one_port=one_port, source=source, output=output) as bus, AsyncExitStack() as stack:
        ports = [(bus.out, places[0][1])] if one_port else places
        engines = [await stack.enter_async_context(EnginePublisher(*each, bind=not one_port)) for each in ports]
        caches = [Cache(seed=1000 * rank, rank=rank) for rank in range(ranks)]
        for engine, cache in zip(engines, caches, strict=True):
            await engine.wait_for_subscriber(60)
            for _ in range(150):
                engine.publish(cache.batch())
        keys = {"backend": "file", "ranks": ranks, "block_size": BLOCK_SIZE, "agent": True}
        frontend = stack.enter_context(Frontend(tmp_path, {**PLANES, **HERE}, **keys))
        await asyncio.to_thread(frontend, "register")
        pub = bus.daemon.config.outputs[0].endpoint
        slots = [[pub, f"kv@engine.{rank}" if ranks > 1 else ""] for rank in range(ranks)]
        await asyncio.to_thread(lambda: frontend("agent", sources=slots))
        await asyncio.to_thread(frontend, "router")

        async def holds(what: str) -> None:
            end = asyncio.get_running_loop().time() + 120
            expected = {(rank, block & MASK) for rank, cache in enumerate(caches) for block in cache.live}
            while (found := set(await asyncio.to_thread(lambda: frontend.blocks))) != expected:
                late = f"{what}: {len(found - expected)} dead, {len(expected - found)} missing; {tmp_path}"
                assert asyncio.get_running_loop().time() < end, late
                await asyncio.sleep(0.2)

        await holds("late")
        status = (await asyncio.to_thread(frontend, "agent_status"))["status"]
        assert (status["total_slots"], status["failed_slots"]) == (ranks, 0)
        for at in range(40):
            for engine, cache in zip(engines, caches, strict=True):
                engine.publish(cache.batch(), live=at < 10 or at > 20)
        await holds("after lost batches")
        engines[-1].restart()
        caches[-1].restart(seed=5000)
        await engines[-1].wait_for_subscriber(60)
        for _ in range(60):
            engines[-1].publish(caches[-1].batch())
        await holds("after a restart of a rank")
