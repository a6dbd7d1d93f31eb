"""Tests for the unmodified vLLM router with kvbus's gRPC front as its worker.

One pod contains an engine, kvbus, and vLLM's own API server. This server names the engine's own event endpoints, as
without kvbus.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc import aio

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually, running_bus
from tests.front.grpc_pod import CONTROL, SOURCES, message
from tests.ports import free_port, free_ports

from . import vllm_frontend
from .cache import Cache
from .kinds import VLLM_ROUTER, vllm_router
from .routers import Stream
from .test_interpose import wait_until_exact
from .vllm_frontend import VllmFrontend
from .vllm_router import VllmRouterByGrpc

if TYPE_CHECKING:
    from pathlib import Path

HEALTH = "/grpc.health.v1.Health/Check"


@pytest.mark.slow
@pytest.mark.parametrize("replays", [True, False])
async def test_the_vllm_router_finds_kvbus_by_the_grpc_front(replays: bool, tmp_path: Path) -> None:
    """The router asks kvbus's front for the event endpoints, and so connects to kvbus.

    It holds exactly the engine's blocks, although it joins late, batches are lost on the live stream, and the engine
    restarts.
    """
    if lacking := VLLM_ROUTER() or vllm_frontend.lacking():
        pytest.skip(lacking)
    port = free_port()
    router = vllm_router(tmp_path, "router", replays=replays, front=port, kind=VllmRouterByGrpc)
    front = {"listen": f"127.0.0.1:{port}", "engine": router.worker.removeprefix("grpc://")}
    profile: dict[str, Any] = {"output": {"profile": "vllm-router"}, "front_grpc": front}
    async with running_bus(**profile) as bus, contextlib.AsyncExitStack() as stack:
        cache = Cache(seed=0)
        engine = EnginePublisher(bus.engine, bus.engine_replay, bind=True)
        await stack.enter_async_context(engine)
        await engine.wait_for_subscriber(60)
        for _ in range(150):
            engine.publish(cache.batch())
        live, replay = (int(endpoint.rpartition(":")[2]) for endpoint in (bus.engine, bus.engine_replay))
        stack.push_async_callback(router.stop)
        await router.start([Stream("127.0.0.1", live, replay)])
        await wait_until_exact(router, cache, "late")
        for at in range(40):
            engine.publish(cache.batch(), live=at < 10 or at > 20)
        await wait_until_exact(router, cache, "after lost batches")
        engine.restart()
        cache.restart(seed=1000)
        await engine.wait_for_subscriber(60)
        for _ in range(60):
            engine.publish(cache.batch())
        await wait_until_exact(router, cache, "after a restart of the engine")
        calls = bus.daemon.front_grpc_stats
        assert calls is not None
        outcomes = calls.calls
        assert outcomes["answered"] >= 1
        assert outcomes["passed"] > 10
        assert {outcome for outcome, times in outcomes.items() if times} <= {"answered", "passed", "client_gone"}
        assert bus.daemon.output_stats[0].routers == 1


@pytest.mark.slow
async def test_vllms_grpc_api_is_the_same_through_the_front(tmp_path: Path) -> None:
    """Answers, refusals and a generation are the same through kvbus's front as from vLLM itself.

    vLLM also aborts the generation of a client that disconnects from the front.
    """
    if lacking := vllm_frontend.lacking():
        pytest.skip(lacking)
    http, engine, front = free_ports(3)
    keys = {"listen": f"127.0.0.1:{front}", "engine": f"127.0.0.1:{engine}"}
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(running_bus(front_grpc=keys))
        publishes = [(bus.engine, bus.engine_replay)]
        vllm = await stack.enter_async_context(VllmFrontend(tmp_path, http, engine, publishes))
        direct, through = [
            await stack.enter_async_context(aio.insecure_channel(f"127.0.0.1:{port}")) for port in (engine, front)
        ]
        await direct.unary_unary(HEALTH)(b"", wait_for_ready=True, timeout=60)

        async def said(channel: aio.Channel, method: str, asked: bytes) -> tuple[grpc.StatusCode, str, list[bytes]]:
            messages: list[bytes] = []
            call = channel.unary_stream(method)(asked, timeout=60)
            with contextlib.suppress(aio.AioRpcError):
                messages += [each async for each in call]
            return await call.code(), await call.details(), messages

        prompt = {"f2": vllm.model.encode(), "f4": message(f1=bytes(17)), "f8": message(f1=8), "f9": message(f5=1)}
        asks = [
            (HEALTH, b""),
            (HEALTH, message(f1=b"none.such")),
            (CONTROL + "GetModelInfo", b""),
            (CONTROL + "GetServerInfo", b""),
            (CONTROL + "Sleep", b""),
            (CONTROL + "NoSuch", b""),
            ("/vllm.Inference/GenerateStream", message(f1=b"r", **prompt)),
            ("/vllm.Inference/Generate", message(f1=b"s", **prompt)),
            ("/vllm.Inference/GenerateStream", b"\xff"),
        ]
        for method, asked in asks:
            assert await said(through, method, asked) == await said(direct, method, asked), method
        assert len((await said(through, *asks[6]))[2]) == vllm_frontend.TOKENS + 1
        (named,) = (await said(direct, SOURCES, b""))[2]
        (changed,) = (await said(through, SOURCES, b""))[2]
        assert bus.engine.encode() in named
        assert bus.engine.encode() not in changed
        assert bus.out.encode() in changed
        vllm.pace = 60.0
        call = through.unary_stream("/vllm.Inference/GenerateStream")(message(f1=b"gone", **prompt))
        assert await call.read()
        call.cancel()
        await eventually(lambda: vllm.aborted, "vLLM aborts it")
        assert any(each.startswith("gone") for each in vllm.aborted)
