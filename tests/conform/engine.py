"""A simulated engine with an HTTP API for tests of the conformance kit.

It keeps only the clauses of the specification that a test requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from kvbus.tools.conform.vectors import CLEARED, pack, stored
from kvbus.transport.engine.publisher import EnginePublisher

BLOCKS = 4


class Engine:
    """A simulated engine that stores a few blocks for each prompt, unless these blocks are live.

    Args:
        good: whether the engine is free of faults. If False, its API does not list the endpoints of its events, it
            stores live blocks again, and it sends no clear when its cache is emptied.
        limit: maximum length of a prompt, in tokens. None: the engine does not report its limit.
    """

    def __init__(self, publisher: EnginePublisher, *, good: bool = True, limit: int | None = None) -> None:
        self.publisher = publisher
        self.good = good
        self.limit = limit
        self.asked: list[str] = []
        self._live: set[int] = set()
        self._prompts: dict[str, int] = {}

    @property
    def prompts(self) -> list[str]:
        """All prompts that the simulated engine has received."""
        return list(self._prompts)

    def publish(self, *events: dict[str, Any]) -> None:
        self.publisher.publish(pack([1.5, list(events), 0]))

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/reset_prefix_cache", self._empty)
        app.router.add_post("/sleep", self._empty)
        app.router.add_post("/wake_up", self._wake)
        if self.good:
            app.router.add_get("/kv_event_sources", self._sources)
        return app

    async def _sources(self, request: web.Request) -> web.Response:
        return web.json_response([{"data_parallel_rank": 0, "endpoint": self.publisher.endpoint, "topic": ""}])

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "a-model", "max_model_len": self.limit}]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["model"] == "a-model"
        first = 1 + BLOCKS * self._prompts.setdefault(body["prompt"], len(self._prompts))
        blocks = range(first, first + BLOCKS)
        if not self.good or not self._live.issuperset(blocks):
            self._live.update(blocks)
            self.publish(stored(*blocks))
        return web.json_response({})

    async def _empty(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        self._live.clear()
        if self.good:
            self.publish(CLEARED)
        return web.json_response({})

    async def _wake(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        return web.json_response({})


@contextlib.asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[str]:
    """Serve a simulated engine's HTTP API until the ``with`` block ends, and yield its URL."""
    runner = web.AppRunner(engine.app(), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
