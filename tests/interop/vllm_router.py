"""Run the vLLM router by the command in docs/routers/vllm-router.md, with a simulated worker that has no model.

The worker has only the paths of a real `vllm serve` that the router needs. It has no `/get_server_info`: vLLM 0.32
answers 404 there, so the router learns neither block size nor model. The router logs how many tokens of each prompt it
credits to the worker, because the worker holds their blocks.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
from aiohttp import web

from tests.doubles.child import Child
from tests.ports import free_port, free_ports

from .cache import BLOCK_SIZE, Known
from .routers import PATIENCE, Router, Stream
from .vllm_frontend import VllmFrontend

if TYPE_CHECKING:
    from collections.abc import Sequence

_DECISION: Final = re.compile(rb"KV prefix decision .*credited_prefix_tokens=(\d+)")
_COLOURS: Final = re.compile(rb"\x1b\[[0-9;]*m")
_HOST: Final = "127.0.0.1"
_WORKER_PATHS: Final = ("/health", "/v1/completions")
_PAGE: Final = Path(__file__).parents[2] / "docs" / "routers" / "vllm-router.md"


def documented_flags() -> list[tuple[str, str]]:
    """Return the flags and their values of the router's command in docs/routers/vllm-router.md."""
    (command,) = re.findall(r"^```\n(vllm-router .*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))[1:]
    return list(zip(words[::2], words[1::2], strict=True))


class VllmRouter(Router):
    """A vLLM router and its only worker. Each stream is one rank of the worker.

    Args:
        program: path of the router's command.
        directory: directory of the router's log.
        name: name of the router's log.
        replays: whether the router also gets the replay endpoints.
    """

    def __init__(self, program: Path, directory: Path, name: str, *, replays: bool) -> None:
        self._worker, self._port, metrics = free_ports(3)
        self.worker = self._url(self._worker)
        command = [str(program), "--host", _HOST, "--port", str(self._port), "--prometheus-port", str(metrics)]
        command += ["--worker-startup-check-interval", "1", "--log-level", "debug"]
        self.model = "m"
        self._child = Child(name, command, directory, piped=True)
        self._replays = replays
        self._decisions: asyncio.Queue[int] = asyncio.Queue()
        self._ready = asyncio.Event()

    async def start(self, streams: Sequence[Stream]) -> None:
        self._child.command += self._flags(streams)
        await self._serve(streams)
        self._session = aiohttp.ClientSession()
        if len(streams) > 1:  # the router sends requests to each rank by itself
            self._child.command += ["--intra-node-data-parallel-size", str(len(streams))]
        await self._child.start()
        self._reading = asyncio.ensure_future(self._read())
        async with asyncio.timeout(PATIENCE):
            await self._ready.wait()

    async def held(self, known: Known) -> set[int]:
        found: set[int] = set()
        for path, tokens in _paths(known):
            # The prompt has one token more than its blocks, because an engine always computes its last token.
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

    def _flags(self, streams: Sequence[Stream]) -> list[str]:
        """Return the flags of the command in docs/routers/vllm-router.md, with values that fit this test.

        The changed values are the worker, the streams and the block size.
        """
        values = {
            "--worker-urls": self.worker,
            "--kv-event-source": f"{self.worker}={','.join(stream.live for stream in streams)}",
            "--kv-event-replay-source": f"{self.worker}={','.join(stream.replay or '' for stream in streams)}",
            "--kv-event-block-size": str(BLOCK_SIZE),
        }
        flags = [(flag, values.get(flag, value)) for flag, value in documented_flags()]
        return [word for pair in flags if self._replays or pair[0] != "--kv-event-replay-source" for word in pair]

    async def _serve(self, streams: Sequence[Stream]) -> None:
        self._sources = {
            str(rank): {"endpoint": stream.live, "replay_endpoint": stream.replay, "topic": "", "publisher": "zmq"}
            for rank, stream in enumerate(streams)
        }
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, _HOST, self._worker).start()

    async def _end(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path == "/kv_event_sources":
            return web.json_response(self._sources)
        if request.path not in _WORKER_PATHS:
            return web.json_response({"detail": "Not Found"}, status=404)
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
    """Return the hashes and the tokens on the path from the root of the tree of blocks to each leaf.

    Together the paths contain every block.
    """
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
    """A vLLM router that reaches vLLM's front end over gRPC, and finds the event endpoints by itself.

    Args:
        front: port of kvbus's gRPC front, to which the router connects instead of the worker's API.
    """

    def __init__(self, program: Path, directory: Path, name: str, *, replays: bool, front: int) -> None:
        super().__init__(program, directory, name, replays=replays)
        self._directory = directory
        self._http = free_port()
        self._front = front

    def _url(self, port: int) -> str:
        return f"grpc://{_HOST}:{port}"

    def _flags(self, _streams: Sequence[Stream]) -> list[str]:
        return ["--policy", "kv_aware", "--worker-urls", self._url(self._front)]

    async def _serve(self, streams: Sequence[Stream]) -> None:
        publishes = [(stream.live, stream.replay if self._replays else None) for stream in streams]
        self._frontend = await VllmFrontend(self._directory, self._http, self._worker, publishes).__aenter__()
        self.model = self._frontend.model

    async def _end(self) -> None:
        await self._frontend.__aexit__()
