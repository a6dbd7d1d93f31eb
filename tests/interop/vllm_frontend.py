"""Run vLLM's real Rust API server (front end), from its wheel, before a test's engine core that computes nothing.

Its gRPC and HTTP APIs are vLLM's. The core sends the start message of vLLM's core (`EngineCoreReadyResponse`,
vllm/v1/engine), and answers each request with some tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec
import zmq
import zmq.asyncio

from .cache import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINES_ENV: Final = "TEST_ENGINES_HOME"
RELEASE: Final = "vllm-0.33.0"
TOKENS: Final = 8
"""Number of tokens that the engine core generates for each request. They are equal, and each has its own message."""
MODEL: Final = {
    "config.json": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 100_000,
        "eos_token_id": 1,
    },
    "tokenizer.json": {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}},
}
_ADD: Final = b"\0"
_ABORT: Final = b"\1"
_LENGTH: Final = 1


def lacking() -> str:
    """Return why vLLM's front end cannot run here; an empty string if it can."""
    if platform.machine() != "x86_64":
        return "vLLM's front end was taken out of a wheel for x86-64"
    return "" if _program().exists() else f"{ENGINES_ENV} names no {RELEASE}/vllm/vllm-rs (.ci/run sets it)"


def write_model(directory: Path) -> str:
    """Write the model files that the front end needs, and return the model's name."""
    directory.mkdir()
    for name, content in MODEL.items():
        (directory / name).write_text(json.dumps(content))
    return str(directory)


def _program() -> Path:
    """Return the path of vLLM's front end: of the newest release if `make newest-others` has installed it, else of
    `RELEASE`.
    """
    home = Path(os.environ.get(ENGINES_ENV, "/nonexistent"))
    newest = home / "vllm-newest" / "vllm" / "vllm-rs"
    return newest if newest.exists() else home / RELEASE / "vllm" / "vllm-rs"


class VllmFrontend:
    """The process of the front end, and its engine core.

    Args:
        directory: directory of the log and of the model.
        http: loopback port of the HTTP API.
        grpc: loopback port of the gRPC API.
        sources: endpoint and replay endpoint of each rank, as configured. If empty, the engine has no events.
    """

    def __init__(self, directory: Path, http: int, grpc: int, sources: Sequence[tuple[str, str | None]]) -> None:
        self._log = directory / "vllm-rs.log"
        self._ports = (http, grpc, 0, 0)
        self._sources = sources
        self.pace = 0.0
        """Seconds that the engine core waits between two tokens."""
        self.aborted: list[str] = []
        self.model = write_model(directory / "vllm-rs-model")

    async def __aenter__(self) -> Self:
        sockets = [_listening(port) for port in self._ports]
        given, asked = (f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in sockets[2:])
        names = ("--listen-fd", "--grpc-listen-fd", "--input-listener-fd", "--output-listener-fd")
        flags = [text for name, each in zip(names, sockets, strict=True) for text in (name, str(each.fileno()))]
        shared = {
            "model_tag": self.model,
            "host": "127.0.0.1",
            "engine_ready_timeout_secs": 60,
            "http_timeout_keep_alive": 5,
        }
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                _program(),
                "frontend",
                *flags,
                "--engine-count",
                str(len(self._sources) or 1),
                "--args-json",
                json.dumps(shared),
                stdout=log,
                stderr=log,
                pass_fds=[each.fileno() for each in sockets],
            )
        for each in sockets:
            each.close()
        self._context = zmq.asyncio.Context()
        self._out = self._context.socket(zmq.PUSH)
        self._out.connect(asked)
        self._tasks: list[asyncio.Future[None]] = []
        for rank in range(len(self._sources) or 1):
            core = self._context.socket(zmq.DEALER)
            core.setsockopt(zmq.IDENTITY, rank.to_bytes(2, "little"))
            core.connect(given)
            await core.send(msgspec.msgpack.encode(self._ready(rank)))
            self._tasks.append(asyncio.ensure_future(self._serve(core)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), 30)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._context.destroy(0)

    def _ready(self, rank: int) -> dict[str, object]:
        events = None
        if self._sources:
            live, replay = self._sources[rank]
            events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": live, "replay_endpoint": replay}
            events |= {"buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000, "topic": ""}
        ranks = len(self._sources) or 1
        sizes = {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "decode_context")}
        return {
            **sizes,
            "max_model_len": 4096,
            "num_gpu_blocks": 10_000,
            "block_size": BLOCK_SIZE,
            "dp_stats_address": None,
            "dtype": "bfloat16",
            "vllm_version": RELEASE.partition("-")[2],
            "world_size": 1,
            "data_parallel_size": ranks,
            "data_parallel_rank": rank,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "instance_id": "i",
            "supports_lora": False,
            "max_loras": 0,
            "kv_events_config": events,
            "effective_attention_block_size": BLOCK_SIZE,
        }

    async def _serve(self, core: zmq.asyncio.Socket) -> None:
        while True:
            kind, *frames = await core.recv_multipart()
            if kind == _ADD:
                self._tasks.append(asyncio.ensure_future(self._generate(msgspec.msgpack.decode(frames[0])[0])))
            elif kind == _ABORT:
                self.aborted += msgspec.msgpack.decode(frames[0])

    async def _generate(self, request: str) -> None:
        for at in range(TOKENS):
            output = [request, [at % 2], None, None, None, _LENGTH if at == TOKENS - 1 else None]
            await self._out.send(msgspec.msgpack.encode([0, [output], None, 1.0]))
            await asyncio.sleep(self.pace)


def _listening(port: int) -> socket.socket:
    listening = socket.create_server(("127.0.0.1", port), backlog=128)
    listening.setblocking(False)
    return listening
