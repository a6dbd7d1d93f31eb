"""A proxy of an engine's HTTP API.

It forwards requests to the engine. In answers that list the endpoints of the engine's events, it puts kvbus's
endpoints.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, Protocol
from urllib.parse import unquote

import aiohttp
from aiohttp import ClientResponse, web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.typedefs import Handler, RawHeaders
from multidict import CIMultiDict
from yarl import URL

from kvbus.common.front_stats import FrontStats
from kvbus.config import Config, SourceStream, parse_address, render_topic
from kvbus.config.front import Front, Fronting
from kvbus.core.wire.profiles import PROFILES
from kvbus.http.connections import Connections
from kvbus.parts.discovery.contract import DiscoveryError
from kvbus.parts.front.answers import Offer, Offers, UnanswerableError, of_kvbus, of_sglang, of_vllm


class BusState(Protocol):
    """The parts of the daemon that a proxy needs: its configuration, and the stream of each current source, by slot.

    A slot is the number of a source in the relay.
    """

    config: Config
    streams: dict[int, SourceStream]


def offers(observed: BusState, front: Fronting, host: str) -> Offers:
    """Return, by rank, the endpoints at which a router gets an engine's events from kvbus.

    Args:
        observed: the daemon, from which its configuration and its current sources are read.
        front: the configuration of the proxy. It names the engine's source, and the output that the engine's routers
            read.
        host: the host that replaces a wildcard in an endpoint.

    Raises:
        UnanswerableError: kvbus has no such source now, or several sources could be the engine, or all ranks share one
            stream.
    """
    config = observed.config
    names = {slot: config.sources[stream.source_index].name for slot, stream in observed.streams.items()}
    streams = [stream for slot, stream in observed.streams.items() if front.source in (None, names[slot])]
    if not streams:
        raise UnanswerableError("kvbus does not know yet where the engine publishes")
    if len({names[stream.index] for stream in streams}) > 1:
        raise UnanswerableError("kvbus has several engines: name this engine's source in the front's `source`")
    number = front.number_of_output(each.name for each in config.outputs)
    output = config.outputs[number or 0]
    if output.layout == "merged" and len(streams) > 1:
        have = f"kvbus has one stream for all ranks (output {output.name})"
        raise UnanswerableError(f"{have}, and the answer needs one stream for each rank")
    offered = {}
    for stream in streams:
        endpoint, replay_endpoint, _ = output.stream_endpoints(stream.index)
        topic = PROFILES[output.profile].only_topic
        if topic is None and output.topic is not None:
            topic = render_topic(output.topic, stream, config).decode()
        offered[stream.rank] = Offer(endpoint, replay_endpoint, topic, host)
    return offered


CONNECT: Final = 5.0
"""Timeout in seconds of connecting to the engine. There is no timeout for the engine's answer."""
IDLE: Final = 75.0
"""Timeout in seconds of a client that sends nothing.

It applies to the head of a request, between two parts of its body, and between two requests. It is longer than the time
for which routers keep unused connections open.
"""
IDLE_SECONDS: Final = 2.0
"""Time in seconds for which kvbus reuses an idle connection to the engine.

It is short because engines close a connection that is idle for five seconds. A request that kvbus sends at that moment
would be lost.
"""
LINE: Final = 16_384
"""Maximum size in bytes of a request line, of a status line, and of each header, in requests and in answers."""
AUTOMATIC: Final = ("Accept", "Accept-Encoding", "Content-Type", "Date", "Server", "User-Agent")
"""Headers that aiohttp adds if they are missing. The proxy must not add them to forwarded messages."""

