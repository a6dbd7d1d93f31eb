"""The HTTP server of an index, based on aiohttp. It answers questions, and has a look-up page, probes and metrics."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from importlib.metadata import version
from typing import Any, Final, TypedDict

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvbus.http import connections
from kvbus.http.answers import FILES, page_file, problem
from kvbus.http.connections import Connections
from kvbus.index.access import IndexAccess
from kvbus.index.follower import Answer, Follower
from kvbus.index.questions import MAX_BODY_BYTES, MSGPACK, RefusedError, Request, read

log = logging.getLogger("kvbus.index")

MAX_ANSWERING: Final = 16
"""Maximum number of requests for ``/query`` that are read or answered at the same time. Further requests get 429."""

BODY_SECONDS: Final = 10.0
"""Maximum time in seconds in which a client must send the body of its request."""

_END_SECONDS: Final = 0.5
"""Maximum time in seconds for which the server continues unfinished answers when the process ends."""


class ConnectionCounts:
    """Counters of HTTP connections: the open connections, and the connections that the server has closed, by reason."""

    def __init__(self) -> None:
        self.http_connections = 0
        self.http_closed: Counter[str] = Counter()


OUTCOMES: Final = ("answered", "invalid", "too_large", "slow", "busy", "forbidden", "gone")
"""Values of the label ``outcome`` of the metric ``kvbus_index_questions_total``."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Problem(TypedDict):
    """The JSON body of an answer with an HTTP error. ``error`` gives the reason in a sentence."""

    error: str


class IndexServer:
    """The HTTP server of an index.

    Args:
        follower: the object that follows the streams and answers the questions.
        access: the rule that decides which requests may ask a question.
    """

    def __init__(self, follower: Follower, access: IndexAccess) -> None:
        self._follower: Final = follower
        self._access: Final = access
        self._answering = 0
        self._stats: Final = ConnectionCounts()
        self.questions: Final[Counter[str]] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._registry: Final = CollectorRegistry()
        self._registry.register(_Readings(follower, self.questions))
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._within_limits, _in_json])
        app.router.add_post("/query", self._query)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/livez", _livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/openapi.json", _openapi)
        for path in FILES:
            app.router.add_get(path, _page)
        self._connections: Final = Connections(
            app,
            self._stats,
            access.context,
            timeout=connections.TIMEOUT,
            access_log=None,
            logger=log,
            shutdown_timeout=_END_SECONDS,
            max_headers=64,
        )

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Start to listen on a host and port. Return the address in use.

        Raises:
            BindError: the address cannot be bound.
        """
        return await self._connections.listen("http", host, port)

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        await self._connections.close()

    @web.middleware
    async def _within_limits(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Call the handler of a request. Meanwhile, the timeout of the client's connection is paused."""
        with self._connections.answering(request.transport):
            try:
                return await handler(request)
            except ConnectionError:
                return web.Response()  # the client has disconnected, so nobody reads this

    async def _query(self, request: web.Request) -> web.Response:
        refusal = self._access.refusal(request)
        if refusal is not None:
            self.questions["forbidden"] += 1
            log.warning("a query from %s was refused: %s", request.remote, refusal)
            return problem(403, refusal)
        self._answering += 1
        try:
            answer = await self._answer(request)
        except RefusedError as refused:
            self.questions[refused.outcome] += 1
            return problem(refused.status, str(refused), {"Retry-After": "1"} if refused.status == 429 else None)
        except (asyncio.CancelledError, ConnectionError):
            self.questions["gone"] += 1
            raise
        finally:
            self._answering -= 1
        self.questions["answered"] += 1
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    async def _answer(self, request: web.Request) -> Answer:
        if self._answering > MAX_ANSWERING:
            raise RefusedError(429, "busy", f"{MAX_ANSWERING} requests are being answered; ask again")
        if "Content-Encoding" in request.headers:
            raise RefusedError(400, "invalid", "the body has a Content-Encoding; send it without one")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
        except TimeoutError as error:
            text = f"the body did not arrive within {BODY_SECONDS:g} s, or a chunk of it is malformed"
            raise RefusedError(408, "slow", text) from error
        except web.HTTPRequestEntityTooLarge as error:
            text = f"more than {MAX_BODY_BYTES} bytes; ask in several requests"
            raise RefusedError(413, "too_large", text) from error
        queries = read(body, msgpack=request.content_type == MSGPACK)
        try:
            return self._follower.answer(queries)
        except ValueError as error:
            raise RefusedError(400, "invalid", str(error)) from error

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _readyz(self, _request: web.Request) -> web.Response:
        awaited = self._follower.awaited
        return web.Response(text=f"{awaited or 'ok'}\n", status=503 if awaited else 200)


