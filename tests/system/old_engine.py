"""A simulated engine that is older than its replay buffer, with an HTTP API before it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from aiohttp import web

from kvbus.core.types import medium_key
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import synthetic
from kvbus.transport.engine.publisher import EnginePublisher
from tests.ports import free_port, ports_in_a_row
from tests.system.bus import Bus, eventually, running_bus

BUFFER: Final = 50
OLD: Final = 400
"""Batches before kvbus comes."""

Handler = Callable[[web.Request], web.Response]


class Rank:
    """A simulated engine rank that has been up for longer than its replay buffer reaches back."""

    def __init__(self, live: int, replay: int, dialect: str, tiers: dict[str, int], rank: int) -> None:
        jobs = synthetic(1, rank, turn_tokens=24, output_tokens=24, system_tokens=32, max_tokens=256)
        options = EngineOptions(blocks=300, block_size=4, max_running=2, tiers=tiers)
        self.sim = SimEngine(dialect, jobs, rank=rank, options=options)
        at = (f"tcp://127.0.0.1:{port}" for port in (live, replay))
        self.publisher = EnginePublisher(*at, framing=self.sim.dialect.framing, bind=True, buffer_steps=BUFFER)
        self.ts = 0.0

    def publish(self, count: int) -> None:
        for _ in range(count):
            self.ts += 1
            payload = self.sim.step(self.ts)
            assert payload is not None
            self.publisher.publish(payload)

    def reset(self) -> None:
        """What is cached is gone, and the stream says so."""
        self.sim.clear()
        for payload in self.sim.flush(self.ts):
            self.publisher.publish(payload)

    def truth(self) -> set[Any]:
        for payload in self.sim.flush(self.ts):
            self.publisher.publish(payload)
        return {(str(medium_key(block["medium"])), block["hash"]) for block in self.sim.truth()}


class Engine:
    """Ranks, and the HTTP API in front of them."""

    def __init__(self, dialect: str = "vllm-0.33", tiers: dict[str, int] | None = None, ranks: int = 1) -> None:
        first = ports_in_a_row(2 * ranks)
        self.endpoints = [f"tcp://127.0.0.1:{port}" for port in (first, first + ranks)]
        self.ranks = [Rank(first + r, first + ranks + r, dialect, tiers or {}, r) for r in range(ranks)]
        self.asked: list[str] = []
        """The requests that might have changed something."""
        self.port = free_port()
        self.api = f"http://127.0.0.1:{self.port}"
        self.routes: dict[tuple[str, str], Handler] = {}

    def offers(self, method: str, path: str, handler: Handler | None = None) -> None:
        """One more path; what it does, or reset the cache."""

        def asked(request: web.Request) -> web.Response:
            self.asked.append(f"{request.method} {request.path}")
            if handler is not None:
                return handler(request)
            for rank in self.ranks:
                rank.reset()
            return web.Response(text="")

        self.routes[method, path] = asked

    @contextlib.asynccontextmanager
    async def running(self, *, serves: bool = True) -> AsyncIterator[Engine]:
        app = web.Application()
        for (method, path), handler in self.routes.items():

            async def handle(request: web.Request, handler: Handler = handler) -> web.Response:
                return handler(request)

            app.router.add_route(method, path, handle)
        runner = web.AppRunner(app)
        async with contextlib.AsyncExitStack() as stack:
            for rank in self.ranks:
                await stack.enter_async_context(rank.publisher)
                rank.publish(OLD)
            if serves:
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                await web.TCPSite(runner, "127.0.0.1", self.port).start()
            yield self

    @contextlib.asynccontextmanager
    async def bus(self, *, starts_partial: bool = True, clears: str = "auto", **settings: Any) -> AsyncIterator[Bus]:
        live, replay = self.endpoints
        source = {
            "endpoint": live,
            "replay_endpoint": replay,
            "api": self.api,
            "data_parallel_size": len(self.ranks),
            "clears": clears,
        }
        output = {"layout": "merged"}
        async with running_bus(source=source, output=output, **settings) as bus:
            for rank in self.ranks:
                await rank.publisher.wait_for_subscriber(30)
            if starts_partial:
                sources = bus.daemon.relay.sources
                await eventually(lambda: any(source.partial_since for source in sources), "partial")
            yield bus
