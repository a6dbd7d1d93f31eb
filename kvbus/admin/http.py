"""The read-only HTTP server: probes, metrics, how sources and routers stand, token ids for whoever may read them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Generator
from typing import Final, Protocol, cast

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from kvbus.admin.access import Access, Caller, Review, how_to_get_in
from kvbus.admin.content_log import ContentLog
from kvbus.admin.credentials import Credentials
from kvbus.admin.dumps import Dumps
from kvbus.admin.events import Events
from kvbus.admin.history import SOURCE_LEVELS, SOURCE_RATES, Course, History
from kvbus.admin.openapi import document
from kvbus.admin.pace import Pace, client
from kvbus.admin.page import FILES, about, status_page
from kvbus.admin.query import Queries
from kvbus.admin.responses import as_json, in_parts, problem, refused
from kvbus.admin.timeline import Timeline
from kvbus.admin.views import router_entry, source_entry
from kvbus.common.errors import BindError
from kvbus.config import Config, SourceStream, parts
from kvbus.core.outputs.output import Output
from kvbus.core.stats import HttpRefusal
from kvbus.telemetry import metrics
from kvbus.telemetry.metrics import AT_ONCE, CONTENT_TYPE, Exposition
from kvbus.telemetry.readings import read_routers, read_sources
from kvbus.transport.http.connection_limits import CONNECTION_TIMEOUT, ConnectionLimits

log = logging.getLogger("kvbus.admin.http")

_NEVER: Final = 10.0**9

SAMPLE: Final = 1.0
"""Seconds between two samples of the history."""


class Observed(metrics.Observed, Protocol):
    """The state that the server shows."""

    config: Config
    streams: dict[int, SourceStream]

    @property
    def awaited(self) -> str:
        """Return what has to be before routers may come; empty if nothing."""

    def dialled_in(self, slot: int) -> list[str] | None:
        """Return whence the publishers of a source are connected; None unless they dial in at an output's port."""


