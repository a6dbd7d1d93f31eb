"""The vLLM router, policy kv_aware, with a worker of ours behind it that answers what it asks and generates nothing.

What it believes is in its log: each request's decision says how many tokens of the prompt some worker is known to have.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp import web

from tests.chaos.processes import Child
from tests.ports import free_port, free_ports

from .cache import BLOCK_SIZE, Known
from .routers import PATIENCE, Router, Stream
from .vllm_frontend import VllmFrontend

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_DECISION: Final = re.compile(rb"KV prefix decision .*credited_prefix_tokens=(\d+)")
_COLOURS: Final = re.compile(rb"\x1b\[[0-9;]*m")
_HOST: Final = "127.0.0.1"


class VllmRouter(Router):
    """One router and its only worker, whose ranks are the streams.

    Args:
        program: the command.
        directory, name: of its log.
        replays: the worker says where a replay can be asked for.
        front: the port of what stands before the worker's API; None: nothing does.
    """

    def __init__(self, program: Path, directory: Path, name: str, *, replays: bool, front: int | None = None) -> None:
        self._worker, self._port, metrics = free_ports(3)
        self.worker = self._url(self._worker)
        asked = self.worker if front is None else self._url(front)
        command = [str(program), "--worker-urls", asked, "--policy", "kv_aware"]
        command += ["--host", _HOST, "--port", str(self._port), "--prometheus-port", str(metrics)]
        command += ["--worker-startup-check-interval", "1", "--log-level", "debug"]
        self.model = "m"
        self._child = Child(name, command, directory, piped=True)
        self._replays = replays
        self._sources: dict[str, dict[str, Any]] = {}
        self._decisions: asyncio.Queue[int] = asyncio.Queue()
        self._ready = asyncio.Event()

    async def start(self, streams: Sequence[Stream]) -> None:
        self._sources = {
            str(rank): {
                "endpoint": stream.live,
                "replay_endpoint": stream.replay if self._replays else None,
                "topic": "",
                "hwm": 100_000,
                "buffer_steps": 10_000,
                "publisher": "zmq",
                "encoding": "msgpack",
                "schema_version": 1,
                "enable_kv_cache_events": True,
            }
            for rank, stream in enumerate(streams)
        }
        await self._serve()
        self._session = aiohttp.ClientSession()
        if len(streams) > 1:  # each rank is a place of its own that requests can be sent to
            self._child.command += ["--intra-node-data-parallel-size", str(len(streams))]
        await self._child.start()
        self._reading = asyncio.ensure_future(self._read())
        async with asyncio.timeout(PATIENCE):
            await self._ready.wait()

    async def held(self, known: Known) -> set[int]:
        found: set[int] = set()
        for path, tokens in _paths(known):
            # one token more than the blocks have: the last one of a prompt is always computed
            await self._request([*tokens, 1])
            async with asyncio.timeout(PATIENCE):
                credited = await self._decisions.get()
            found.update(path[: credited // BLOCK_SIZE])
        return found

    async def stop(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._child.close()
        await self._session.close()
        await self._end()

    def _url(self, port: int) -> str:
        return f"http://{_HOST}:{port}"

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, _HOST, self._worker).start()

    async def _end(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path == "/get_server_info":
            return web.json_response({"model_path": "m", "block_size": BLOCK_SIZE})
        if request.path == "/kv_event_sources":  # an engine before 0.33 has no such path
            return web.json_response(self._sources) if self._sources else web.Response(status=404)
        return web.json_response({"id": "x", "object": "text_completion", "model": "m", "choices": []})

    async def _request(self, tokens: list[int]) -> None:
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1}
        async with self._session.post(f"http://{_HOST}:{self._port}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def _read(self) -> None:
        process = self._child.process
        assert process is not None
        assert process.stdout is not None
        with self._child.log.open("ab") as log:
            async for line in process.stdout:
                plain = _COLOURS.sub(b"", line)
                log.write(plain)
                if decision := _DECISION.search(plain):
                    self._decisions.put_nowait(int(decision[1]))
                elif b"Starting server on" in plain:
                    self._ready.set()


def _paths(known: Known) -> list[tuple[list[int], list[int]]]:
    """The blocks and tokens from the root to each leaf: between them they name every block."""
    inner = {block.parent for block in known.values()}
    out = []
    for leaf in known:
        if leaf in inner:
            continue
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.insert(0, at)
            at = known[at].parent
        out.append((path, [token for block in path for token in known[block].tokens]))
    return out


class VllmRouterByGrpc(VllmRouter):
    """The same router, and vLLM's own front end as its worker, by its gRPC API."""

    def __init__(self, program: Path, directory: Path, name: str, **more: Any) -> None:
        super().__init__(program, directory, name, **more)
        self._directory = directory
        self._http = free_port()

    def _url(self, port: int) -> str:
        return f"grpc://{_HOST}:{port}"

    async def _serve(self) -> None:
        publishes = [(each["endpoint"], each["replay_endpoint"]) for each in self._sources.values()]
        self._frontend = await VllmFrontend(self._directory, self._http, self._worker, publishes).__aenter__()
        self.model = self._frontend.model

    async def _end(self) -> None:
        await self._frontend.__aexit__()
