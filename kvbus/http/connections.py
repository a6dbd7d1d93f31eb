"""The connections of an HTTP server: a limit of their number, and of the time that a client may take for a request.

aiohttp limits the head of a request. But it accepts any number of connections, waits a minute for a TLS handshake, and
does not close the connection of a client that does not read. A server without free descriptors cannot answer probes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from aiohttp import web

from kvbus.common.errors import BindError, os_reason

log = logging.getLogger("kvbus.http.connections")

MAX_CONNECTIONS: Final = 128
"""Maximum number of open connections. Above it the server closes an old one for a new one, so that probes get in."""

TIMEOUT: Final = 10.0
"""Seconds that a client may take for the TLS handshake and its next request, and to read an answer."""

MAX_UNANSWERED_BYTES: Final = 65_536
"""Bytes that a client of the admin port may send between two answers: heads, bodies, and pipelined requests."""

ACCEPT_AGAIN: Final = 0.1
"""Seconds until the server accepts again, after the system had no free descriptor."""


class ConnectionStats(Protocol):
    """Counters of connections: the number of open ones, and of those that the server closed, by reason."""

    http_connections: int
    http_closed: Counter[str]


class Connection(asyncio.Protocol):
    """One connection. It limits the client's time and bytes, and passes everything on to aiohttp's protocol.

    Attributes:
        address: the client's address.
        served: whether it has had an answer.
        answering: whether a handler is answering its request.
        waiting: whether that handler waits until other answers are made.
    """

    def __init__(self, connections: Connections, address: str) -> None:
        self.address = address
        self.served = self.answering = self.waiting = False
        self._connections = connections
        self._inner = connections.protocol()
        self._transport: asyncio.Transport | None = None
        self._unanswered = 0
        self._timer: asyncio.TimerHandle | None = None
        self.handshake: asyncio.Task[None] | None = None
        self.start_timer()

    def start_timer(self) -> None:
        """Start counting the time that the client takes for its next request."""
        loop = asyncio.get_running_loop()
        self._unanswered = 0
        self._timer = loop.call_later(self._connections.timeout, self.close, "slow")

    def stop_timer(self) -> None:
        """Stop counting the client's time."""
        if self._timer is not None:
            self._timer.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass the new connection to aiohttp. A TLS handshake is complete."""
        self._transport = transport  # type: ignore[assignment] # a stream transport
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Pass data on to aiohttp, unless the client has sent too much."""
        self._unanswered += len(data)
        if self._unanswered > self._connections.max_unanswered:
            self.close("too_large")
        else:
            self._inner.data_received(data)

    def eof_received(self) -> None:
        """Pass the end of the client's data on to aiohttp."""
        self._inner.eof_received()

    def pause_writing(self) -> None:
        """Make aiohttp wait until the client has read more."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Let aiohttp write again."""
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._connections.forget(self)
        self._inner.connection_lost(exc)

    def close(self, reason: str) -> None:
        """Close the connection at once, without waiting for the client to read, and count the reason."""
        self._connections.closed(reason)
        self._connections.forget(self)
        if self._transport is not None:
            self._transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()


