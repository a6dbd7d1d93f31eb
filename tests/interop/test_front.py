"""The unmodified vLLM router with kvbus's front as its worker: one pod with an engine, kvbus and what the router asks.

The engine's API names the engine's own endpoints, as it does without kvbus.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.ports import free_port
from tests.system.bus import running_bus

from . import vllm_frontend
from .cache import Cache
from .kinds import VLLM_ROUTER, vllm_router
from .routers import Stream
from .test_interpose import exact
from .vllm_router import VllmRouter, VllmRouterByGrpc

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "engine_says"),
    [
        ("front", "replay"),
        ("front", "no replay"),
        ("front", "nothing"),
        ("front_grpc", "replay"),
        ("front_grpc", "no replay"),
    ],
)
async def test_the_vllm_router_reads_kvbus_because_the_front_says_so(
    key: str, engine_says: str, tmp_path: Path
) -> None:
    """It joins late; batches are lost on their way; the engine restarts. What it serves goes through the front."""
    if lacking := VLLM_ROUTER() or (vllm_frontend.lacking() if key == "front_grpc" else ""):
        pytest.skip(lacking)
    port = free_port()
    kind = VllmRouter if key == "front" else VllmRouterByGrpc
    router = vllm_router(tmp_path, "router", replays=engine_says == "replay", front=port, kind=kind)
    front = {"listen": f"127.0.0.1:{port}", "engine": router.worker.removeprefix("grpc://")}
    profile: dict[str, Any] = {"output": {"profile": "vllm-router"}, key: front}
    async with running_bus(**profile) as bus, contextlib.AsyncExitStack() as stack:
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
        http, grpc = bus.daemon.front_stats, bus.daemon.front_grpc_stats
        outcomes = http.requests if http is not None else grpc.calls if grpc is not None else {}
        assert outcomes["answered"] >= 1
        assert outcomes["passed"] > 10
        assert {outcome for outcome, times in outcomes.items() if times} <= {"answered", "passed", "client_gone"}
        assert bus.daemon.output_stats[0].routers == 1
