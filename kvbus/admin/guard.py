"""Bounds on what HTTP clients may hold: how many connections there are, and how long one may dawdle.

aiohttp bounds headers and bodies. It waits without end for a request that is never finished, for an answer that is
never read, and for any number of either; and a server that is full answers no probe.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, cast

MAX_CONNECTIONS: Final = 64
"""Connections at once. One more costs the oldest that is not being answered: a probe always gets in."""

PATIENCE: Final = 10.0
"""Seconds a connection may take for its next whole request, and for reading what it asked for."""


class Gate:
    """All connections of a server.

    Args:
        serve: makes aiohttp's protocol of a connection.
        closed: counted by reason, ``too_many`` or ``slow``.
    """

    def __init__(self, serve: Callable[[], asyncio.BaseProtocol], closed: Counter[str]) -> None:
        self._serve = serve
        self._closed = closed
        self._open: dict[asyncio.BaseTransport, Connection] = {}

    def __call__(self) -> Connection:
        """A new connection's protocol."""
        return Connection(self, cast("asyncio.Protocol", self._serve()))

    def __len__(self) -> int:
        return len(self._open)

    def entered(self, connection: Connection, transport: asyncio.Transport) -> bool:
        """Make room for a connection; False if there is none to be made."""
        if len(self._open) >= MAX_CONNECTIONS:
            self._closed["too_many"] += 1
            oldest = next((other for other in self._open.values() if not other.busy), None)
            if oldest is None:
                return False
            oldest.abort()
        self._open[transport] = connection
        return True

    def left(self, transport: asyncio.BaseTransport) -> None:
        """Forget a connection."""
        self._open.pop(transport, None)

    def dawdled(self, connection: Connection) -> None:
        """Close one that took too long."""
        self._closed["slow"] += 1
        connection.abort()

    @contextlib.contextmanager
    def answering(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """While a request of this connection is being answered, its clock stands still."""
        connection = None if transport is None else self._open.get(transport)
        if connection is not None:
            connection.begin()
        try:
            yield
        finally:
            if connection is not None:
                connection.end()


class Connection(asyncio.Protocol):
    """aiohttp's protocol, with a clock beside it."""

    def __init__(self, gate: Gate, inner: asyncio.Protocol) -> None:
        self._gate = gate
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.busy = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection, unless there are too many."""
        self._transport = cast("asyncio.Transport", transport)
        self._inner.connection_made(transport)
        if self._gate.entered(self, self._transport):
            self._wait()
        else:
            self.abort()

    def begin(self) -> None:
        """A whole request is here: what it takes is our own affair."""
        self.busy += 1
        self._stop()

    def end(self) -> None:
        """The answer is on its way: it has to be read, and the next request to come, in time."""
        self.busy -= 1
        self._wait()

    def _wait(self) -> None:
        self._stop()
        self._timer = asyncio.get_running_loop().call_later(PATIENCE, self._gate.dawdled, self)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def abort(self) -> None:
        """End at once, whatever is on its way."""
        if self._transport is not None:
            self._gate.left(self._transport)
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Hand on."""
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Hand on."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Hand on."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Hand on."""
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Hand on, and forget."""
        self._stop()
        if self._transport is not None:
            self._gate.left(self._transport)
        self._inner.connection_lost(exc)
