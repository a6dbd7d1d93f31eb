"""A peer: one ZMTP connection on the event loop, from its first byte to its end.

In each iteration of the event loop a peer reads a limited number of bytes, decodes them, and calls a handler. The
handler can write to the peer, pause it and close it.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

from kvbus.transport.zmtp import protocol, tcp
from kvbus.transport.zmtp.protocol import Cancelled, Event, Message, Opened, Subscribed
from kvbus.transport.zmtp.reasons import ProtocolError, Reason
from kvbus.transport.zmtp.settings import Settings

EVENTS: Final = 32
"""Maximum number of ZMTP events, such as messages and subscriptions, that kvbus decodes from one connection in one
iteration of the event loop.
"""

MAX_UNREAD_PONGS: Final = 16 * 1024
"""Maximum bytes of PONGs that a peer has not read. Above it, kvbus disconnects the peer.

A correct peer waits for a PONG before it sends many further PINGs.
"""

SHARED: Final = 4096
"""Average size in bytes of the parts that kvbus gives to the kernel without joining them first."""

WAITING: Final = frozenset({Reason.CURVE, Reason.KEY})
"""Reasons after which kvbus keeps a refused connection open, without an answer, until the handshake timeout.

If kvbus closed the connection, libzmq would dial again ten times a second.
"""

_IDS: Final = itertools.count(1)


class PeerHandler(Protocol):
    """The callbacks for the events of the peers of an endpoint. No callback may block.

    If a callback raises an exception, the exception is passed to the event loop's exception handler, and the peer is
    disconnected.
    """

    def opened(self, peer: Peer) -> None:
        """Handle a new peer, before its first message or subscription."""

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Handle a new subscription, which is already in :attr:`Peer.topics`. Repetitions are not reported."""

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Handle the end of a subscription, which is no longer in :attr:`Peer.topics`."""

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        """Handle a complete message from the peer. Only endpoints with the role ROUTER or SUB receive messages."""

    def drained(self, peer: Peer) -> None:
        """Handle that the peer is writable again, so that the handler can continue to send."""

    def closed(self, peer: Peer, reason: str) -> None:
        """Handle the end of a peer. Called once for each peer, in a later iteration than :meth:`Peer.close`.

        Args:
            peer: the peer.
            reason: the reason given to :meth:`Peer.close`, or a :class:`~kvbus.transport.zmtp.reasons.Reason`.
        """


class PeerOwner(Protocol):
    """The endpoint of a peer, as the peer uses it.

    Attributes:
        scratch: memory for the bytes that are read next. All connections of the endpoint share it.
    """

    handler: PeerHandler
    settings: Settings
    loop: asyncio.AbstractEventLoop
    scratch: memoryview

    def admit(self, socket_type: bytes) -> bool:
        """Return whether a further peer with this socket type may be connected."""

    def opened(self, peer: Peer) -> None:
        """Handle the end of a successful handshake."""

    def lost(self, peer: Peer, reason: str) -> None:
        """Handle the end of a connection, which may still be in its handshake."""


class Peer(asyncio.BufferedProtocol):
    """One ZMTP connection on the event loop. The handler gets the peer after the handshake.

    Args:
        endpoint: the endpoint that accepted or dialled the connection.
        connected: the connected socket.
        address: the peer's address, such as ``10.0.0.7:40132``, or ``unix``.
        zmtp: the protocol object that decodes the received bytes.

    Attributes:
        id: a number that is unique in the process and is never reused.
        is_open: whether the handshake has succeeded. It stays True after the end of the connection.
        since: the event loop's time at the end of the handshake.
        opened_at: the Unix time in seconds at the end of the handshake.
        socket_type: the peer's socket type, such as ``b"SUB"``.
        identity: the routing id that the peer has announced. It is often empty, and not unique.
        version: the ZMTP version of this connection, major and minor.
        key: the public key that the peer has proven to own; empty without CURVE.
        topics: the topics that the peer has subscribed to, if kvbus's role is PUB.
        writable: False after :attr:`waiting_bytes` has exceeded the high-water mark, until it falls to the low-water
            mark.
        written_bytes: number of bytes passed to :meth:`write` so far, counted after rewriting and encryption.
        unsent_bytes: number of bytes that the kernel had not accepted when :meth:`close` was called; None before that,
            and if the connection broke.
        rewrite: returns the bytes to send to this peer in place of the bytes given to :meth:`write`; None to send them
            unchanged.
        reason: the reason for the end of the connection; None while the connection is up.
        unsent: the limit for the bytes that wait in kvbus for all peers that share it.
        detail: a description of the rule that the peer broke; empty if it broke no rule.
        over: a future that is done when the connection has ended.
    """

    def __init__(self, endpoint: PeerOwner, connected: socket.socket, address: str, zmtp: protocol.Protocol) -> None:
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
        self.ended: asyncio.Future[None] = endpoint.loop.create_future()
        self.unsent = endpoint.settings.unsent

        self._endpoint = endpoint
        self._socket = connected
        self._local = connected.family == socket.AF_UNIX
        self._zmtp = zmtp
        self._transport: asyncio.Transport | None = None
        self._acknowledged = 0

        # For reading: the decoding that is scheduled for the next iteration, and whether the handler has paused the
        # peer.
        self._later: asyncio.Handle | None = None
        self._paused = False

        # The first number counts the bytes of PONGs written since the kernel last accepted a PONG. The second number is
        # the value of written_bytes after the first of these PONGs. When the kernel has accepted that number of bytes,
        # the count begins again.
        self._pong_bytes = 0
        self._pongs_until = 0

    # -- called by handlers --------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the connection is being closed or has ended. :meth:`write` then does nothing."""
        return self.reason is not None

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes given to :meth:`write` that the kernel has not accepted yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def held_back(self) -> bool:
        """Whether the handler should not write to the peer now, because too many bytes wait for all peers together."""
        return self.unsent.over and self.waiting_bytes > 0

    @property
    def unread_bytes(self) -> int:
        """Number of bytes for the peer that its kernel has not acknowledged, including bytes that wait in kvbus."""
        return self.waiting_bytes + self._endpoint.settings.system.queued_bytes(self._socket)

    @property
    def acknowledged_bytes(self) -> int:
        """Number of bytes that the peer's kernel has acknowledged so far. The number never falls.

        A Unix socket has no acknowledgements. For it, this is the number of bytes that kvbus's kernel has accepted. The
        kernel accepts bytes only while the peer reads.
        """
        missing = self.waiting_bytes if self._local else self.unread_bytes
        self._acknowledged = max(self._acknowledged, self.written_bytes - missing)
        return self._acknowledged

    @property
    def has_unread(self) -> bool:
        """Whether received bytes wait to be decoded, in kvbus or in the kernel."""
        return not self.closed and (self._later is not None or tcp.has_unread(self._socket))

    def silent_for(self, seconds: float) -> bool:
        """Return whether the peer's kernel has acknowledged nothing for ``seconds``, despite retransmissions or probes.

        If only the application does not read, the peer is not silent, because its kernel still answers probes.
        """
        if self._local or self.closed or not self.unread_bytes:
            return False
        return tcp.gone(tcp.silence(self._socket), seconds)

    def write(self, data: bytes) -> None:
        """Queue complete encoded messages for the peer.

        Join all messages of one iteration of the event loop, and pass them in one call, because the cost depends on the
        number of calls.
        """
        if self._transport is None or self.reason is not None or not data:
            return
        if self.rewrite is not None:
            data = self.rewrite(data)
        if self._zmtp.sealing is not None:
            data = self._zmtp.sealing.seal(data)
        self.written_bytes += len(data)
        self._transport.write(data)
        self.unsent.added += len(data)
        if self.unsent.added > self.unsent.limit:
            self.unsent.look()

    def write_parts(self, parts: Sequence[bytes]) -> None:
        """Queue complete encoded messages for the peer, each in one or several parts.

        Large parts wait without a copy for the kernel to accept them, unless kvbus rewrites or encrypts the messages
        for this peer. So a large part that is queued for many peers is in memory once.
        """
        size = sum(map(len, parts))
        if size < SHARED * len(parts) or self.rewrite is not None or self._zmtp.sealing is not None:
            self.write(b"".join(parts))
            return
        if self._transport is None or self.closed or not parts:
            return
        self.written_bytes += size
        self._transport.writelines(parts)
        self.unsent.added += size
        if self.unsent.added > self.unsent.limit:
            self.unsent.look()

    def pause(self) -> None:
        """Stop reading from the peer. TCP then makes the peer wait, and no received byte is lost."""
        self._paused = True
        self._stop_reading()

    def resume(self) -> None:
        """Start reading from the peer again after :meth:`pause`."""
        if self._paused:
            self._paused = False
            self._decode_later()

    def close(self, reason: str, *, linger: float = 0.0) -> None:
        """Close the connection.

        Args:
            reason: the reason for closing. :meth:`PeerHandler.closed` gets the reason of the first call.
            linger: maximum seconds for sending the queued bytes; with 0 they are dropped.
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

    # -- called by the event loop --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send kvbus's greeting on the new connection."""
        # no isinstance check, because uvloop's transports are not subclasses of asyncio's classes
        self._transport = stream = cast("asyncio.Transport", transport)
        if self.reason is not None:
            stream.abort()
            return
        settings = self._endpoint.settings
        stream.set_write_buffer_limits(settings.high_water, settings.low_water)
        stream.write(self._zmtp.data_to_send())

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio gives it
        """Return the buffer for the next read, which all connections share."""
        return self._endpoint.scratch

    def eof_received(self) -> None:
        """Close the connection, because the peer has closed its side."""
        self.close(Reason.LEFT)

    def pause_writing(self) -> None:
        """Record that the peer is not writable, because the queued bytes have exceeded the high-water mark."""
        self.writable = False

    def resume_writing(self) -> None:
        """Tell the handler that the peer is writable again: the queued bytes have fallen to the low-water mark."""
        self.writable = True
        if self.is_open and not self.closed:
            self._endpoint.handler.drained(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the endpoint that the connection has ended."""
        if self.reason is None:
            self.reason = Reason.BROKEN if exc is not None else Reason.LEFT
        if not self.ended.done():  # a cancelled task may have cancelled this future
            self.ended.set_result(None)
        self._endpoint.lost(self, self.reason)

    # -- decoding ------------------------------------------------------------------------------------------------------

    def _stop_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _decode_later(self) -> None:
        """Pause reading, and continue to decode in the next iteration of the event loop."""
        if self._later is None and self.reason is None:
            self._stop_reading()
            self._later = self._endpoint.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._later = None
        self.buffer_updated(0)
        waits = self._paused or self._later is not None or self.closed
        if not waits and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def buffer_updated(self, nbytes: int) -> None:
        """Decode up to :data:`EVENTS` ZMTP events (messages, …) of the received bytes, and call the handler for each.

        The path of each batch is in this one method, because each further call takes time.

        Args:
            nbytes: number of bytes that the event loop has read into the buffer.
        """
        zmtp = self._zmtp
        try:
            if nbytes:
                zmtp.receive_data(self._endpoint.scratch[:nbytes])
            for _ in range(EVENTS):
                if self._paused or self.reason is not None or not zmtp.buffer:
                    return
                event = zmtp.next_event()
                if event is None:
                    return
                if type(event) is Message:
                    self._endpoint.handler.received(self, event.frames)
                else:
                    self._take(event)
            self._decode_later()
        except ProtocolError as problem:
            self._fail(problem)
        except Exception as error:  # noqa: BLE001 - it is reported, and the other connections go on
            context = {"message": "a handler of peers failed", "exception": error}
            self._endpoint.loop.call_exception_handler(context)
            self.close(Reason.INTERNAL)
        finally:
            if zmtp.out:
                self._answer()

    def _fail(self, problem: ProtocolError) -> None:
        self.detail = str(problem)
        self._answer()  # send the ERROR of a failed handshake; below, close() gives the kernel time to send it
        if problem.reason in WAITING:
            self.reason = problem.reason
            self._stop_reading()
        else:
            self.close(problem.reason, linger=0.0 if self.is_open else self._endpoint.settings.handshake_timeout)

    def _take(self, event: Event) -> None:
        handler = self._endpoint.handler
        if isinstance(event, Subscribed):
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
        self._answer()  # send the last bytes of the handshake, unencrypted, before the handler can write
        self.is_open = True
        self.since, self.opened_at = self._endpoint.loop.time(), time.time()
        self._endpoint.opened(self)

    def _answer(self) -> None:
        """Send the bytes of the protocol itself: the handshake, an ERROR, and PONGs."""
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