@web.middleware
async def _in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Call the handler of a request. If it raises an HTTP error, answer with a JSON body, not with aiohttp's text.

    For example, aiohttp raises an HTTP error if the path does not exist.
    """
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return problem(error.status, f"{request.method} {request.path}: {error.reason.lower()}", allowed)


async def _livez(_request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _page(request: web.Request) -> web.Response:
    return page_file("kvbus.index", request.path)


async def _openapi(_request: web.Request) -> web.Response:
    return web.Response(body=document(), content_type="application/json")


class _Readings(Collector):
    """The collector of the index's metrics. It reads their values at each scrape."""

    def __init__(self, follower: Follower, questions: Counter[str]) -> None:
        self._follower: Final = follower
        self._questions: Final = questions

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics of the index with their current values."""
        labels = ["source", "rank", "worker"]
        blocks = GaugeMetricFamily(
            "kvbus_index_blocks", "Blocks of a source in the index, by medium.", labels=[*labels, "medium"]
        )
        partial = GaugeMetricFamily(
            "kvbus_index_partial", "1 if the source may hold blocks that the index does not know.", labels=labels
        )
        live = GaugeMetricFamily("kvbus_index_live", "1 if the state of the source is live.", labels=labels)
        shared = GaugeMetricFamily(
            "kvbus_index_shared_blocks",
            "Blocks, among the source's 1,000 oldest, whose prompt another source of the model holds too.",
            labels=labels,
        )
        differing = GaugeMetricFamily(
            "kvbus_index_differing_blocks", "Shared blocks whose hashes at the two sources differ.", labels=labels
        )
        readings, agreement = self._follower.blocks(), self._follower.agreement
        for worker, standing, media in readings:
            names = [standing.source, str(standing.rank), standing.worker]
            shared.add_metric(names, agreement.shared[worker])
            differing.add_metric(names, agreement.differing[worker])
            partial.add_metric(names, float(standing.partial))
            live.add_metric(names, float(standing.state == "live"))
            for medium, count in media.items():
                blocks.add_metric([*names, medium], count)
        questions = CounterMetricFamily("kvbus_index_questions", "Requests for /query, by outcome.", labels=["outcome"])
        for outcome, count in self._questions.items():
            questions.add_metric([outcome], count)
        yield from (blocks, partial, live, shared, differing, questions)
        yield GaugeMetricFamily("kvbus_index_workers", "Sources in the index.", value=len(readings))
        info = GaugeMetricFamily(
            "kvbus_index_build_info", "Always 1. The label is the version of this kvbus.", labels=["version"]
        )
        info.add_metric([version("kvbus")], 1)
        yield info


@functools.cache
def document() -> bytes:
    """Return the OpenAPI document that describes the HTTP port, as JSON."""
    types: tuple[Any, ...] = (Request, Answer, Problem)
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    request, answer, refusal = schemas

    def described(kind: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
        return {"description": text, "content": {kind: {"schema": schema}}}

    def reads(summary: str, kind: str, **more: Any) -> dict[str, Any]:
        return {
            "get": {
                "summary": summary,
                "responses": {"200": described(kind, {"type": "string"}, "The answer."), **more},
            }
        }

    problems = {
        str(status): described("application/json", refusal, "No answer.") for status in (400, 403, 408, 413, 429)
    }
    query = {
        "summary": "Which sources hold the longest prefix of a prompt.",
        "operationId": "query",
        "security": [{}, {"token": []}],
        "requestBody": {
            "required": True,
            "content": {kind: {"schema": request} for kind in ("application/json", MSGPACK)},
        },
        "responses": {"200": described("application/json", answer, "The answer."), **problems},
    }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "kvbus index", "version": version("kvbus")},
            "paths": {
                "/query": {"post": query},
                "/metrics": reads("Metrics in Prometheus's text format.", "text/plain"),
                "/livez": reads("Whether the process runs.", "text/plain"),
                "/readyz": reads(
                    "Whether the streams were read.", "text/plain", **{"503": {"description": "Not yet."}}
                ),
                "/openapi.json": reads("This document.", "application/json"),
                **{path: reads("A file of the look-up page.", kind) for path, (_, kind) in FILES.items()},
            },
            "components": {
                "schemas": components,
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
        },
        order="sorted",
    )
