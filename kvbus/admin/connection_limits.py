"""Limits for HTTP clients: the number of connections, and the time each may take.

aiohttp limits headers and bodies. But it waits without end for unfinished requests and unread answers, and accepts any
number of connections. A server without room left answers no probe.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final, cast

from kvbus.core.stats import ProcessStats

MAX_CONNECTIONS: Final = 64
"""Connections at once. One more closes the oldest without a request under way, so that a probe always gets in."""

CONNECTION_TIMEOUT: Final = 10.0
"""Seconds a client may take to send its next request, and to read an answer."""


class ConnectionLimits:
    """The connections of a server. It is the server's protocol factory.

    Args:
        serve: makes aiohttp's protocol for a connection.
        stats: counters of connections, those open and those closed here.
    """

    def __init__(self, serve: Callable[[], asyncio.BaseProtocol], stats: ProcessStats) -> None:
        self._serve = serve
        self._stats = stats
        self._open: dict[asyncio.BaseTransport, Connection] = {}

    def __call__(self) -> Connection:
        """Make a new connection's protocol."""
        return Connection(self, cast("asyncio.Protocol", self._serve()))

    def admit(self, connection: Connection, transport: asyncio.Transport) -> bool:
        """Make room for a connection; return False if all others have requests under way."""
        if len(self._open) >= MAX_CONNECTIONS:
            self._stats.http_closed["too_many"] += 1
            oldest = next((other for other in self._open.values() if not other.busy), None)
            if oldest is None:
                return False
            oldest.abort()
        self._open[transport] = connection
        self._stats.http_connections = len(self._open)
        return True

    def forget(self, transport: asyncio.BaseTransport) -> None:
        """Remove a connection."""
        self._open.pop(transport, None)
        self._stats.http_connections = len(self._open)

    def timed_out(self, connection: Connection) -> None:
        """Close and count a connection that took too long."""
        self._stats.http_closed["slow"] += 1
        connection.abort()

    @contextlib.contextmanager
    def answering(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Stop the connection's timeout while the server answers its request."""
        connection = None if transport is None else self._open.get(transport)
        if connection is not None:
            connection.begin()
        try:
            yield
        finally:
            if connection is not None:
                connection.end()


class Connection(asyncio.Protocol):
    """aiohttp's protocol, with a timeout."""

    def __init__(self, limits: ConnectionLimits, inner: asyncio.Protocol) -> None:
        self._limits = limits
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.busy = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit a connection, or close it."""
        self._transport = cast("asyncio.Transport", transport)
        self._inner.connection_made(transport)
        if self._limits.admit(self, self._transport):
            self._wait()
        else:
            self.abort()

    def begin(self) -> None:
        """Stop the timeout: a whole request is here, and now the server takes its time."""
        self.busy += 1
        self._stop()

    def end(self) -> None:
        """Start the timeout: the client has to read the answer and send its next request in time."""
        self.busy -= 1
        self._wait()

    def _wait(self) -> None:
        self._stop()
        self._timer = asyncio.get_running_loop().call_later(CONNECTION_TIMEOUT, self._limits.timed_out, self)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def abort(self) -> None:
        """Close at once and drop queued data."""
        if self._transport is not None:
            self._limits.forget(self._transport)
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Forward to aiohttp."""
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Forward to aiohttp."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Forward to aiohttp."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Forward to aiohttp."""
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forward to aiohttp, and remove the connection."""
        self._stop()
        if self._transport is not None:
            self._limits.forget(self._transport)
        self._inner.connection_lost(exc)
