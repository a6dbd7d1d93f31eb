"""An HTTP server on a port of ours: uvicorn's protocol, and around it what it leaves open.

uvicorn parses requests, keeps connections and writes answers. But it limits no head, goes on with an answer that nobody
waits for, and may write that a request is none into the middle of an answer.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from http import HTTPStatus
from itertools import chain
from typing import Any, Final

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvbus.common.errors import BindError
from kvbus.common.tasks import report_out_of_memory
from kvbus.transport.http.connection_limits import ConnectionLimits, ConnectionStats
from kvbus.transport.http.messages import JSON, Receive, Request, Response, Scope, Send

log = logging.getLogger("kvbus.transport.http")

_silent = logging.getLogger("kvbus.transport.http.uvicorn")
"""uvicorn's: that a request was none, and what is logged here."""
_silent.setLevel(logging.CRITICAL)

MAX_HEAD: Final = 16_384
"""Bytes of a request before its body, and of fields behind one."""

REQUEST_LINE: Final = 32
"""Of these, what the first line has beside the target, and the end."""

MAX_AHEAD: Final = 8
"""Requests that a client may send before the first of them is being answered."""

_NEVER: Final = 10**9
"""Seconds after which an idle connection is closed. ConnectionLimits does it, and counts them."""

_ENDING: Final = 1.0
"""Seconds that answers under way have when the server ends."""

Handler = Callable[[Request], Awaitable[Response]]


class HttpServer:
    """Answers requests on a port.

    Args:
        handler: gives the answer to a request. It is cancelled if the client goes.
        stats: counters of connections.
        context: what a new connection's TLS is made with; None for none.
        timeout: seconds that a client may take for its next request, and to read an answer.
    """

    def __init__(
        self,
        handler: Handler,
        stats: ConnectionStats,
        context: Callable[[], ssl.SSLContext | None] = lambda: None,
        *,
        timeout: float,
    ) -> None:
        self._handler = handler
        self._state = ServerState()
        self._config = Config(
            self._application,
            interface="asgi3",
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # whoever asks may say what it likes of itself
            timeout_keep_alive=_NEVER,
        )
        self._config.load()
        self._listener: asyncio.Server | None = None
        self.connections = ConnectionLimits(
            lambda: _Connection(self._config, self._state), stats, context, timeout=timeout, keeps=False
        )

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; return where.

        Raises:
            BindError: the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        self.tell_time()
        try:
            self._listener = await loop.create_server(self.connections, host, port, reuse_address=True)
        except OSError as error:
            raise BindError(f"http {host}:{port}", error.strerror or str(error)) from error
        host, port = self._listener.sockets[0].getsockname()[:2]
        return host, port

    def tell_time(self) -> None:
        """Bring the ``Date`` of answers up to date."""
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]

    async def close(self) -> None:
        """Stop listening. What is being answered has a moment to end."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_ENDING)
        self.connections.close_all()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_ENDING)

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: _Connection = scope["state"]["connection"]
        cycle, target = connection.begin(asyncio.current_task())
        transport = connection.transport
        try:
            if connection.gone:
                return
            request = Request(scope, receive, send, transport, target, cycle)
            with self.connections.answering(transport):
                response = await self._handler(request)
            await response.send(request)
        except asyncio.CancelledError:
            if not connection.gone:
                raise
        except Exception as error:
            report_out_of_memory(error)
            if not transport.is_closing():  # else there was nothing to write to
                log.exception("%s %s failed", scope["method"], scope["path"])
            raise
        finally:
            if transport.is_closing():
                cycle.disconnected = True  # else uvicorn would write that it failed
            connection.end(cycle)


class _Connection(HttpToolsProtocol):
    """A connection: one request after the other, each in a task of its own.

    Attributes:
        gone: it is lost.
    """

    def __init__(self, config: Config, state: ServerState) -> None:
        super().__init__(config=config, server_state=state, app_state={"connection": self})
        self.logger = _silent
        self.gone = False
        self._asked: deque[tuple[RequestResponseCycle, bytes]] = deque()
        """Requests whose task has not begun, each with its target."""
        self._answering: RequestResponseCycle | None = None
        self._task: asyncio.Task[Any] | None = None
        self._in_fields = False
        self._unread = 0
        """Bytes of header fields that are not whole yet, without those of the part that they began in."""
        self._too_long = False

    def begin(self, task: asyncio.Task[Any] | None) -> tuple[RequestResponseCycle, bytes]:
        """Begin with the next request; return it, and its target."""
        self._answering, target = self._asked.popleft()
        self._task = task
        return self._answering, target

    def end(self, cycle: RequestResponseCycle) -> None:
        """A request has had its answer."""
        if self._answering is cycle:  # or the next one has begun
            self._answering = self._task = None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.gone = True
        self.pipeline.clear()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        began_before = self._in_fields
        super().data_received(data)
        if began_before and self._in_fields:
            self._unread += len(data)
            if self._unread > MAX_HEAD and not self.transport.is_closing():
                self._too_long = True
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_fields = True
        self._unread = 0

    def on_headers_complete(self) -> None:
        self._in_fields = False
        fields = sum(map(len, chain.from_iterable(self.headers))) + len(": \r\n") * len(self.headers)
        self._too_long = REQUEST_LINE + len(self.url) + fields > MAX_HEAD
        if self._too_long or len(self._asked) >= MAX_AHEAD:
            raise ValueError  # by which the parser ends
        super().on_headers_complete()
        self.cycle.body = b""  # type: ignore[assignment] # a bytearray would be two copies more
        self._asked.append((self.cycle, self.url))
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # the parser reads nothing behind it

    def on_chunk_header(self) -> None:
        """Behind the last chunk of a body there may be fields again; behind others there is a body."""
        self._in_fields = True
        self._unread = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._in_fields = False

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's text
        """Say that a request is none, or its body, unless that would be taken for the answer to another one."""
        pending = [self._answering, *(cycle for cycle, _ in self._asked)]
        if any(
            each and not each.response_complete and (each.response_started or not each.more_body) for each in pending
        ):
            self.transport.abort()
            return
        status, text = HTTPStatus.BAD_REQUEST, "this is no HTTP request"
        if self._too_long:
            status, text = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {MAX_HEAD} bytes before the body"
        body = msgspec.json.encode({"error": text})
        head = f"HTTP/1.1 {status} {status.phrase}\r\ncontent-type: {JSON}\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()
