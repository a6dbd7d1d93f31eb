"""The admin port: a read-only HTTP server for probes, metrics, sources, routers, blocks, events and the status page."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncIterator, Generator
from functools import partial
from typing import Final, Literal, NamedTuple, Protocol

import msgspec
from aiohttp import HttpVersion10, web
from aiohttp.typedefs import Handler

from kvbus.common.tasks import report_out_of_memory
from kvbus.config import Config, SourceStream
from kvbus.core.outputs.output import Output
from kvbus.core.stats import HttpRefusal
from kvbus.http import connections
from kvbus.http.access import Access, Caller, how_to_get_in
from kvbus.http.answers import FILES, about, as_json, in_slices, plain, problem, refused, send, status_page
from kvbus.http.blocks import dump_blocks
from kvbus.http.connections import MAX_UNANSWERED_BYTES, Connections
from kvbus.http.content_log import ContentLog
from kvbus.http.credentials import Credentials
from kvbus.http.entries import router_entry, source_entry
from kvbus.http.events import Events
from kvbus.http.history import SOURCE_LEVELS, SOURCE_RATES, Course, History
from kvbus.http.timeline import Timeline
from kvbus.telemetry import metrics
from kvbus.telemetry.metrics import AT_ONCE, CONTENT_TYPE, Exposition
from kvbus.telemetry.readings import read_routers, read_sources

log = logging.getLogger("kvbus.http")

SAMPLE: Final = 1.0
"""Seconds between two samples of the history: the rates and levels of sources and outputs in the last five minutes."""

MAX_ANSWERS: Final = 2
"""Maximum number of answers that are made at the same time. Further requests wait.

