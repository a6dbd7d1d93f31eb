"""The connections of an HTTP server, with limits for their number and for the time that a request may take.

aiohttp limits only the size of a request's head. It accepts any number of connections, waits a minute for a TLS
handshake, and does not close the connection of a client that does not read. Without limits a client could use up all
file descriptors, and the server could not answer probes.
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
from aiohttp.http_exceptions import HttpProcessingError

from kvbus.common.errors import BindError, os_reason

log = logging.getLogger("kvbus.http.connections")

MAX_CONNECTIONS: Final = 128
"""Maximum number of open connections.

At the maximum, the server closes a connection for each new one, so that Kubernetes's probes can connect. It refuses a
new connection only while requests of all open connections are being answered.
"""

TIMEOUT: Final = 10.0
"""Maximum seconds that a client may take for the TLS handshake and its next request, or to read a part of an answer."""

MAX_UNANSWERED_BYTES: Final = 65_536
"""Maximum number of bytes that a client may send between two answers.

Heads and bodies of requests count, and so do further requests that are sent before the answer (pipelining).
"""

ACCEPT_AGAIN: Final = 0.1
"""Seconds until the server accepts connections again after accepting one has failed.

It fails if the system has no free file descriptor.
"""


class ConnectionStats(Protocol):
    """The counters that a server updates: number of open connections, and number of connections closed, by reason."""

    http_connections: int
    http_closed: Counter[str]


class Connection(asyncio.Protocol):
    """One connection. It limits the client's time and bytes, and passes all data on to aiohttp's protocol.

    Attributes:
        address: the client's address.
        served: whether the client has received an answer on this connection.
        answering: whether a handler is answering a request of this connection.
        waiting: whether the handler of this connection's request waits until answers to other clients are complete.
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
        """Start the timer that closes the connection if the client takes too long for its next request."""
        loop = asyncio.get_running_loop()
        self._unanswered = 0
        self._timer = loop.call_later(self._connections.timeout, self.close, "slow")

    def stop_timer(self) -> None:
        """Stop the timer of :meth:`start_timer`."""
        if self._timer is not None:
            self._timer.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pass the new connection on to aiohttp. If TLS is used, its handshake is complete."""
        self._transport = transport  # type: ignore[assignment] # a stream transport
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Pass data on to aiohttp, or close the connection if the client has sent too many bytes since the last answer.

        The maximum is :attr:`Connections.max_unanswered` bytes.
        """
        self._unanswered += len(data)
        if self._unanswered > self._connections.max_unanswered:
            self.close("too_large")
        else:
            self._inner.data_received(data)

    def eof_received(self) -> None:
        """Pass on to aiohttp that the client sends no more data."""
        self._inner.eof_received()

    def pause_writing(self) -> None:
        """Make aiohttp wait until the client has read more of the answer."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Let aiohttp continue to write the answer."""
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the open connections, and inform aiohttp."""
        self._connections.forget(self)
        self._inner.connection_lost(exc)

    def close(self, reason: str) -> None:
        """Close the connection immediately, without sending the rest of an answer, and count the reason."""
        self._connections.closed(reason)
        self._connections.forget(self)
        if self._transport is not None:
            self._transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()


class Connections:
    """An aiohttp server with limits for its connections.

    Args:
        app: the aiohttp application that answers the requests.
        stats: the counters that the server updates.
        context: function that returns the TLS context for a new connection, or None if the server does not use TLS.
        most: maximum number of open connections.
        timeout: maximum seconds for the TLS handshake and a complete request.
        max_unanswered: maximum number of bytes that a client may send between two answers.
        logger: the logger for errors of handlers. Malformed requests are not logged: their clients get the reason.
        options: further options of :class:`aiohttp.web.AppRunner`.
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
        logger: logging.Logger = log,
        **options: Any,
    ) -> None:
        self.timeout = timeout
        self.max_unanswered = max_unanswered
        self._stats = stats
        self._context = context
        self._most = most
        # aiohttp must not decompress bodies: kvbus reads no compressed body, and aiohttp would log each invalid one.
        self._runner = web.AppRunner(app, logger=_quiet(logger), auto_decompress=False, **options)
        self._open: dict[Connection, None] = {}
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    def protocol(self) -> asyncio.Protocol:
        """Return the aiohttp protocol that handles a new connection."""
        assert self._runner.server is not None  # noqa: S101 - it listens
        return self._runner.server()

    async def listen(self, what: str, host: str, port: int) -> tuple[str, int]:
        """Listen on an address.

        Args:
            what: the server's name in an error, such as ``http``.
            host: the host name or address.
            port: the port; 0 lets the system choose one.

        Returns:
            The host and the port on which the server listens.

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
        """Stop accepting connections, wait for unfinished answers, and close every connection.

        The server waits for answers up to ``shutdown_timeout`` seconds, which is an option of
        :class:`aiohttp.web.AppRunner`.
        """
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
        """Close one connection if the maximum number is open, so that a new connection can be accepted.

        The server closes a connection of the client address that has the most connections. Of these connections, it
        closes the oldest idle one that has received an answer. If there is none, it closes the newest one whose request
        waits until other answers are complete. If there is none either, it closes the oldest idle one. If requests of
        all connections of this address are being answered, the address with the next most connections follows.

        Returns:
            False if the maximum number is open and requests of all connections are being answered.
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
        """Count a connection that the server closes, by the reason. If the reason is empty, count nothing."""
        if reason:
            self._stats.http_closed[reason] += 1

    def forget(self, connection: Connection) -> None:
        """Remove a connection from the open connections, and stop its timer."""
        connection.stop_timer()
        self._open.pop(connection, None)
        self._stats.http_connections = len(self._open)

    @contextlib.contextmanager
    def answering(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Stop a connection's timer during a ``with`` block, in which the server answers a request of this connection.

        The timer closes the connections of slow clients.
        """
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
        """Mark a connection as waiting while its request must wait for answers to other clients.

        If the maximum number of connections is open, the server may close a waiting connection to accept a new one.
        """
        connection = _of(transport)
        if connection is None:
            yield
            return
        connection.waiting = True
        try:
            yield
        finally:
            connection.waiting = False


def _quiet(logger: logging.Logger) -> logging.Logger:
    """Return a logger for aiohttp that leaves out the traceback which aiohttp logs for each malformed request."""
    of_library = logger.getChild("aiohttp")
    of_library.filters = [lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))]
    return of_library


def _of(transport: asyncio.BaseTransport | None) -> Connection | None:
    """Return the connection to which a request's transport belongs; None if the client has disconnected."""
    connection = None if transport is None else transport.get_protocol()
    return connection if isinstance(connection, Connection) else None
