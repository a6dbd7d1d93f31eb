"""The read-only HTTP server: probes, metrics, how sources and routers stand, token ids for whoever may read them."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Generator
from typing import Final, Protocol

import msgspec

from kvbus.admin.access import Access, Caller, how_to_get_in
from kvbus.admin.content_log import ContentLog
from kvbus.admin.credentials import Credentials
from kvbus.admin.dumps import Dumps
from kvbus.admin.events import Events
from kvbus.admin.history import SOURCE_LEVELS, SOURCE_RATES, Course, History
from kvbus.admin.page import FILES, about, status_page
from kvbus.admin.responses import as_json, in_parts, in_slices, plain, refused
from kvbus.admin.timeline import Timeline
from kvbus.admin.views import router_entry, source_entry
from kvbus.config import Config, SourceStream
from kvbus.core.outputs.output import Output
from kvbus.core.stats import HttpRefusal
from kvbus.telemetry import metrics
from kvbus.telemetry.metrics import AT_ONCE, CONTENT_TYPE, Exposition
from kvbus.telemetry.readings import read_routers, read_sources
from kvbus.transport.http.connection_limits import CONNECTION_TIMEOUT
from kvbus.transport.http.messages import Request, Response, problem
from kvbus.transport.http.server import Handler, HttpServer

log = logging.getLogger("kvbus.admin.http")

SAMPLE: Final = 1.0
"""Seconds between two samples of the history."""

PARAMETERS: Final = {"/history": {"source"}, "/events": {"output", "after"}, "/blocks": {"source", "hashes"}}
"""The query parameters of each path that takes some."""


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
        self._access = Access(observed.config.http_allowed_hosts, credentials)
        self._content_log = ContentLog()
        self._under_way: dict[int, tuple[Request, Caller]] = {}
        self._exposition = Exposition(observed)
        self._dumps = Dumps(observed)
        self.timeline = Timeline()
        self.history = History()
        self._events = Events(self.timeline, self.history, observed.process)
        self._started = time.time()
        self._next_sample = 0.0
        self._sampling: asyncio.Task[None] | None = None
        self._server: HttpServer | None = None
        self.address: tuple[str, int] | None = None
        self._handlers = self.paths()

    def paths(self) -> dict[str, dict[str, Handler]]:
        """By path and method, what answers."""
        status, content = self._status, self._content
        readers = {
            **dict.fromkeys(FILES, status_page),
            "/livez": self._livez,
            "/readyz": self._readyz,
            "/overview": status(self._overview),
            "/history": status(self._source_history),
            "/metrics": status(self._metrics),
            "/sources": status(self._sources),
            "/routers": status(self._routers),
            "/blocks": content(self._dumps.handle),
        }
        return {
            **{path: {"GET": handler, "HEAD": handler} for path, handler in readers.items()},
            "/events": {"GET": status(self._stream)},
        }

    async def start(self) -> None:
        """Listen on the configured address.

        Raises:
            BindError: the address cannot be bound.
        """
        where = self._observed.config.http_address
        if where is None:
            return
        self._server = HttpServer(self._answer, self._observed.process, self._context, timeout=CONNECTION_TIMEOUT)
        self.address = await self._server.start(*where)
        # the loop stands while its first worker thread starts: some 20 ms, which the first /metrics would take
        await asyncio.to_thread(lambda: None)

    def _answer(self, request: Request) -> Awaitable[Response]:
        """Answer a request."""
        return self._handler_of(request)(request)

    def _handler_of(self, request: Request) -> Handler:
        if len(request.headers.get("host", ())) != 1 and request.version != "1.0":
            return _saying(problem(400, "a request has one Host header"))
        methods = self._handlers.get(request.path)
        if methods is None:
            return _saying(problem(404, f"no path {request.path!r}; there are: {', '.join(self._handlers)}"))
        handler = methods.get(request.method)
        if handler is None:
            allowed = ", ".join(methods)
            text = f"{request.path} takes {allowed}, not {request.method}"
            return _saying(problem(405, text, {"allow": allowed}))
        known = PARAMETERS.get(request.path, set())
        if unknown := request.query.keys() - known:
            takes = ", ".join(sorted(known)) or "none"
            return _saying(problem(400, f"{request.path} has no parameter {min(unknown)!r:.100}; it takes: {takes}"))
        return handler

    def _context(self) -> ssl.SSLContext | None:
        tls = self._access.credentials.tls
        return None if tls is None else tls.context

    def renew(self, credentials: Credentials) -> None:
        """Use other tokens and another certificate, and end the answers to callers whose token is gone."""
        self._access.credentials = credentials
        self._cut_off()

    def _cut_off(self) -> None:
        """End the answers to those whose credential holds no more."""
        for request, caller in list(self._under_way.values()):
            if not self._access.holds(caller):
                self._observed.process.http_closed["revoked"] += 1
                request.transport.abort()

    @property
    def credentials(self) -> Credentials:
        """What is in force."""
        return self._access.credentials

    def _status(self, handler: Handler) -> Handler:
        """Guard a handler whose answer has no content: a configuration may close it."""
        return handler if self._observed.config.http_open == "status" else self._guarded(handler, content=False)

    def _content(self, handler: Handler) -> Handler:
        """Guard a handler whose answer has token ids: local clients reach it, and principals who may read content."""
        return self._guarded(handler, content=True)

    def _guarded(self, handler: Handler, *, content: bool) -> Handler:
        async def guarded(request: Request) -> Response:
            path = f"{request.path}?output=" if content and request.path == "/events" else request.path
            caller = self._access.caller(request, content=content)
            if not isinstance(caller, Caller):
                log.warning("%s refused to %s: %s", path, request.remote, caller)
                return refused(self._observed.process, 403, caller, self._how(caller, path))
            reading = self._content_log.begin(caller.name, request.path) if content else None
            self._under_way[id(request)] = request, caller
            try:
                response = await handler(request)
                if reading is not None:
                    reading.status = response.status
                    reading.bytes += len(response.body) if isinstance(response.body, bytes) else 0
                return response
            finally:
                self._under_way.pop(id(request), None)
                if reading is not None:
                    self._content_log.end(reading)

        return guarded

    def _how(self, refusal: HttpRefusal, path: str) -> str:
        config = self._observed.config
        scheme = "http" if config.http_tls_certificate_file is None else "https"
        how = how_to_get_in(refusal, path, f"{scheme}://127.0.0.1:{0 if self.address is None else self.address[1]}")
        return (
            f"{how}, or show a bearer token that this bus knows (docs/SECURITY.md)" if config.http_tokens_file else how
        )

    async def close(self) -> None:
        """Stop listening."""
        self._events.close()
        if self._sampling is not None:
            self._sampling.cancel()
        if self._server is not None:
            await self._server.close()
            self._server = None
        self._content_log.write()

    def look(self, now: float) -> None:
        """Take a sample if it is time, and let clients know what has happened; the daemon calls it at each tick."""
        if self._server is None:
            return
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE - 0.05  # between two ticks, so that none of a second is left out
            observed = self._observed
            whole = observed.relay, observed.drivers, observed.output_stats
            if self._sampling is not None and self._sampling.done():
                self._sampling.result()
                self._sampling = None
            if self._sampling is None:  # else the event loop is so busy that the last one is not done
                work = self.history.sample(*whole, time.monotonic, time.time())
                self._sampling = asyncio.create_task(self._sample(work), name="kvbus-history")
            self.timeline.look_at_routers(*whole)
            self._content_log.look(now)
            self._server.tell_time()
        self._events.wake()

    async def _sample(self, work: Generator[None, None, None]) -> None:
        await in_slices(work)
        self._events.sampled()
        self._events.wake()

    async def _overview(self, request: Request) -> Response:
        """Everything about the bus that the page shows at first and that does not come with ``/events``."""
        caller, history = self._access.caller(request, content=True), self.history
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

    async def _source_history(self, request: Request) -> Response:
        name = request.query.get("source", "")
        course = self.history.sources.get(name)
        if course is None and name in {source.spec.label for source in self._observed.relay.present}:
            course = Course(SOURCE_RATES, SOURCE_LEVELS)  # it has come since the last sample
        if course is None:
            return problem(404, f"no source {name!r}; /history takes source=NAME, a name of /sources")
        return as_json({"times": self.history.times(), **self.history.samples(course)})

    async def _stream(self, request: Request) -> Response:
        if "output" in request.query:
            return await self._content(self._batches)(request)
        return await self._follow(request, None)

    async def _batches(self, request: Request) -> Response:
        name = request.query["output"]
        outputs = {each.spec.name: each for each in self._observed.relay.outputs if each.spec.view_of is None}
        if name not in outputs:
            return problem(404, f"no output {name!r}; there are: {', '.join(outputs)}")
        return await self._follow(request, outputs[name])

    async def _follow(self, request: Request, output: Output | None) -> Response:
        if not self._events.room(output):
            return refused(self._observed.process, 503, HttpRefusal.BUSY, "too many clients follow /events; try again")
        last_id = request.header("last-event-id") or request.query.get("after", "")
        return await self._events.answer(request, output, last_id)

    async def _metrics(self, _request: Request) -> Response:
        texts = await in_slices(self._exposition.render())
        texts.append(await asyncio.to_thread(self._exposition.process))
        return in_parts(texts, CONTENT_TYPE)

    async def _livez(self, _request: Request) -> Response:
        # an answer proves that the event loop runs
        return plain("ok\n")

    async def _readyz(self, _request: Request) -> Response:
        awaited = self._observed.awaited
        return plain(f"{awaited or 'ok'}\n", 503 if awaited else 200)

    async def _sources(self, _request: Request) -> Response:
        texts = await in_slices(self._source_entries())
        return in_parts(texts, "application/json")

    def _source_entries(self) -> Generator[None, None, list[bytes]]:
        """Make a JSON list of all sources, a few entries at a time."""
        observed, texts = self._observed, list[bytes]()
        for slot, reading in read_sources(observed.relay):
            stream = observed.streams[slot]
            where = stream.endpoint, stream.replay_endpoint, stream.found or None, observed.dialled_in(slot)
            texts.append((b"," if texts else b"[") + msgspec.json.encode(source_entry(reading, *where, slot)))
            if not len(texts) % AT_ONCE:
                yield
        return [*texts, b"]"] if texts else [b"[]"]

    async def _routers(self, _request: Request) -> Response:
        readings = read_routers(self._observed.relay, self._observed.drivers)
        return as_json([router_entry(output, router) for output, router in readings])


def _saying(response: Response) -> Handler:
    async def say(_request: Request) -> Response:
        return response

    return say
