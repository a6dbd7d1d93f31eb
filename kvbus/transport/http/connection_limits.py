"""Limits for HTTP clients: the number of connections, and the time each may take.

Servers limit headers and bodies. But they wait without end for unfinished requests and unread answers, and accept any
number of connections. A server without room left answers no probe.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from mmap import mmap
from typing import Final, Protocol, cast

from kvbus.transport.http.secured import Secured

MAX_CONNECTIONS: Final = 128
"""Connections at once. One more closes another one, so that a probe always gets in.

It is one of the address that has the most, or else of the next: the oldest that has had an answer and asks nothing now;
if there is none, the last whose request waits for its turn; or else the oldest that asks nothing. Where all are being
answered, the new one is refused.
"""

CONNECTION_TIMEOUT: Final = 10.0
"""Seconds a client may take for TLS and its next request, and to read an answer."""

ROOM: Final = 256 * 1024
"""Bytes that connections bring in a turn of the loop, 0.5 ms. Each turn that a body takes costs it some 0.1 ms."""

PART: Final = 16 * 1024
"""What each of them brings in any case."""

Context = Callable[[], ssl.SSLContext | None]


class ConnectionStats(Protocol):
    """Counters of connections: those that are open, and those closed here by reason."""

    http_connections: int
    http_closed: Counter[str]


class ConnectionLimits:
    """The connections of a server. It is the server's protocol factory.

    Args:
        serve: makes the server's protocol for a connection.
        stats: counters of connections, those open and those closed here.
        context: what a new connection's TLS is made with; None for none.
        timeout: seconds for a whole request, and to read an answer.
        most: how many there may be.
        keeps: whether the server keeps what it is handed, so that it has to be a copy.
    """

    def __init__(
        self,
        serve: Callable[[], asyncio.BaseProtocol],
        stats: ConnectionStats,
        context: Context = lambda: None,
        *,
        timeout: float,
        most: int = MAX_CONNECTIONS,
        keeps: bool = True,
    ) -> None:
        self._serve = serve
        self._stats = stats
        self._context = context
        self._most = most
        self.timeout = timeout
        self.keeps = keeps
        self._open: dict[Connection, None] = {}
        self._waiting: dict[Connection, None] = {}
        self._room = memoryview(mmap(-1, ROOM))  # of which small requests never touch most
        """What any connection has just received."""
        self._left = ROOM
        """Of this turn's."""

    def __call__(self) -> Connection:
        """Make a new connection's protocol."""
        return Connection(self, cast("asyncio.Protocol", self._serve()), self._context())

    def admit(self, connection: Connection) -> bool:
        """Make room for a connection; return False if all others are being answered."""
        if len(self._open) >= self._most:
            self._stats.http_closed["too_many"] += 1
            other = next(filter(None, map(self._dispensable, self._addresses())), None)
            if other is None:
                return False
            other.abort()
        self._open[connection] = None
        self._stats.http_connections = len(self._open)
        return True

    def _addresses(self) -> Iterator[str]:
        """The addresses of clients, those with the most connections first."""
        return (address for address, _ in Counter(each.address for each in self._open).most_common())

    def _dispensable(self, address: str) -> Connection | None:
        """The connection of an address that is closed first; None if all of them are being answered."""
        idle = [each for each in self._open if each.address == address and not each.busy]
        served = (each for each in idle if each.served)
        waiting = (each for each in reversed(self._waiting) if each.address == address)
        return next(chain(served, waiting, idle), None)

    def forget(self, connection: Connection) -> None:
        """Remove a connection."""
        self._open.pop(connection, None)
        self._waiting.pop(connection, None)
        self._stats.http_connections = len(self._open)

    def room(self) -> memoryview:
        """Where a connection's next bytes go: as many as there is room for in this turn of the loop."""
        return self._room[: max(self._left, PART)]

    def came(self, nbytes: int) -> tuple[memoryview, bool]:
        """What has come, until the next connection's has, and whether it took all the room."""
        if self._left == ROOM:
            asyncio.get_running_loop().call_soon(self._next_turn)
        full = nbytes == max(self._left, PART)
        self._left = max(0, self._left - nbytes)
        return self._room[:nbytes], full

    def _next_turn(self) -> None:
        self._left = ROOM

    def timed_out(self, connection: Connection) -> None:
        """Close and count a connection that took too long."""
        self._stats.http_closed["slow"] += 1
        connection.abort()

    def fail(self, connection: Connection) -> None:
        """Count a connection whose TLS is none, or shows a certificate that does not hold."""
        if connection in self._open:
            self._stats.http_closed["tls"] += 1

    def close_all(self, reason: str = "") -> None:
        """Close every connection, and count them if there is a reason."""
        for connection in list(self._open):
            if reason:
                self._stats.http_closed[reason] += 1
            connection.abort()

    def waiting(self, transport: asyncio.BaseTransport | None) -> contextlib.AbstractContextManager[None]:
        """A connection's request waits for its turn meanwhile, and may be given up for a new connection."""
        connection = _of(transport)
        return _NOTHING if connection is None else _Waiting(self._waiting, connection)

    def answering(self, transport: asyncio.BaseTransport | None) -> contextlib.AbstractContextManager[None]:
        """Stop the connection's timeout while the server answers its request."""
        return _of(transport) or _NOTHING


