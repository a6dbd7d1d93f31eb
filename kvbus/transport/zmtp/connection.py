"""One connection on the event loop: it reads within a budget, drives the protocol, and calls the role's handler."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final, cast

from kvbus.transport.zmtp.events import Cancelled, Event, Message, Opened, Subscribed
from kvbus.transport.zmtp.peer import Peer
from kvbus.transport.zmtp.protocol import Protocol
from kvbus.transport.zmtp.reasons import ProtocolError, Reason

if TYPE_CHECKING:
    from kvbus.transport.zmtp.connections import Connections

EVENTS: Final = 32
"""Events taken of one connection before the next one gets its turn."""

READ_BYTES: Final = 64 * 1024
"""Bytes read of one connection before the next one gets its turn."""

MAX_UNREAD_PONGS: Final = 16 * 1024
"""Bytes of PONGs that may wait for a peer. An honest one waits for its PONG before it sends many more PINGs."""


WAITING: Final = frozenset({Reason.CURVE, Reason.KEY})
"""Why a peer is refused that dials again at once, ten times a second, because it was sent no ERROR. It is left waiting
instead until its handshake times out."""


class Connection(asyncio.BufferedProtocol):
    """A connection from its first byte to its end.

    Args:
        connections: those of its endpoint.
        connected: the connected socket.
        address: the peer's.
        accepting: False if we have dialled.
    """

    def __init__(self, connections: Connections, connected: socket.socket, address: str, *, accepting: bool) -> None:
        self.address = address
        self.peer: Peer | None = None
        self.reason: str | None = None
        """Why it ends or has ended; None while it stands."""
        self.detail = ""
        """What the peer did, in words, where it broke a rule."""
        self.over: asyncio.Future[bool] = connections.loop.create_future()
        """Done when the connection is gone, with True if its handshake had succeeded."""

        self._connections = connections
        self._socket = connected
        role, mechanism = connections.role, connections.mechanism
        self._zmtp = Protocol(
            role,
            accepting=accepting,
            limits=connections.settings.limits,
            publisher_limits=connections.settings.publisher_limits,
            mechanism=None if mechanism is None else mechanism(role),
        )
        self._transport: asyncio.Transport | None = None

        # Reading: bytes in this turn; whether the connection waits for another turn; whether the role wants no more.
        self._read = 0
        self._queued = False
        self._held = False

        self._waits = False
        """It is refused, and does not know it yet."""

        # PONGs since the peer has last taken some, and where the stream was then.
        self._pong_bytes = 0
        self._pongs_until = 0

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with our greeting."""
        # not checked, because uvloop's transports are no subclass of asyncio's
        self._transport = stream = cast("asyncio.Transport", transport)
        if self.reason is not None:
            stream.abort()
            return
        settings = self._connections.settings
        stream.set_write_buffer_limits(settings.high_water, settings.low_water)
        stream.write(self._zmtp.data_to_send())

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio gives it
        """Read into the endpoint's buffer: it is decoded, or kept, before the next read."""
        return self._connections.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Take in what was read."""
        self._zmtp.receive_data(self._connections.scratch[:nbytes])
        self._read += nbytes
        more = self._advance()
        if more or self._read >= READ_BYTES:
            self._queue()

    def eof_received(self) -> None:
        """The peer has closed. There is nobody to send the rest to."""
        self.end(Reason.LEFT)

    def pause_writing(self) -> None:
        """Too much waits for the peer."""
        if self.peer is not None:
            self.peer.writable = False

    def resume_writing(self) -> None:
        """The peer has taken most of it."""
        if self.peer is not None and not self.peer.closed:
            self.peer.writable = True
            self._connections.handler.drained(self.peer)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        if self.reason is None:
            self.reason = Reason.BROKEN if exc is not None else Reason.LEFT
        if self.peer is not None:
            self.peer.closed = True
        if not self.over.done():  # whoever waited for it may have been cancelled
            self.over.set_result(self.peer is not None)
        self._connections.lost(self)

    # What the role and the endpoint call.

    def end(self, reason: str, *, linger: float = 0.0) -> None:
        """End the connection.

        Args:
            reason: why, for the handler. The first one counts.
            linger: seconds for what waits to be sent.
        """
        if self.reason is not None:
            if self._waits and self._transport is not None:
                self._transport.abort()
            return
        self.reason = reason
        if self.peer is not None:
            self.peer.closed = True
        if self._transport is None:
            return
        if self.peer is not None:
            self.peer.unsent_bytes = self.peer.waiting_bytes
        if linger and self._transport.get_write_buffer_size():
            self._transport.close()
            self._connections.loop.call_later(linger, self._transport.abort)
        else:
            self._transport.abort()

    def _let_wait(self, reason: str) -> None:
        """Refuse the peer, and leave it in its handshake until the time for that is over."""
        self.reason = reason
        self._waits = True
        self._pause()

    def hold(self) -> None:
        """Stop reading and decoding."""
        if not self._held:
            self._held = True
            self._pause()

    def release(self) -> None:
        """Read and decode again."""
        if self._held:
            self._held = False
            self._queue()

    # Reading, within its budget.

    def _pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _queue(self) -> None:
        if not self._queued and self.reason is None:
            self._queued = True
            self._pause()
            self._connections.turns.add(self)

    def go_on(self) -> bool:
        """Decode the next few events; return True if there may be more."""
        self._read = 0
        if self._advance():
            return True
        self._queued = False
        if not self._held and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        return False

    def _advance(self) -> bool:
        """Decode up to :data:`EVENTS` events; return True if there may be more."""
        try:
            for _ in range(EVENTS):
                if self._held or self.reason is not None:
                    return False
                event = self._zmtp.next_event()
                if event is None:
                    return False
                self._take(event)
        except ProtocolError as problem:
            self.detail = str(problem)
            # only a handshake has an answer left, the ERROR: it gets the rest of the time for handshakes to leave
            self._answer()
            if problem.reason in WAITING:
                self._let_wait(problem.reason)
                return False
            self.end(problem.reason, linger=0.0 if self.peer else self._connections.settings.handshake_timeout)
            return False
        except Exception as error:  # noqa: BLE001 - it is reported, and the other connections go on
            self._connections.report(error)
            self.end(Reason.INTERNAL)
            return False
        finally:
            self._answer()
        return True

    def _take(self, event: Event) -> None:
        handler = self._connections.handler
        if isinstance(event, Opened):
            self._open(event)
        elif self.peer is None:
            return
        elif isinstance(event, Message):
            handler.received(self.peer, event.frames)
        elif isinstance(event, Subscribed):
            handler.subscribed(self.peer, event.topic)
        elif isinstance(event, Cancelled):
            handler.cancelled(self.peer, event.topic)

    def _open(self, opened: Opened) -> None:
        if self._transport is None or not self._connections.admit(self, opened.socket_type):
            return
        self._answer()  # the handshake's last bytes go before whatever the role writes
        zmtp = self._zmtp
        queued_bytes = self._connections.settings.system.queued_bytes
        self.peer = Peer(
            self, self._transport, self._socket, self.address, opened, zmtp.topics, zmtp.sealing, queued_bytes
        )
        self._connections.opened(self, self.peer)

    def _answer(self) -> None:
        """Send what the protocol has to send."""
        data = self._zmtp.data_to_send()
        if not data or self.reason is not None or self._transport is None:
            return
        peer = self.peer
        if peer is None:
            self._transport.write(data)
            return
        if peer.written_bytes - peer.waiting_bytes >= self._pongs_until:
            self._pong_bytes = 0
            self._pongs_until = peer.written_bytes + len(data)
        peer.write(data)
        self._pong_bytes += len(data)
        if self._pong_bytes > MAX_UNREAD_PONGS:
            self.end(Reason.UNREAD_PONGS)