class AdminServer:
    """Serve probes, metrics, what there is to see of the bus, its blocks, and a status page."""

    def __init__(self, observed: Observed, credentials: Credentials | None = None) -> None:
        self._observed = observed
        self._access = Access(observed.config.http_allowed_hosts, credentials, _review(observed.config))
        self._content_log = ContentLog()
        self._under_way: dict[int, tuple[web.Request, Caller]] = {}
        self._exposition = Exposition(observed)
        self._pace = Pace()
        self._queries = Queries(observed, self._pace)
        self._dumps = Dumps(observed)
        self.timeline = Timeline()
        self.history = History()
        self._events = Events(self.timeline, self.history, observed.process)
        self._started = time.time()
        self._next_sample = 0.0
        self._sampling: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self.connections: ConnectionLimits | None = None
        self.address: tuple[str, int] | None = None

    def application(self) -> web.Application:
        """Return the application with its paths."""
        app = web.Application(middlewares=[self._answering])
        paced = self._paced
        for path in FILES:
            app.router.add_get(path, status_page)
        app.router.add_get("/livez", paced(self._livez, probe=True))
        app.router.add_get("/readyz", paced(self._readyz, probe=True))
        app.router.add_get("/overview", self._status(paced(self._overview)))
        app.router.add_get("/history", self._status(paced(self._source_history)))
        app.router.add_get("/events", self._status(self._queued(self._stream)), allow_head=False)
        app.router.add_get("/openapi.json", self._status(self._queued(_openapi)))
        app.router.add_get("/metrics", self._status(self._queued(self._metrics)))
        app.router.add_get("/sources", self._status(self._queued(self._sources)))
        app.router.add_get("/routers", self._status(paced(self._routers)))
        app.router.add_get("/blocks", self._content(self._queued(self._dumps.handle)))
        app.router.add_post("/query", self._content(self._queued(self._queries.handle)))
        return app

    async def start(self) -> None:
        """Listen on the configured address.

        Raises:
            BindError: the address cannot be bound.
        """
        where = self._observed.config.http_address
        if where is None:
            return
        self._runner = web.AppRunner(
            self.application(),
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,  # else answers of many pieces are made for nobody, and others wait behind them
            shutdown_timeout=1.0,
            keepalive_timeout=_NEVER,  # ConnectionLimits closes idle connections, and counts them
            lingering_time=1.0,
            auto_decompress=False,  # a bad stream would end in a traceback, a good one may be a thousand times as long
        )
        await self._runner.setup()
        server = self._runner.server
        if server is None:  # pragma: no cover - set up above
            return
        self.connections = ConnectionLimits(server, self._observed.process, self._context, timeout=CONNECTION_TIMEOUT)
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self.connections, *where, reuse_address=True
            )
        except OSError as error:
            raise BindError(f"http {where[0]}:{where[1]}", error.strerror or str(error)) from error
        host, port = self._listener.sockets[0].getsockname()[:2]
        self.address = (host, port)
        # the loop stands while its first worker thread starts: some 20 ms, which the first /metrics would take
        await asyncio.to_thread(lambda: None)

    @web.middleware
    async def _answering(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Stop a connection's timeout while its request is being answered."""
        if self.connections is None:  # pragma: no cover - no request arrives before `start` has set it
            return await handler(request)
        client.set(request.remote or "")
        with self.connections.answering(request.transport):
            return await handler(request)

    def _context(self) -> ssl.SSLContext | None:
        tls = self._access.credentials.tls
        return None if tls is None else tls.context

    def renew(self, credentials: Credentials) -> None:
        """Take over other tokens and another certificate. Whoever got in with what is gone is cut off."""
        before, self._access.credentials = self._access.credentials, credentials
        if self.connections is not None and _authorities(before) != _authorities(credentials):
            self.connections.close_all("revoked")  # nobody knows who of them has shown a certificate of which
        self._cut_off()

    def _cut_off(self) -> None:
        """End the answers to those whose credential holds no more."""
        for request, caller in list(self._under_way.values()):
            if not self._access.holds(caller) and request.transport is not None:
                self._observed.process.http_closed["revoked"] += 1
                request.transport.abort()

    @property
    def credentials(self) -> Credentials:
        """What is in force."""
        return self._access.credentials

    def _paced(self, handler: Handler, *, probe: bool = False) -> Handler:
        """Let a handler make its whole answer when it is its turn."""

        async def answer(request: web.Request) -> web.StreamResponse:
            async with self._turn(request, probe=probe):
                return await handler(request)

        return answer

    def _queued(self, handler: Handler) -> Handler:
        """Let a handler that makes its answer in pieces begin when it is its turn."""

        async def answer(request: web.Request) -> web.StreamResponse:
            async with self._turn(request):
                pass
            return await handler(request)

        return answer

    def _turn(self, request: web.Request, *, probe: bool = False) -> contextlib.AbstractAsyncContextManager[None]:
        """The first piece of a request."""
        limits = None if probe else self.connections
        waiting = None if limits is None else limits.waiting(request.transport)
        return self._pace.piece(probe=probe, first=True, waiting=waiting)

    def _status(self, handler: Handler) -> Handler:
        """Guard a handler whose answer has no content: a configuration may close it."""
        return handler if self._observed.config.http_open == "status" else self._guarded(handler, content=False)

    def _content(self, handler: Handler) -> Handler:
        """Guard a handler whose answer has token ids: local clients reach it, and principals who may read content."""
        return self._guarded(handler, content=True)

    def _guarded(self, handler: Handler, *, content: bool) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            path = f"{request.path}?output=" if content and request.path == "/events" else request.path
            caller = await self._access.caller(request, content=content)
            if not isinstance(caller, Caller):
                log.warning("%s refused to %s: %s", path, request.remote, caller)
                return refused(self._observed.process, 403, caller, self._how(caller, path))
            self._under_way[id(request)] = request, caller
            try:
                return await (self._logged(handler, request, caller.name) if content else handler(request))
            finally:
                self._under_way.pop(id(request), None)

        return guarded

    async def _logged(self, handler: Handler, request: web.Request, caller: str) -> web.StreamResponse:
        """Answer with content, and take note of who got how much."""
        reading = self._content_log.begin(caller, request.path)
        try:
            response = await handler(request)
            reading.status = response.status
            if isinstance(response, web.Response) and isinstance(response.body, bytes):
                reading.bytes += len(response.body)
            return response
        finally:
            self._content_log.end(reading)

    def _how(self, refusal: HttpRefusal, path: str) -> str:
        config = self._observed.config
        scheme = "http" if config.http_tls_certificate_file is None else "https"
        others = config.http_tokens_file or config.http_client_ca_file or config.http_token_review
        how = how_to_get_in(refusal, path, f"{scheme}://127.0.0.1:{0 if self.address is None else self.address[1]}")
        return f"{how}, or show a credential that this bus knows (docs/SECURITY.md)" if others else how

    async def close(self) -> None:
        """Stop listening."""
        self._events.close()
        if self._sampling is not None:
            self._sampling.cancel()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self.connections is not None:
            self.connections.close_all()  # those that aiohttp does not know of, because they are in their handshake
        self._content_log.write()
        await self._queries.close()

    def look(self, now: float) -> None:
        """Take a sample if it is time, and let clients know what has happened; the daemon calls it at each tick."""
        if self.address is None:
            return
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE - 0.05  # between two ticks, so that none of a second is left out
            observed = self._observed
            whole = observed.relay, observed.drivers, observed.output_stats
            if self._sampling is not None and self._sampling.done():
                self._sampling.result()
                self._sampling = None
            if self._sampling is None:  # or so many ask that the last one still waits for its turns
                work = self.history.sample(*whole, time.monotonic, time.time())
                self._sampling = asyncio.create_task(self._sample(work), name="kvbus-history")
            self.timeline.look_at_routers(*whole)
            self._cut_off()
            self._content_log.look(now)
        self._events.wake()

    async def _sample(self, work: Generator[None, None, None]) -> None:
        await self._pace.in_turns(work)
        self._events.sampled()
        self._events.wake()

    async def _overview(self, request: web.Request) -> web.Response:
        """Everything about the bus that the page shows at first and that does not come with ``/events``."""
        caller, history = await self._access.caller(request, content=True), self.history
        return as_json(
            {
                **about(self._observed.config),
                "config_refused": self._observed.process.config_refused,
                "started": self._started,
                "now": time.time(),
                "content": None if isinstance(caller, Caller) else self._how(caller, "/blocks"),
                "id": f"{self.timeline.process}-{self.timeline.last}",
                "transitions": list(self.timeline.since(0)),
                "times": history.times(),
                "all": history.samples(history.every),
                "outputs": {name: history.samples(course) for name, course in history.outputs.items()},
            }
        )

    async def _source_history(self, request: web.Request) -> web.Response:
        name = request.query.get("source", "")
        course = self.history.sources.get(name)
        if course is None and name in {source.spec.label for source in self._observed.relay.present}:
            course = Course(SOURCE_RATES, SOURCE_LEVELS)  # it has come since the last sample
        if course is None:
            return problem(404, f"no source {name!r}; /history takes source=NAME, a name of /sources")
        return as_json({"times": self.history.times(), **self.history.samples(course)})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if unknown := [each for each in request.query if each not in {"output", "after"}]:
            return problem(400, f"/events knows no {unknown[0]!r}; it takes output=NAME and after=ID")
        if "output" in request.query:
            return await self._content(self._batches)(request)
        return await self._follow(request, None)

    async def _batches(self, request: web.Request) -> web.StreamResponse:
        name = request.query["output"]
        outputs = {each.spec.name: each for each in self._observed.relay.outputs if each.spec.view_of is None}
        if name not in outputs:
            return problem(404, f"no output {name!r}; there are: {', '.join(outputs)}")
        return await self._follow(request, outputs[name])

    async def _follow(self, request: web.Request, output: Output | None) -> web.StreamResponse:
        if not self._events.room(output):
            return refused(self._observed.process, 503, HttpRefusal.BUSY, "too many clients follow /events; try again")
        last_id = request.headers.get("Last-Event-ID") or request.query.get("after", "")
        return await self._events.answer(request, output, last_id)

    async def _metrics(self, _request: web.Request) -> web.Response:
        texts = await self._pace.in_turns(self._exposition.render())
        texts.append(await asyncio.to_thread(self._exposition.process))
        return in_parts(texts, CONTENT_TYPE, self._pace)

    async def _livez(self, _request: web.Request) -> web.Response:
        # an answer proves that the event loop runs
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        awaited = self._observed.awaited
        return web.Response(status=503 if awaited else 200, text=f"{awaited or 'ok'}\n")

    async def _sources(self, _request: web.Request) -> web.Response:
        texts = await self._pace.in_turns(self._source_entries())
        return in_parts(texts, "application/json", self._pace)

    def _source_entries(self) -> Generator[None, None, list[bytes]]:
        """Make a JSON list of all sources, a few entries at a time."""
        observed, texts = self._observed, list[bytes]()
        for slot, reading in read_sources(observed.relay):
            stream = observed.streams[slot]
            where = stream.endpoint, stream.replay_endpoint, stream.found or None, observed.dialled_in(slot)
            texts.append((b"," if texts else b"[") + msgspec.json.encode(source_entry(reading, *where)))
            if not len(texts) % AT_ONCE:
                yield
        return [*texts, b"]"] if texts else [b"[]"]

    async def _routers(self, _request: web.Request) -> web.Response:
        readings = read_routers(self._observed.relay, self._observed.drivers)
        return as_json([router_entry(output, router) for output, router in readings])


def _review(config: Config) -> Review | None:
    """What reviews tokens of service accounts, if they are asked for."""
    if config.http_token_review is None:
        return None
    reviewer = parts.load(parts.REVIEWS, "kubernetes")(config.http_token_review, rights=config.http_access_review)
    return cast("Review", reviewer.review)


def _authorities(credentials: Credentials) -> bytes:
    return b"" if credentials.tls is None else credentials.tls.authorities


async def _openapi(_request: web.Request) -> web.Response:
    return web.Response(body=await asyncio.to_thread(document), content_type="application/json")  # some 10 ms, once
