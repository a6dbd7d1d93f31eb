"""The unmodified vLLM router with kvbus's front as its worker: one pod with an engine, kvbus and what the router asks.

The engine's API names the engine's own endpoints, as it does without kvbus.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.ports import free_port
from tests.system.bus import running_bus

from .cache import Cache
from .kinds import VLLM_ROUTER, vllm_router
from .routers import Stream
from .test_interpose import exact

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.parametrize("engine_says", ["replay", "no replay", "nothing"])
async def test_the_vllm_router_reads_kvbus_because_the_front_says_so(engine_says: str, tmp_path: Path) -> None:
    """It joins late; batches are lost on their way; the engine restarts. What it serves goes through the front."""
    if lacking := VLLM_ROUTER():
        pytest.skip(lacking)
    port = free_port()
    router = vllm_router(tmp_path, "router", replays=engine_says == "replay", front=port)
    front = {"listen": f"127.0.0.1:{port}", "engine": router.worker}
    async with running_bus(front=front, output={"profile": "vllm-router"}) as bus, contextlib.AsyncExitStack() as stack:
        cache = Cache(seed=0)
        engine = EnginePublisher(bus.engine, bus.engine_replay, bind=True)
        await stack.enter_async_context(engine)
        await engine.wait_for_subscriber(60)
        for _ in range(150):
            engine.publish(cache.batch())
        live, replay = (int(endpoint.rpartition(":")[2]) for endpoint in (bus.engine, bus.engine_replay))
        stack.push_async_callback(router.stop)
        await router.start([] if engine_says == "nothing" else [Stream("127.0.0.1", live, replay)])
        await exact(router, cache, "late")
        for at in range(40):
            engine.publish(cache.batch(), live=at < 10 or at > 20)
        await exact(router, cache, "after lost batches")
        engine.restart()
        cache.restart(seed=1000)
        await engine.wait_for_subscriber(60)
        for _ in range(60):
            engine.publish(cache.batch())
        await exact(router, cache, "after a restart of the engine")
        stats = bus.daemon.front_stats
        assert stats is not None
        assert stats.requests["answered"] >= 1
        assert stats.requests["passed"] > 10
        assert set(+stats.requests) <= {"answered", "passed", "client_gone"}
        assert bus.daemon.output_stats[0].routers == 1
