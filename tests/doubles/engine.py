"""Simulated engines of the tests with real publishers, with or without an HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from aiohttp import web

from kvbus.core.types import medium_key
from kvbus.tools.sim.dialects import DIALECTS
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import synthetic
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import Bus, eventually, running_bus
from tests.ports import free_port, ports_in_a_row
from tests.wire.captures import Key

BUFFER: Final = 50
OLD: Final = 400
"""Number of batches that the engine publishes before kvbus connects."""

Handler = Callable[[web.Request], web.Response]


class Engine:
    """A simulated engine rank with a real publisher.

    Its blocks are small, so that a few hundred tokens cause many events.

    The docstring of `tests.doubles` explains how it differs from `tests.properties.world.Engine`. The ``ts`` of a batch
    is the number of batches that this engine has published so far, in all its epochs. The count includes the batch
    itself.
    """

    def __init__(
        self,
        publisher: EnginePublisher,
        *,
        dialect: str = "vllm-0.33",
        blocks: int = 600,
        tiers: dict[str, int] | None = None,
        drop: float = 0.0,
        seed: int = 1,
        rank: int = 0,
    ) -> None:
        jobs = synthetic(seed, rank, turn_tokens=24, output_tokens=24, system_tokens=32, max_tokens=256)
        options = EngineOptions(blocks=blocks, block_size=4, max_running=2, tiers=tiers or {})
        self.sim = SimEngine(dialect, jobs, rank=rank, options=options)
        self.publisher = publisher
        self.published = 0
        self.dropped = 0
        self._drop = drop
        self._rng = random.Random(7)

    async def publish(self, count: int) -> None:
        """Publish ``count`` batches. Each batch is lost on the live stream with the probability `drop`."""
        for at in range(count):
            payload = self.sim.step(self.published + 1.0)
            assert payload is not None
            self._send(payload)
            if at % 10 == 0:
                await asyncio.sleep(0)

    def settle(self) -> set[Key]:
        """Publish the remaining batches of the engine's last step, and return the keys of all blocks that it then
        caches.
        """
        for payload in self.sim.flush(self.published + 1.0):
            self._send(payload)
        return {(block["group_idx"], str(medium_key(block["medium"])), block["hash"]) for block in self.sim.truth()}

    def reset(self) -> None:
        """Empty the engine's cache, and publish AllBlocksCleared."""
        self.sim.clear()
        self.settle()

    def restart(self) -> None:
        """Restart the engine with an empty cache. Its next batch has seq 0."""
        self.publisher.restart()
        self.sim.restart()

    def _send(self, payload: bytes) -> None:
        lost = self._rng.random() < self._drop
        self.dropped += lost
        self.published += 1
        self.publisher.publish(payload, live=not lost)


class EngineWithApi:
    """An engine with an HTTP API, whose ranks have published more batches than their replay buffers hold."""

    def __init__(self, dialect: str = "vllm-0.33", tiers: dict[str, int] | None = None, ranks: int = 1) -> None:
        first = ports_in_a_row(2 * ranks)
        self.endpoints = [f"tcp://127.0.0.1:{port}" for port in (first, first + ranks)]
        self.ranks = [
            Engine(
                EnginePublisher(
                    f"tcp://127.0.0.1:{first + rank}",
                    f"tcp://127.0.0.1:{first + ranks + rank}",
                    framing=DIALECTS[dialect].framing,
                    bind=True,
                    buffer_steps=BUFFER,
                ),
                dialect=dialect,
                blocks=300,
                tiers=tiers,
                rank=rank,
            )
            for rank in range(ranks)
        ]
        self.asked: list[str] = []
        """Method and path of each HTTP request to a path that :meth:`offers` added."""
        self.port = free_port()
        self.api = f"http://127.0.0.1:{self.port}"
        self.routes: dict[tuple[str, str], Handler] = {}

    def offers(self, method: str, path: str, handler: Handler | None = None) -> None:
        """Add a path to the HTTP API.

        The handler answers requests; without a handler, a request resets the cache of every rank.
        """

        def asked(request: web.Request) -> web.Response:
            self.asked.append(f"{request.method} {request.path}")
            if handler is not None:
                return handler(request)
            for rank in self.ranks:
                rank.reset()
            return web.Response(text="")

        self.routes[method, path] = asked

    @contextlib.asynccontextmanager
    async def running(self, *, serves: bool = True) -> AsyncIterator[EngineWithApi]:
        app = web.Application()
        for (method, path), handler in self.routes.items():

            async def handle(request: web.Request, handler: Handler = handler) -> web.Response:
                return handler(request)

            app.router.add_route(method, path, handle)
        runner = web.AppRunner(app)
        async with contextlib.AsyncExitStack() as stack:
            for rank in self.ranks:
                await stack.enter_async_context(rank.publisher)
                await rank.publish(OLD)
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