_NOTHING: Final = contextlib.nullcontext()


class _Waiting:
    def __init__(self, waiting: dict[Connection, None], connection: Connection) -> None:
        self._waiting = waiting
        self._connection = connection

    def __enter__(self) -> None:
        self._waiting[self._connection] = None

    def __exit__(self, *_: object) -> None:
        self._waiting.pop(self._connection, None)


def _of(transport: asyncio.BaseTransport | None) -> Connection | None:
    """The connection that a server knows by its transport; None if it is gone."""
    connection = None if transport is None else transport.get_protocol()
    return connection if isinstance(connection, Connection) else None


class Connection(asyncio.BufferedProtocol):
    """The server's protocol, with a timeout. With TLS the handshake is part of the first request."""

    def __init__(
        self, limits: ConnectionLimits, inner: asyncio.Protocol, context: ssl.SSLContext | None = None
    ) -> None:
        self._limits = limits
        self._inner = inner
        self._context = context
        self._transport: asyncio.Transport | None = None
        self._secured: Secured | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._handed_over = False
        self._closed = False
        self.address = ""
        self.busy = 0
        self.served = False
        """It has had an answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit a connection, or close it."""
        self._transport = cast("asyncio.Transport", transport)
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        if not self._limits.admit(self):
            self.abort()
            return
        self._wait()
        if self._context is None:
            self._hand_over(self._transport)
        else:
            self._secured = Secured(self._transport, self._context)

    def _hand_over(self, transport: asyncio.Transport) -> None:
        self._handed_over = True
        self._inner.connection_made(transport)

    def _decrypt(self, secured: Secured, data: memoryview) -> None:
        try:
            secured.take(data)
            if secured.ready and not self._handed_over:
                self._hand_over(secured)
            if secured.ready:
                for part in secured.parts():
                    self._inner.data_received(part)
        except ssl.SSLError:
            self._limits.fail(self)
            secured.close()
        if secured.ended:
            secured.close()

    def __enter__(self) -> None:
        """Stop the timeout: a whole request is here, and now the server takes its time."""
        self.busy += 1
        self._stop()

    def __exit__(self, *_: object) -> None:
        """Start the timeout: the client has to read the answer and send its next request in time."""
        self.busy -= 1
        self.served = True
        self._wait()

    def _wait(self) -> None:
        self._stop()
        if self._closed:
            return
        self._timer = asyncio.get_running_loop().call_later(self._limits.timeout, self._limits.timed_out, self)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._closed = True
        self._stop()
        self._limits.forget(self)

    def abort(self) -> None:
        """Close at once and drop queued data."""
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the base class's name
        """Where the transport puts what comes next, for :meth:`buffer_updated` in the same call of the loop."""
        return self._limits.room()

    def buffer_updated(self, nbytes: int) -> None:
        """Forward to the server. If there is more, other work comes first."""
        data, full = self._limits.came(nbytes)
        if self._secured is None:
            self._inner.data_received(bytes(data) if self._limits.keeps else cast("bytes", data))
        else:
            self._decrypt(self._secured, data)
        # the server may have paused it itself, until its handler has read something
        if full and self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool | None:
        """Forward to the server."""
        return self._inner.eof_received() if self._handed_over else None

    def pause_writing(self) -> None:
        """Forward to the server."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Forward to the server."""
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forward to the server, and remove the connection."""
        self._end()
        if self._handed_over:
            self._inner.connection_lost(exc)
