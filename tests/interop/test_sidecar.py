"""Tests for Dynamo's sidecar workers with kvbus's gRPC front, which tells them from where to read the engine's events.

The workers pass the events to Dynamo's KvRouter. The API of vLLM is its real front end. The APIs of SGLang and
TensorRT-LLM are doubles that answer what a worker needs to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import running_bus
from tests.front.grpc_pod import GrpcApi, message, serve
from tests.ports import free_ports

from . import vllm_frontend
from .cache import BLOCK_SIZE, Cache
from .dynamo import MASK, PYTHON_ENV
from .test_dynamo_plane import Frontend
from .vllm_frontend import VllmFrontend, write_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.doubles.bus import Bus

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("programs") / "sidecar.py"
PLANES = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
HERE = {
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
}
LONG = 8192
"""Maximum number of tokens in a sequence that the engine doubles announce for their model."""


def sglang(bus: Bus, model: str) -> dict[str, bytes | grpc.StatusCode]:
    """Return the answers that the double of SGLang's gRPC API gives to Dynamo's worker, by method."""
    live, replay = (int(each.rpartition(":")[2]) for each in (bus.engine, bus.engine_replay))
    events = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": live, "replay_endpoint_port_base": replay}
    info = {
        "kv_events": {**events, "topic": "", "block_size": BLOCK_SIZE, "dp_size": 1},
        "page_size": BLOCK_SIZE,
        "max_total_num_tokens": 100 * LONG,
        "incremental_streaming_output": True,
    }
    service = "/sglang.runtime.v1.SglangService/"
    path = model.encode()
    return {
        f"{service}HealthCheck": message(f1=1),
        f"{service}GetModelInfo": message(f1=path, f2=json.dumps({"tokenizer_path": model}).encode()),
        f"{service}GetServerInfo": message(f1=json.dumps(info).encode()),
        f"{service}ListModels": message(f1=message(f1=path, f2=path, f4=LONG)),
    }


def trtllm(bus: Bus, model: str) -> dict[str, bytes | grpc.StatusCode]:
    """Return the answers that the double of TensorRT-LLM's gRPC API (OpenEngine) gives to Dynamo's worker, by
    method.
    """
    port = int(bus.engine.rpartition(":")[2])
    endpoint = message(f1=b"127.0.0.1", f2=port, f3=b"tcp")
    source = message(f1=b"zmq", f2=endpoint, f4=bus.engine_replay.encode(), f5=0, f6=b"msgpack", f7=1)
    one_rank = message(f1=1, f2=1, f3=1, f4=0, f5=0)
    capacity = message(f1=BLOCK_SIZE, f2=1000, f3=8, f4=LONG)
    names = message(f1=b"tensorrt_llm", f2=b"1", f3=1, f5=model.encode())
    control = "/openengine.v1.Control/"
    return {
        f"{control}GetServerInfo": names + message(f6=one_rank, f8=1, f9=1, f10=b"v1", f11=capacity),
        f"{control}GetModelInfo": message(f1=model.encode(), f2=b"m", f4=LONG),
        f"{control}GetKvEventSources": message(f1=source),
    }


ANSWERS = {"sglang": sglang, "trtllm": trtllm}


@contextlib.asynccontextmanager
async def engine_api(engine: str, bus: Bus, directory: Path, http: int, port: int) -> AsyncIterator[list[str]]:
    """Serve an engine's gRPC API, and yield the command-line options by which Dynamo's worker finds the model."""
    if engine == "vllm":
        async with VllmFrontend(directory, http, port, [(bus.engine, bus.engine_replay)]):
            yield []
        return
    model = write_model(directory / "model")
    api = GrpcApi()
    api.answers = ANSWERS[engine](bus, model)
    server = await serve(api, port)
    try:
        yield ["--model-path", model] if engine == "trtllm" else []
    finally:
        await server.stop(0)


def missing_requirement(engine: str) -> str:
    """Return why Dynamo's worker for this engine cannot run here; an empty string if it can."""
    python = os.environ.get(PYTHON_ENV)
    if not python:
        return f"{PYTHON_ENV} names no Python with ai-dynamo-runtime (.ci/run sets it)"
    if engine == "vllm":
        return vllm_frontend.lacking()
    version = "import importlib.metadata as m; print(m.version('ai-dynamo-runtime'))"
    has = subprocess.run([python, "-c", version], capture_output=True, text=True, check=True).stdout.strip()
    if engine == "trtllm" and has.startswith("1.6."):
        return f"TensorRT-LLM's sidecar of ai-dynamo-runtime {has} asks for no events; that of 1.7 does"
    return ""


@contextlib.asynccontextmanager
async def sidecar(directory: Path, asks: int, engine: str, *more: str) -> AsyncIterator[None]:
    """Run Dynamo's worker for an engine. It uses the gRPC API at a loopback port."""
    env = {**os.environ, **PLANES, **HERE, "DYN_FILE_KV": str(directory / "discovery")}
    with (directory / "sidecar.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            os.environ[PYTHON_ENV],
            *(str(PROGRAM), engine, "--grpc-endpoint", f"127.0.0.1:{asks}", *more),
            env=env,
            stdout=log,
            stderr=log,
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


@pytest.mark.parametrize("beside", ["vllm", "sglang", "trtllm"])
async def test_a_dynamo_router_has_the_engines_blocks_through_a_sidecar_and_kvbus(tmp_path: Path, beside: str) -> None:
    """Dynamo's KvRouter ends with the engine's blocks, which it reads through Dynamo's worker and kvbus.

    The worker starts late, batches are lost on the live stream, and the engine restarts.
    """
    if reason := missing_requirement(beside):
        pytest.skip(reason)
    http_port, engine_port, front_port = free_ports(3)
    front = {"listen": f"127.0.0.1:{front_port}", "engine": f"127.0.0.1:{engine_port}"}
    env = {**PLANES, **HERE}
    async with running_bus(front_grpc=front, output={"profile": "dynamo"}) as bus, contextlib.AsyncExitStack() as stack:
        more = await stack.enter_async_context(engine_api(beside, bus, tmp_path, http_port, engine_port))
        engine = await stack.enter_async_context(EnginePublisher(bus.engine, bus.engine_replay, bind=True))
        await engine.wait_for_subscriber(60)
        cache = Cache(seed=0)
        for _ in range(150):
            engine.publish(cache.batch())
        await stack.enter_async_context(sidecar(tmp_path, front_port, beside, *more))
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