Probes, files of the page and event streams do not count, and never wait.
"""

ENDING: Final = 1.0
"""Maximum seconds for which the server waits for unfinished answers when it closes."""


class BusState(metrics.BusState, Protocol):
    """The attributes and methods of the daemon that the server uses."""

    config: Config
    streams: dict[int, SourceStream]

    @property
    def awaited(self) -> str:
        """The reason why kvbus is not ready for routers, such as ``starting``; empty if it is ready."""

    def dialled_in(self, slot: int) -> list[str] | None:
        """Return the addresses of the engines that have connected to kvbus for this source.

        It is None if kvbus dials the engine.
        """


class Path(NamedTuple):
    """One path of the server, and the rules for its requests.

    Attributes:
        handler: makes the answer.
        shows: the kind of the answer's content, which decides who may read it. ``nothing`` is an answer that reveals
            nothing about the bus, so every client may read it. ``status`` is for every client too, unless ``http_open``
            is ``probes``. ``content`` (blocks and batches) is for local programs and for clients with a token that
            allows it.
        takes: the names of the allowed query parameters.
        methods: the allowed HTTP methods.
    """

    handler: Handler
    shows: Literal["nothing", "status", "content"]
    takes: frozenset[str] = frozenset()
    methods: tuple[str, ...] = ("GET", "HEAD")


class AdminServer:
    """The HTTP server of the admin port.

    Args:
        observed: the daemon that the server shows.
        credentials: the valid tokens and the TLS settings; None for no tokens and no TLS.
    """

    def __init__(self, observed: BusState, credentials: Credentials | None = None) -> None:
        self._observed = observed
        self._access = Access(observed.config.http_allowed_hosts, credentials)
        self._content_log = ContentLog()
        self._under_way: dict[int, tuple[web.Request, Caller]] = {}
        self._exposition = Exposition(observed)
        self._answers = asyncio.Semaphore(MAX_ANSWERS)
        self.timeline = Timeline()
        self.history = History()
        self._events = Events(self.timeline, self.history, observed.process)
        self._started = time.time()
        self._next_sample = 0.0
        self._sampling: asyncio.Task[None] | None = None
        self.address: tuple[str, int] | None = None
        self.paths: Final[dict[str, Path]] = {
            **dict.fromkeys(FILES, Path(status_page, "nothing")),
            "/livez": Path(self._livez, "nothing"),
            "/readyz": Path(self._readyz, "nothing"),
            "/overview": Path(self._overview, "status"),
            "/history": Path(self._source_history, "status", frozenset({"source"})),
            "/metrics": Path(self._metrics, "status"),
            "/sources": Path(self._sources, "status"),
            "/routers": Path(self._routers, "status"),
            "/findings": Path(self._findings, "status"),
            "/events": Path(self._stream, "status", frozenset({"output", "after"}), ("GET",)),
            "/blocks": Path(partial(dump_blocks, observed), "content", frozenset({"source", "hashes"})),
        }
        app = web.Application(middlewares=[self._each])
        app.on_response_prepare.append(_without_server)
        for name, path in self.paths.items():
            for method in path.methods:
                app.router.add_route(method, name, path.handler)
        self._connections: Final = Connections(
            app,
            observed.process,
            self._context,
            timeout=connections.TIMEOUT,
            max_unanswered=MAX_UNANSWERED_BYTES,
            access_log=None,
            logger=log,
            handler_cancellation=True,
            shutdown_timeout=ENDING,
            lingering_time=1.0,
            max_headers=64,
        )

    async def start(self) -> None:
        """Listen on the configured address. Without an address, do nothing.

        Raises:
            BindError: the address cannot be bound.
        """
        where = self._observed.config.http_address
        if where is None:
            return
        self.address = await self._connections.listen("http", *where)
        # Start asyncio's first worker thread before there are requests. This blocks the event loop for about 20 ms,
        # which would otherwise happen during the first request of /metrics.
        await asyncio.to_thread(lambda: None)

    def _context(self) -> ssl.SSLContext | None:
        tls = self._access.credentials.tls
        return None if tls is None else tls.context

    @web.middleware
    async def _each(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request, and close the connection if the client reads too slowly."""
        response: web.StreamResponse | None = None
        with self._connections.answering(request.transport):
            try:
                response = await self._answer(request, handler)
                async with asyncio.timeout(connections.TIMEOUT):
                    await response.prepare(request)
                    await response.write_eof()
            except TimeoutError:  # abort, because a partial answer must not look complete
                self._observed.process.http_closed["slow"] += 1
                if request.transport is not None:
                    request.transport.abort()
            except ConnectionError:
                pass  # the client has disconnected
            except Exception as error:
                report_out_of_memory(error)
                raise
        return web.Response() if response is None else response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if len(request.headers.getall("Host", ())) != 1 and request.version != HttpVersion10:
            return problem(400, "the request must have exactly one Host header")
        resource = request.match_info.route.resource
        path = None if resource is None else self.paths[resource.canonical]
        if path is None:
            return await self._no_path(request, handler)
        if unknown := request.query.keys() - path.takes:
            takes = ", ".join(sorted(path.takes)) or "none"
            name = request.path
            return problem(400, f"{name} has no parameter {min(unknown)!r:.100}; it takes: {takes}")
        if len(request.query) > len(set(request.query)):
            twice = min(name for name in request.query if len(request.query.getall(name)) > 1)
            return problem(400, f"{request.path} takes each parameter once, and {twice} is given several times")
        if path.shows == "content":
            return await self._guarded(request, handler, content=True)
        if path.shows == "status" and self._observed.config.http_open != "status":
            return await self._guarded(request, handler, content=False)
        return await handler(request)

    async def _no_path(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request for an unknown path or method. The error names the known paths or methods."""
        try:
            return await handler(request)
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            text = f"{request.path} takes {allowed}, not {request.method}"
            return problem(405, text, {"Allow": allowed})
        except web.HTTPNotFound:
            return problem(404, f"no path {request.path!r:.100}; the paths are: {', '.join(self.paths)}")

    async def _guarded(self, request: web.Request, handler: Handler, *, content: bool) -> web.StreamResponse:
        """Answer a request if its client has access, and refuse it otherwise.

        Args:
            request: the request.
            handler: makes the answer.
            content: whether the answer shows blocks or batches.
        """
        process = self._observed.process
        path = f"{request.path}?output=" if content and request.path == "/events" else request.path
        caller = self._access.caller(request, content=content)
        if not isinstance(caller, Caller):
            log.warning("%s refused to %s: %s", path, request.remote, caller)
            return refused(process, 403, caller, self._how(caller, path))
        reading = self._content_log.begin(caller.name, request.path) if content else None
        self._under_way[id(request)] = request, caller
        try:
            response = await handler(request)
            if reading is not None:
                reading.status = response.status
                body = response.body if isinstance(response, web.Response) else None
                reading.bytes += len(body) if isinstance(body, bytes) else 0
            return response
        finally:
            self._under_way.pop(id(request), None)
            if reading is not None:
                self._content_log.end(reading)

    def _how(self, refusal: HttpRefusal, path: str) -> str:
        config = self._observed.config
        scheme = "http" if config.http_tls_certificate_file is None else "https"
        how = how_to_get_in(refusal, path, f"{scheme}://127.0.0.1:{0 if self.address is None else self.address[1]}")
        token = ", or send a valid bearer token (docs/SECURITY.md)"
        return f"{how}{token}" if config.http_tokens_file else how

    def renew(self, credentials: Credentials) -> None:
        """Replace the tokens and the TLS certificate. Abort the answers to clients whose token is no longer valid."""
        self._access.credentials = credentials
        for request, caller in list(self._under_way.values()):
            if not self._access.holds(caller) and request.transport is not None:
                self._observed.process.http_closed["revoked"] += 1
                request.transport.abort()

    @property
    def credentials(self) -> Credentials:
        """The valid tokens and the current TLS settings."""
        return self._access.credentials

    async def close(self) -> None:
        """Stop listening, and wait up to :data:`ENDING` seconds for unfinished answers."""
        self._events.close()
        if self._sampling is not None:
            self._sampling.cancel()
        await self._connections.close()
        self.address = None
        self._content_log.write()

    def look(self, now: float) -> None:
        """Add a sample to the history if one is due, and wake the clients of ``/events``.

        The daemon calls this at each tick.
        """
        if self.address is None:
            return
        if now >= self._next_sample:
            # The daemon calls this method about every 0.1 s. The sample is due 0.05 s early, so that a call slightly
            # before the end of the second takes it, too.
            self._next_sample = now + SAMPLE - 0.05
            observed = self._observed
            readings = observed.relay, observed.drivers, observed.output_stats
            if self._sampling is not None and self._sampling.done():
                self._sampling.result()
                self._sampling = None
            # If the previous sample is still incomplete because the event loop is busy, skip this sample.
            if self._sampling is None:
                work = self.history.sample(*readings, time.monotonic, time.time())
                self._sampling = asyncio.create_task(self._sample(work), name="kvbus-history")
            self.timeline.look_at_routers(*readings)
            self._content_log.look(now)
        self._events.wake()

    async def _sample(self, work: Generator[None, None, None]) -> None:
        await in_slices(work)
        self._events.sampled()
        self._events.wake()

    @contextlib.asynccontextmanager
    async def _turn(self, request: web.Request) -> AsyncIterator[None]:
        """Wait until fewer than :data:`MAX_ANSWERS` answers are being made.

        While the request waits, the server may close its connection to make room for a new connection.
        """
        with self._connections.waiting(request.transport):
            await self._answers.acquire()
        try:
            yield
        finally:
            self._answers.release()

    async def _overview(self, request: web.Request) -> web.Response:
        """Return all data that the status page shows when it opens, and that ``/events`` does not send."""
        caller, history = self._access.caller(request, content=True), self.history
        async with self._turn(request):
            return as_json(
                {
                    **about(self._observed.config),
                    "config_refused": self._observed.process.config_refused,
                    "state_writing": self._observed.process.state_writing,
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
        async with self._turn(request):
            course = self.history.sources.get(name)
            if course is None and name in {source.spec.label for source in self._observed.relay.present}:
                course = Course(SOURCE_RATES, SOURCE_LEVELS)  # added after the last sample, so it has no history yet
            if course is None:
                return problem(404, f"no source {name!r}; set source= to a name that /sources shows")
            return as_json({"times": self.history.times(), **self.history.samples(course)})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if "output" in request.query:
            return await self._guarded(request, self._batches, content=True)
        return await self._follow(request, None)

    async def _batches(self, request: web.Request) -> web.StreamResponse:
        name = request.query["output"]
        outputs = {each.spec.name: each for each in self._observed.relay.outputs if each.spec.view_of is None}
        if name not in outputs:
            return problem(404, f"no output {name!r}; the outputs are: {', '.join(outputs)}")
        return await self._follow(request, outputs[name])

    async def _follow(self, request: web.Request, output: Output | None) -> web.StreamResponse:
        if not self._events.room(output):
            return refused(self._observed.process, 503, HttpRefusal.BUSY, "too many clients follow /events; try again")
        last_id = request.headers.get("Last-Event-ID") or request.query.get("after", "")
        return await self._events.answer(request, output, last_id)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        async with self._turn(request):
            readings = await in_slices(self._exposition.read())
            text = await asyncio.to_thread(self._exposition.render, readings)
        return await send(request, text, CONTENT_TYPE)

    async def _livez(self, _request: web.Request) -> web.Response:
        # Kubernetes asks only whether the event loop runs, and any answer proves that.
        return plain("ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        awaited = self._observed.awaited
        return plain(f"{awaited or 'ok'}\n", 503 if awaited else 200)

    async def _sources(self, request: web.Request) -> web.StreamResponse:
        async with self._turn(request):
            entries = await in_slices(self._source_entries())
        return await send(request, b"[" + b",".join(entries) + b"]", "application/json")

    def _source_entries(self) -> Generator[None, None, list[bytes]]:
        """Return the encoded ``/sources`` entries of all sources. Each step of the generator makes a few of them."""
        observed, entries = self._observed, list[bytes]()
        for slot, reading in read_sources(observed.relay):
            stream = observed.streams[slot]
            where = stream.endpoint, stream.replay_endpoint, stream.found or None, observed.dialled_in(slot)
            entries.append(msgspec.json.encode(source_entry(reading, *where, slot)))
            if not len(entries) % AT_ONCE:
                yield
        return entries

    async def _routers(self, request: web.Request) -> web.Response:
        async with self._turn(request):
            readings = read_routers(self._observed.relay, self._observed.drivers, time.time())
            return as_json([router_entry(each) for each in readings])

    async def _findings(self, _request: web.Request) -> web.Response:
        return as_json(self._observed.findings)


async def _without_server(_request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Remove the Server header from a response, because it shows the HTTP library and its version."""
    response.headers.popall("Server", None)
