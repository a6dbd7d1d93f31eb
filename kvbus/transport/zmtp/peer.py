"""A peer: one connection on the event loop, from its first byte to its end.

A peer reads a limited amount per iteration, feeds the protocol, and calls the handler of its role. The handler writes
to the peer, pauses it and closes it.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, cast

from kvbus.transport.zmtp import protocol, tcp
from kvbus.transport.zmtp.protocol import Cancelled, Event, Message, Opened, Subscribed
from kvbus.transport.zmtp.reasons import ProtocolError, Reason

if TYPE_CHECKING:
    from kvbus.transport.zmtp.endpoint import Endpoint

EVENTS: Final = 32
"""Maximum number of events decoded per connection in one iteration of the event loop."""

MAX_UNREAD_PONGS: Final = 16 * 1024
"""Maximum bytes of PONGs that wait for a peer. A correct peer waits for a PONG before it sends many more PINGs."""

WAITING: Final = frozenset({Reason.CURVE, Reason.KEY})
"""Reasons that are not answered by an ERROR. libzmq would dial again at once, ten times a second, so kvbus keeps the
refused connection open until the handshake timeout."""

_IDS: Final = itertools.count(1)


class PeerHandler(Protocol):
    """The callbacks of a role for the events of its peers. No method may block.

    If a method raises an exception, it is passed to the event loop's exception handler, and the peer is disconnected.
    """

    def opened(self, peer: Peer) -> None:
        """Handle a new peer, before its first message or subscription."""

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Handle a new subscription; :attr:`Peer.topics` has it already. A repeated subscription is not reported."""

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Handle the end of a subscription; :attr:`Peer.topics` has it no longer."""

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        """Handle a complete message (roles ROUTER and SUB)."""

    def drained(self, peer: Peer) -> None:
        """Handle that the peer is writable again."""

    def closed(self, peer: Peer, reason: str) -> None:
        """Handle the end of a peer. Called once per peer, in a later iteration of the loop than :meth:`Peer.close`.

        Args:
            peer: the peer.
            reason: the reason given to :meth:`Peer.close`, or a :class:`~kvbus.transport.zmtp.reasons.Reason`.
        """


class Peer(asyncio.BufferedProtocol):
    """One connection. The handler learns of it after the handshake.

    Args:
        endpoint: the endpoint that accepted or dialled the connection.
        connected: the connected socket.
        address: the peer's address, ``10.0.0.7:40132`` or ``unix``.
        zmtp: the protocol object that decodes the received bytes.

    Attributes:
        id: a number that is unique in the process and is never reused.
        is_open: whether the handshake has succeeded; it stays True after the end of the connection.
        since: the event loop's time at the end of the handshake.
        opened_at: the Unix time in seconds at the end of the handshake.
        socket_type: the peer's socket type, such as ``b"SUB"``.
        identity: the routing id that the peer has announced; often empty, and not unique.
        version: the ZMTP version of this connection, major and minor.
        key: the public key that the peer has proven to own; empty without CURVE.
        topics: the topics that the peer has subscribed to (role PUB).
        writable: False after :attr:`waiting_bytes` exceeds the high-water mark, until it falls to the low-water mark.
        written_bytes: number of bytes passed to :meth:`write` so far, after rewriting and sealing.
        unsent_bytes: number of bytes that the kernel had not accepted at :meth:`close`; None before, and if the
            connection broke.
        rewrite: replaces the data given to :meth:`write` by the data for this peer; None to send it unchanged.
        reason: why the connection ends or has ended; None while it is up.
        detail: a description of the rule that the peer broke; empty if it broke none.
        over: done when the connection has ended.
    """

    def __init__(self, endpoint: Endpoint, connected: socket.socket, address: str, zmtp: protocol.Protocol) -> None:
        self.id = next(_IDS)
        self.address = address
        self.is_open = False
        self.since = self.opened_at = 0.0
        self.socket_type = self.identity = self.key = b""
        self.version = (0, 0)
        self.topics = zmtp.topics
        self.writable = True
        self.written_bytes = 0
        self.unsent_bytes: int | None = None
        self.rewrite: Callable[[bytes], bytes] | None = None
        self.reason: str | None = None
        self.detail = ""
        self.over: asyncio.Future[None] = endpoint.loop.create_future()

        self._endpoint = endpoint
        self._socket = connected
        self._local = connected.family == socket.AF_UNIX
        self._zmtp = zmtp
        self._transport: asyncio.Transport | None = None
        self._acknowledged = 0

        # Reading: the scheduled decoding of the next iteration, and whether the handler has paused the peer.
        self._later: asyncio.Handle | None = None
        self._paused = False

        # PONG bytes since the kernel last accepted a PONG, and the stream position after the first of these PONGs.
        self._pong_bytes = 0
        self._pongs_until = 0

    # -- for handlers --------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the connection ends or has ended. Then :meth:`write` does nothing."""
        return self.reason is not None

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes from :meth:`write` that the kernel has not accepted yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def unread_bytes(self) -> int:
        """Number of bytes for the peer that wait here, or in the kernel without an acknowledgement."""
        return self.waiting_bytes + self._endpoint.settings.system.queued_bytes(self._socket)

    @property
    def acknowledged_bytes(self) -> int:
        """Number of bytes that the peer's kernel has acknowledged so far. The number never falls.

        A Unix socket has no acknowledgements. There it is the number of bytes that the kernel has accepted: the kernel
        accepts bytes only while the peer reads.
        """
        missing = self.waiting_bytes if self._local else self.unread_bytes
        self._acknowledged = max(self._acknowledged, self.written_bytes - missing)
        return self._acknowledged

    @property
    def has_unread(self) -> bool:
        """Whether received bytes wait to be decoded, here or in the kernel."""
        return not self.closed and (self._later is not None or tcp.has_unread(self._socket))

    def silent_for(self, seconds: float) -> bool:
        """Return whether the peer's kernel has acknowledged nothing for this time, despite retransmissions or probes.

        A peer that only does not read is not silent, because its kernel answers probes.
        """
        if self._local or self.closed or not self.unread_bytes:
            return False
        return tcp.gone(tcp.silence(self._socket), seconds)

    def write(self, data: bytes) -> None:
        """Send complete encoded messages. Join all messages of one iteration of the loop: the cost is per call."""
        if self._transport is None or self.closed:
            return
        if self.rewrite is not None:
            data = self.rewrite(data)
        if self._zmtp.sealing is not None:
            data = self._zmtp.sealing.seal(data)
        self.written_bytes += len(data)
        self._transport.write(data)

    def pause(self) -> None:
        """Stop reading from the peer. Received bytes are kept, and TCP slows the peer down."""
        self._paused = True
        self._stop_reading()

    def resume(self) -> None:
        """Start reading from the peer again."""
        if self._paused:
            self._paused = False
            self._decode_later()

    def close(self, reason: str, *, linger: float = 0.0) -> None:
        """Close the connection.

        Args:
            reason: the reason; :meth:`PeerHandler.closed` gets the reason of the first call.
            linger: maximum seconds to send the queued bytes; with 0 they are dropped.
        """
        if self.reason is None:
            self.reason = reason
            self.unsent_bytes = self.waiting_bytes
        elif self.reason not in WAITING:
            return
        if self._transport is None:
            return
        if linger and self._transport.get_write_buffer_size():
            self._transport.close()
            self._endpoint.loop.call_later(linger, self._transport.abort)
        else:
            self._transport.abort()

    # -- for the event loop --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send our greeting."""
        # no isinstance check, because uvloop's transports are not subclasses of asyncio's
        self._transport = stream = cast("asyncio.Transport", transport)
        if self.reason is not None:
            stream.abort()
            return
        settings = self._endpoint.settings
        stream.set_write_buffer_limits(settings.high_water, settings.low_water)
        stream.write(self._zmtp.data_to_send())

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio gives it
        """Return the endpoint's shared buffer: the protocol copies the bytes before the next read."""
        return self._endpoint.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Decode the received bytes."""
        self._zmtp.receive_data(self._endpoint.scratch[:nbytes])
        self._decode()

    def eof_received(self) -> None:
        """Close the connection, because the peer has closed it."""
        self.close(Reason.LEFT)

    def pause_writing(self) -> None:
        """Record that the queued bytes have exceeded the high-water mark."""
        self.writable = False

    def resume_writing(self) -> None:
        """Tell the handler that the queued bytes have fallen to the low-water mark."""
        self.writable = True
        if self.is_open and not self.closed:
            self._endpoint.handler.drained(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the endpoint that the connection has ended."""
        if self.reason is None:
            self.reason = Reason.BROKEN if exc is not None else Reason.LEFT
        if not self.over.done():  # it is done already if the task that awaited it was cancelled
            self.over.set_result(None)
        self._endpoint.lost(self, self.reason)

    # -- decoding ------------------------------------------------------------------------------------------------------

    def _stop_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _decode_later(self) -> None:
        """Pause reading, and continue to decode in the next iteration of the loop."""
        if self._later is None and self.reason is None:
            self._stop_reading()
            self._later = self._endpoint.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._later = None
        self._decode()
        waits = self._paused or self._later is not None or self.closed
        if not waits and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _decode(self) -> None:
        """Decode and handle up to :data:`EVENTS` events."""
        try:
            for _ in range(EVENTS):
                if self._paused or self.reason is not None:
                    return
                event = self._zmtp.next_event()
                if event is None:
                    return
                self._take(event)
            self._decode_later()
        except ProtocolError as problem:
            self._fail(problem)
        except Exception as error:  # noqa: BLE001 - it is reported, and the other connections go on
            context = {"message": "a handler of peers failed", "exception": error}
            self._endpoint.loop.call_exception_handler(context)
            self.close(Reason.INTERNAL)
        finally:
            self._answer()

    def _fail(self, problem: ProtocolError) -> None:
        self.detail = str(problem)
        self._answer()  # a handshake ends with an ERROR, which has until the handshake timeout to be sent
        if problem.reason in WAITING:
            self.reason = problem.reason
            self._stop_reading()
        else:
            self.close(problem.reason, linger=0.0 if self.is_open else self._endpoint.settings.handshake_timeout)

    def _take(self, event: Event) -> None:
        handler = self._endpoint.handler
        if isinstance(event, Message):
            handler.received(self, event.frames)
        elif isinstance(event, Subscribed):
            handler.subscribed(self, event.topic)
        elif isinstance(event, Cancelled):
            handler.cancelled(self, event.topic)
        elif isinstance(event, Opened):
            self._open(event)

    def _open(self, opened: Opened) -> None:
        if not self._endpoint.admit(opened.socket_type):
            self.close(Reason.TOO_MANY_PEERS)
            return
        self.socket_type, self.identity, self.version, self.key = opened
        self._answer()  # the handshake's last bytes are sent before the handler's first bytes, and are not sealed
        self.is_open = True
        self.since, self.opened_at = self._endpoint.loop.time(), time.time()
        self._endpoint.opened(self)

    def _answer(self) -> None:
        """Send the protocol's own bytes: handshake, ERROR and PONGs."""
        data = self._zmtp.data_to_send()
        if not data or self.reason is not None or self._transport is None:
            return
        if not self.is_open:
            self._transport.write(data)
            return
        if self.written_bytes - self.waiting_bytes >= self._pongs_until:
            self._pong_bytes = 0
            self._pongs_until = self.written_bytes + len(data)
        self.write(data)
        self._pong_bytes += len(data)
        if self._pong_bytes > MAX_UNREAD_PONGS:
            self.close(Reason.UNREAD_PONGS)
