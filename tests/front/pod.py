"""A pod for tests of kvbus's HTTP front, its proxy before an engine's HTTP API.

It has the engine's API, the front, and the engine's event publisher.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from tests.doubles.bus import Bus, running_bus
from tests.ports import free_ports


class Api:
    """A double of an engine's HTTP API, with answers that are difficult to forward.

    ``answers`` are the answers by path. Each release of ``step`` sends one more part of a streamed answer.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.every: Callable[[], web.Response] | None = None
        """Makes the answer to every request, whatever its path and method; None: the answer depends on the path."""
        self.step = asyncio.Semaphore(0)
        self.parts: list[bytes] = []
        self.seen: list[tuple[str, str, list[tuple[str, str]], bytes]] = []
        self.asked = asyncio.Event()
        self.gone = asyncio.Event()
        self.taken = 0
        self.take = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.every is not None:
            return self.every()
        if request.path in self.answers:
            answer = self.answers[request.path]
            return answer() if callable(answer) else web.json_response(answer)
        if request.path == "/stream":
            return await self._stream(request)
        if request.path == "/upload":
            return await self._upload(request)
        if request.path == "/think":
            self.asked.set()
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.gone.set()
                raise
        if request.path == "/kv_event_sources":
            return web.Response(status=404, text="no such path")
        body = await request.read()
        self.seen.append((request.method, request.raw_path, list(request.headers.items()), body))
        return web.json_response({"method": request.method, "path": request.raw_path, "bytes": len(body)})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Send one part each time the test releases the semaphore ``step``.

        An empty part closes the connection in the middle of the answer.
        """
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            while self.parts:
                await self.step.acquire()
                part = self.parts.pop(0)
                if not part:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await response.write(part)
        except (asyncio.CancelledError, ConnectionError):
            self.gone.set()
            raise
        return response

    async def _upload(self, request: web.Request) -> web.Response:
        """Wait until the test sets ``take``, then read the body of the request, and return its number of bytes.

        No part of the body is read before that.
        """
        await self.take.wait()
        async for part in request.content.iter_any():
            self.taken += len(part)
        return web.json_response(self.taken)


class Pod:
    """The engine's API and the bus of a pod, and their addresses."""

    def __init__(self, api: Api, bus: Bus, engine: int) -> None:
        self.api = api
        self.bus = bus
        self.engine = f"http://127.0.0.1:{engine}"
        front = bus.daemon.fronts.http
        assert front is not None
        assert front.address is not None
        self.stats = front.stats
        self.port = front.address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def say(self, *parts: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection to kvbus's HTTP front (the proxy in front of the engine's API), and send these bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for part in parts:
            writer.write(part)
            await writer.drain()
        return reader, writer

    async def answer(self, *parts: bytes) -> bytes:
        """Send these bytes to the front, and return everything that comes back until the connection ends."""
        reader, writer = await self.say(*parts)
        try:
            return await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def running_pod(front: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[Pod]:
    """Run an engine's HTTP API, and a kvbus whose front forwards requests to it."""
    api = Api()
    (port,) = free_ports(1)
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        keys = {"listen": "127.0.0.1:0", "engine": f"http://127.0.0.1:{port}", **(front or {})}
        async with running_bus(front=keys, **settings) as bus:
            yield Pod(api, bus, port)
    finally:
        await runner.cleanup()