_ODD: Final = "surrogateescape"
_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Names of headers that concern a single connection. kvbus does not forward them."""
_NEVER_NAMED: Final = frozenset({"content-length", "host"})
"""Names of headers that kvbus forwards even if a Connection header lists them, because the message depends on them."""


class Engine:
    """The connections to one engine's HTTP API, which are kept open for further requests.

    Args:
        base: the base URL of the engine's HTTP API.
    """

    def __init__(self, base: str) -> None:
        self.base = base
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=AUTOMATIC,
            max_line_size=LINE,
            max_field_size=LINE,
        )

    async def ask(self, request: web.Request, *, without: frozenset[str] = frozenset()) -> ClientResponse:
        """Forward a request to the engine, and return the answer as soon as its head has arrived.

        Args:
            request: the client's request. Its body is read only as fast as the engine accepts it.
            without: names of further headers, in lower case, that are not forwarded.

        Raises:
            aiohttp.ClientError: the engine cannot be reached, or its answer is not HTTP.
            ValueError: the request cannot be written to the engine.
        """
        headers = end_to_end(request.raw_headers)
        # Do not forward "Expect: 100-continue", because kvbus has already answered it.
        for name in ("expect", *without):
            headers.popall(name, None)
        return await self._session.request(
            request.method,
            URL(self.base + request.raw_path, encoded=True),
            headers=headers,
            data=_parts(request.content, IDLE) if request.body_exists else None,
            allow_redirects=False,
        )

    async def close(self) -> None:
        """Close all connections to the engine."""
        await self._session.close()


class BodyError(Exception):
    """The body of a client's request ends too early or is malformed. The error's text is sent to the client."""


async def _parts(content: aiohttp.StreamReader, seconds: float) -> AsyncIterator[bytes]:
    """Yield the parts of a request's body as they arrive.

    Raises:
        BodyError: no part has arrived for ``seconds``, or the client has closed the connection. After a malformed
            chunk, aiohttp delivers no further part, so the time runs out.
    """
    while True:
        try:
            async with asyncio.timeout(seconds):
                part = await content.readany()
        except TimeoutError as error:
            raise BodyError(f"no further part has come for {seconds:g} s, or a chunk is malformed") from error
        except aiohttp.ClientError as error:
            raise BodyError(str(error)) from error
        if not part:
            return
        yield part


def end_to_end(raw: RawHeaders) -> CIMultiDict[str]:
    """Return the headers of a message without the headers that concern a single connection.

    Keep the headers' spelling.
    """
    headers = [(name.decode("utf-8", _ODD), value.decode("utf-8", _ODD)) for name, value in raw]
    of_connection = ",".join(value for name, value in headers if name.lower() == "connection")
    off = _HOP | ({each.strip().lower() for each in of_connection.split(",")} - _NEVER_NAMED)
    # Give all headers of one name the spelling of the first. Otherwise aiohttp would send only one of two headers whose
    # names differ in upper and lower case.
    spelled: dict[str, str] = {}
    return CIMultiDict(
        (spelled.setdefault(name.lower(), name), value) for name, value in headers if name.lower() not in off
    )


class Answer(web.StreamResponse):
    """The engine's answer, as kvbus forwards it to the client.

    Attributes:
        absent: names of the headers that the engine's answer lacks and that aiohttp would add.
    """

    def __init__(self, upstream: ClientResponse) -> None:
        headers = end_to_end(upstream.raw_headers)
        super().__init__(status=upstream.status, reason=upstream.reason, headers=headers)
        self.absent = [name for name in AUTOMATIC if name not in headers]


async def as_it_came(_request: web.Request, response: web.StreamResponse) -> None:
    """Remove the headers that aiohttp has added to an engine's answer, just before the answer is sent."""
    if isinstance(response, Answer):
        for name in response.absent:
            response.headers.popall(name, None)


log = logging.getLogger("kvbus.front.server")

MAX_ANSWER: Final = 4 * 1024 * 1024
"""Maximum size in bytes of an engine's answer that lists the endpoints of its events."""
NO_SUCH_PATH: Final = (404, 405)

