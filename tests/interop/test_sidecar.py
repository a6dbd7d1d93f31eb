"""Dynamo's own worker beside vLLM's own front end asks the gRPC front for events, and its KvRouter has them of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import running_bus
from tests.ports import free_ports

from . import vllm_frontend
from .cache import BLOCK_SIZE, Cache
from .dynamo import MASK, PYTHON_ENV
from .test_dynamo_plane import Frontend
from .vllm_frontend import VllmFrontend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("programs") / "sidecar.py"
PLANES = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
HERE = {
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
}


@contextlib.asynccontextmanager
async def sidecar(directory: Path, asks: int) -> AsyncIterator[None]:
    """Run it with the gRPC API at a port of loopback."""
    env = {**os.environ, **PLANES, **HERE, "DYN_FILE_KV": str(directory / "discovery")}
    with (directory / "sidecar.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            os.environ[PYTHON_ENV], PROGRAM, "--grpc-endpoint", f"127.0.0.1:{asks}", env=env, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()
            await process.wait()


async def test_the_router_has_what_the_engine_has(tmp_path: Path) -> None:
    """The worker comes late; batches are lost; the engine restarts."""
    if not os.environ.get(PYTHON_ENV):
        pytest.skip(f"{PYTHON_ENV} names no Python with ai-dynamo-runtime (.ci/run sets it)")
    if lacking := vllm_frontend.lacking():
        pytest.skip(lacking)
    http_port, engine_port, front_port = free_ports(3)
    front = {"listen": f"127.0.0.1:{front_port}", "engine": f"127.0.0.1:{engine_port}"}
    env = {**PLANES, **HERE}
    async with running_bus(front_grpc=front, output={"profile": "dynamo"}) as bus, contextlib.AsyncExitStack() as stack:
        publishes = [(bus.engine, bus.engine_replay)]
        await stack.enter_async_context(VllmFrontend(tmp_path, http_port, engine_port, publishes))
        engine = await stack.enter_async_context(EnginePublisher(bus.engine, bus.engine_replay, bind=True))
        await engine.wait_for_subscriber(60)
        cache = Cache(seed=0)
        for _ in range(150):
            engine.publish(cache.batch())
        await stack.enter_async_context(sidecar(tmp_path, front_port))
        frontend = Frontend(tmp_path, env, backend="file", ranks=1, block_size=BLOCK_SIZE)
        with frontend:
            await asyncio.to_thread(frontend, "router")

            async def holds(what: str) -> None:
                loop = asyncio.get_running_loop()
                end = loop.time() + 120
                while (found := set(await asyncio.to_thread(lambda: frontend.blocks))) != {
                    (0, block & MASK) for block in cache.live
                }:
                    assert loop.time() < end, f"{what}: {len(found)} and not {len(cache.live)}; {tmp_path}"
                    await asyncio.sleep(0.2)

            await holds("late")
            for at in range(40):
                engine.publish(cache.batch(), live=at < 10 or at > 20)
            await holds("after lost batches")
            engine.restart()
            cache.restart(seed=1000)
            await engine.wait_for_subscriber(60)
            for _ in range(60):
                engine.publish(cache.batch())
            await holds("after a restart of the engine")
            stats = bus.daemon.front_grpc_stats
            assert stats is not None
            assert stats.calls["answered"] >= 1
            assert set(+stats.calls) <= {"answered", "passed", "client_gone"}