class Connections:
    """A server of aiohttp with limits for its connections.

    Args:
        app: answers the requests.
        stats: counters of connections.
        context: returns the TLS context of a new connection; None for no TLS.
        most: maximum number of open connections.
        timeout: seconds for the TLS handshake and a complete request.
        max_unanswered: bytes that a client may send between two answers.
        options: options of :class:`aiohttp.web.AppRunner`.
    """

    def __init__(
        self,
        app: web.Application,
        stats: ConnectionStats,
        context: Callable[[], ssl.SSLContext | None] = lambda: None,
        *,
        most: int = MAX_CONNECTIONS,
        timeout: float,
        max_unanswered: float = float("inf"),
        **options: Any,
    ) -> None:
        self.timeout = timeout
        self.max_unanswered = max_unanswered
        self._stats = stats
        self._context = context
        self._most = most
        self._runner = web.AppRunner(app, **options)
        self._open: dict[Connection, None] = {}
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    def protocol(self) -> asyncio.Protocol:
        """Return aiohttp's protocol for a new connection."""
        assert self._runner.server is not None  # noqa: S101 - it listens
        return self._runner.server()

    async def listen(self, what: str, host: str, port: int) -> tuple[str, int]:
        """Listen on an address, and return it with its real port. ``what`` names the server in an error.

        Raises:
            BindError: the address cannot be bound.
        """
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, *_, address = found[0]
            self._listener = socket.create_server(address[:2], family=family, backlog=MAX_CONNECTIONS)
        except OSError as error:
            raise BindError(f"{what} {host}:{port}", os_reason(error)) from error
        self._listener.setblocking(False)
        self._accepting = loop.create_task(self._accept(self._listener), name="kvbus-http-accept")
        host, port = self._listener.getsockname()[:2]
        return host, port

    async def close(self) -> None:
        """Stop accepting connections, give unfinished answers the runner's time to end, and close every connection."""
        if self._accepting is not None and self._listener is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._listener.close()
        await self._runner.cleanup()
        for connection in list(self._open):
            connection.close("")

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("kvbus cannot accept an HTTP connection: %s", error.strerror or error)
                await asyncio.sleep(ACCEPT_AGAIN)
                continue
            if self._make_room():
                connection = Connection(self, str(address[0]))
                self._open[connection] = None
                self._stats.http_connections = len(self._open)
                connection.handshake = loop.create_task(self._connect(connection, accepted))
            else:
                accepted.close()
            await asyncio.sleep(0)  # let other tasks run between two connections

    async def _connect(self, connection: Connection, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: connection, accepted, ssl=self._context())
        except OSError as error:
            if connection in self._open and isinstance(error, ssl.SSLError):
                self.closed("tls")
            self.forget(connection)

    def _make_room(self) -> bool:
        """Close a connection if the maximum is reached. Return False if all of them are being answered.

        The closed connection belongs to the address that has the most connections, else to the next such address. The
        first choice is the oldest idle connection that has had an answer, then the newest one whose request waits, then
        the oldest idle one.
        """
        if len(self._open) < self._most:
            return True
        self.closed("too_many")
        for address, _ in Counter(each.address for each in self._open).most_common():
            here = [each for each in self._open if each.address == address]
            idle = [each for each in here if not each.answering]
            served = [each for each in idle if each.served]
            waiting = [each for each in reversed(here) if each.waiting]
            for each in [*served, *waiting, *idle][:1]:
                each.close("")
                return True
        return False

    def closed(self, reason: str) -> None:
        """Count a connection that the server closes, unless the reason is empty."""
        if reason:
            self._stats.http_closed[reason] += 1

    def forget(self, connection: Connection) -> None:
        """Remove a connection."""
        connection.stop_timer()
        self._open.pop(connection, None)
        self._stats.http_connections = len(self._open)

    @contextlib.contextmanager
    def answering(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Stop counting the client's time while the server answers its request."""
        connection = _of(transport)
        if connection is None:
            yield
            return
        connection.answering = True
        connection.stop_timer()
        try:
            yield
        finally:
            connection.answering = False
            connection.served = True
            if connection in self._open:
                connection.start_timer()

    @contextlib.contextmanager
    def waiting(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Mark a connection whose request waits, so that the server may close it for a new one."""
        connection = _of(transport)
        if connection is None:
            yield
            return
        connection.waiting = True
        try:
            yield
        finally:
            connection.waiting = False


def _of(transport: asyncio.BaseTransport | None) -> Connection | None:
    """Return the connection of a request's transport; None if the client is gone."""
    connection = None if transport is None else transport.get_protocol()
    return connection if isinstance(connection, Connection) else None