PATHS: Final[dict[str, Callable[[Any, Offers], Any]]] = {
    "kv_event_sources": of_vllm,
    "server_info": of_sglang,
    "get_server_info": of_sglang,
}
"""Last parts of the paths at which an engine lists the endpoints of its events, each with a function.

The function puts kvbus's endpoints into the engine's answer. An engine may have these paths under a prefix, and may
accept other spellings of them. So kvbus compares only the last part, see :func:`_last_part`.
"""
READS: Final = ("GET", "HEAD")
"""Methods that kvbus forwards for these paths. The answer to HEAD has no body, and so no endpoint."""
CONDITIONS: Final = frozenset({"accept-encoding", "range", "if-range", "if-none-match", "if-modified-since"})
"""Names of headers with which an engine would send no complete JSON text. kvbus leaves them out for these paths."""


class FrontServer:
    """An HTTP server to which routers connect in place of the engine.

    Args:
        observed: the daemon, from which its configuration and its current sources are read.
        front: the configuration section ``front``.
    """

    def __init__(self, observed: BusState, front: Front) -> None:
        self._front = front
        self._observed = observed
        self.stats = FrontStats(front.max_connections)
        self._engine: Engine | None = None
        self.address: tuple[str, int] | None = None
        app = web.Application(middlewares=[self._each])
        app.on_response_prepare.append(as_it_came)
        self._connections: Final = Connections(
            app,
            self.stats,
            most=front.max_connections,
            timeout=IDLE,
            access_log=log,
            access_log_class=_bad_requests(self.stats),
            logger=logging.getLogger("kvbus.front"),
            handler_cancellation=True,
            shutdown_timeout=1.0,
            lingering_time=1.0,
            max_line_size=LINE,
            max_field_size=LINE,
        )

    async def start(self) -> None:
        """Start listening.

        Raises:
            BindError: the address cannot be bound.
        """
        self._engine = Engine(self._front.engine)
        self.address = await self._connections.listen("front", *parse_address(self._front.listen))

    async def close(self) -> None:
        """Stop listening, and end the open requests."""
        await self._connections.close()
        if self._engine is not None:
            await self._engine.close()
            self._engine = None

    @web.middleware
    async def _each(self, request: web.Request, handler: Handler) -> web.StreamResponse:  # noqa: ARG002
        engine = self._engine
        assert engine is not None  # noqa: S101 - it listens
        with self._connections.answering(request.transport):
            try:
                return await self._answer(request, engine)
            except asyncio.CancelledError:
                self.stats.requests["client_gone"] += 1
                raise

    async def _answer(self, request: web.Request, engine: Engine) -> web.StreamResponse:
        if refusal := _refusal(request):
            return self._problem(*refusal)
        read = PATHS.get(_last_part(request.raw_path))
        if read is not None and request.method not in READS:
            text = f"kvbus forwards no {request.method} for {request.path!r:.100}, only {' and '.join(READS)}"
            return self._problem("bad_request", 405, text, {"Allow": ", ".join(READS)})
        try:
            if read is not None and request.method == "GET":
                return await self._where(request, engine, read)
            upstream = await engine.ask(request)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            if isinstance(error.__cause__, BodyError):
                return self._problem("bad_request", 400, f"the request's body: {error.__cause__}")
            text = f"the engine behind kvbus does not answer: {engine.base}: {str(error) or type(error).__name__}"
            return self._problem("engine_down", 502, text)
        except DiscoveryError as error:
            log.warning("GET %s: %s", request.path, error)
            return self._problem("unanswered", 503, f"kvbus cannot say where the events are: {error}")
        return await self._hand_on(request, upstream)

    async def _hand_on(self, request: web.Request, upstream: ClientResponse) -> web.StreamResponse:
        """Forward the engine's answer to the client.

        Each part is sent as soon as it comes, but not faster than the client reads.
        """
        answer = Answer(upstream)
        try:
            await answer.prepare(request)
            while part := await upstream.content.readany():
                await answer.write(part)
            await answer.write_eof()
        except aiohttp.ClientConnectionResetError:
            self.stats.requests["client_gone"] += 1
        except aiohttp.ClientError as error:
            log.warning("%s %s: the engine's answer broke off: %s", request.method, request.path, error)
            self.stats.requests["engine_broke_off"] += 1
            if request.transport is not None:
                # Close the connection without an end of the answer. Otherwise the client would take the incomplete
                # answer as complete.
                request.transport.close()
        else:
            self.stats.requests["passed"] += 1
        finally:
            upstream.close() if not upstream.content.at_eof() else upstream.release()
        return answer

    async def _where(
        self, request: web.Request, engine: Engine, read: Callable[[Any, Offers], Any]
    ) -> web.StreamResponse:
        """Answer a request that asks for the endpoints of the engine's events with kvbus's endpoints.

        The other fields of the engine's answer stay unchanged. If the engine refuses the request, forward its refusal.
        """
        async with await engine.ask(request, without=CONDITIONS) as upstream:
            text = bytearray()
            while part := await upstream.content.readany():
                text += part
                if len(text) > MAX_ANSWER:
                    raise UnanswerableError(f"the engine's answer has more than {MAX_ANSWER} bytes")
            status, headers = upstream.status, end_to_end(upstream.raw_headers)
        if status in NO_SUCH_PATH and read is of_vllm:
            self.stats.requests["answered"] += 1
            return web.json_response(of_kvbus(self._offers(request)))
        if not 200 <= status < 300:
            self.stats.requests["passed"] += 1
            return web.Response(status=status, headers=headers, body=bytes(text))
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UnanswerableError(f"the engine's answer is not JSON: {error}") from error
        announced = read(answer, self._offers(request))
        if announced is not answer:
            text[:] = json.dumps(announced, ensure_ascii=False, separators=(",", ":")).encode()
            headers.popall("Content-Length", None)
        self.stats.requests["answered"] += 1
        return web.Response(status=status, headers=headers, body=bytes(text))

    def _offers(self, request: web.Request) -> Offers:
        host = self._front.host
        if host is None:
            here = "" if request.transport is None else str(request.transport.get_extra_info("sockname")[0])
            host = f"[{here}]" if ":" in here else here
        return offers(self._observed, self._front, host)

    def _problem(self, outcome: str, status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
        """Return an error answer that closes the connection, and count the request under ``outcome``.

        The connection cannot be used again, because the remaining part of the request was not read.
        """
        self.stats.requests[outcome] += 1
        response = web.json_response({"error": text}, status=status, headers=headers)
        response.force_close()
        return response


def _refusal(request: web.Request) -> tuple[str, int, str] | None:
    """Return why a request cannot be forwarded: the outcome that kvbus counts, the HTTP status, and a text.

    Return None if the request can be forwarded.
    """
    coding = ", ".join(request.headers.getall("Transfer-Encoding", ()))
    if coding.lower() not in ("", "chunked"):
        return "bad_request", 501, f"kvbus forwards no Transfer-Encoding except chunked: {coding!r:.100}"
    if request.method == "CONNECT" or "websocket" in request.headers.get("Upgrade", "").lower():
        return "upgrade", 501, "kvbus forwards only HTTP, and no other protocol: send this request to the engine"
    if not request.raw_path.startswith("/"):
        return "bad_request", 400, f"the path of a request has to begin with /: {request.raw_path!r:.100}"
    return None


def _last_part(raw_path: str) -> str:
    """Return the last part of a request's path in the plainest spelling, without its query.

    Percent-encoding, empty parts, ``.`` and ``..``, parameters after ``;`` and the case of letters are removed, because
    servers differ in which spellings of one path they accept.
    """
    parts: list[str] = []
    for part in unquote(raw_path.partition("?")[0].partition("#")[0]).replace("\\", "/").split("/"):
        name = part.partition(";")[0].strip()
        if name == "..":
            parts = parts[:-1]
        elif name not in ("", "."):
            parts.append(name)
    return parts[-1].lower() if parts else ""


def _bad_requests(stats: FrontStats) -> type[AbstractAccessLogger]:
    """Return an access logger that counts malformed requests, because aiohttp passes them to no handler."""

    class BadRequests(AbstractAccessLogger):
        def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:  # noqa: ARG002
            if request.method == "UNKNOWN" or isinstance(response, web.HTTPExpectationFailed):
                stats.requests["bad_request"] += 1

    return BadRequests
