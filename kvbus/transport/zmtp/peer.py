"""A peer: one connection on the event loop, from its first byte to its end.

It reads within a budget, drives the protocol, and calls the handler of its role. The handler writes to the peer, pauses
it and closes it.
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
"""Events that are decoded of one connection in one iteration of the event loop."""

MAX_UNREAD_PONGS: Final = 16 * 1024
"""Bytes of PONGs that may wait for a peer. An honest one waits for its PONG before it sends many more PINGs."""

WAITING: Final = frozenset({Reason.CURVE, Reason.KEY})
"""Refusals without an ERROR, after which libzmq dials again at once, ten times a second. Such a peer keeps its
connection until the time for handshakes is over."""

_IDS: Final = itertools.count(1)


class PeerHandler(Protocol):
    """A role: what it does when something happens to a peer. No method may block.

    An exception that a method raises goes to the event loop's handler, and ends that peer's connection.
    """

    def opened(self, peer: Peer) -> None:
        """Take in a new peer. Nothing was received from it yet."""

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Take in a new subscription; :attr:`Peer.topics` has it already. A repeated one is not reported."""

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Take in the end of a subscription; :attr:`Peer.topics` does not have it any more."""

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        """Take in a whole message (ROUTER and SUB)."""

    def drained(self, peer: Peer) -> None:
        """Take in that the peer is writable again."""

    def closed(self, peer: Peer, reason: str) -> None:
        """Forget the peer. Called once for each, in a later iteration of the loop than :meth:`Peer.close`.

        Args:
            peer: the peer.
            reason: what :meth:`Peer.close` was given, or a :class:`~kvbus.transport.zmtp.reasons.Reason`.
        """


class Peer(asyncio.BufferedProtocol):
    """One connection. The handler knows it from the end of its handshake on.

    Args:
        endpoint: the endpoint that accepted or dialled it.
        connected: the connected socket.
        address: the peer's address, ``10.0.0.7:40132`` or ``unix``.
        zmtp: decodes what the peer sends.

    Attributes:
        id: unique in the process, never used again.
        is_open: whether the handshake has succeeded; it stays True at the end.
        since: the loop's time at the end of the handshake.
        opened_at: the same as time of day, in seconds; steps of the clock do not move it.
        socket_type: of the peer, such as ``b"SUB"``.
        identity: that the peer gave itself; often empty, and not unique.
        version: of ZMTP, spoken on this connection.
        key: the public key that the peer has proven to own; empty without CURVE.
        topics: what the peer has subscribed to (PUB).
        writable: False from the high-water mark of :attr:`waiting_bytes` down to the low one.
        written_bytes: given to :meth:`write` so far, sealed.
        unsent_bytes: what the kernel had not taken when the connection ended; None while it stands, and where it broke.
        rewrite: makes what this peer gets of what :meth:`write` is given; None: nothing has to be made of it.
        reason: why the connection ends or has ended; None while it stands.
        detail: what the peer did, in words, if it broke a rule.
        over: done when the connection is gone.
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

        # Reading: whether more is to be decoded in the next iteration, and whether the handler has paused the peer.
        self._later: asyncio.Handle | None = None
        self._paused = False

        # PONGs since the peer's kernel has last taken some, and the position in the stream where it has taken them.
        self._pong_bytes = 0
        self._pongs_until = 0

    # -- for handlers --------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the connection ends or has ended; writes do nothing then."""
        return self.reason is not None

    @property
    def waiting_bytes(self) -> int:
        """Bytes accepted by :meth:`write` that the kernel has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def unread_bytes(self) -> int:
        """Bytes for the peer: those that wait here, and those in the kernel that the peer has not acknowledged."""
        return self.waiting_bytes + self._endpoint.settings.system.queued_bytes(self._socket)

    @property
    def acknowledged_bytes(self) -> int:
        """Bytes that the peer's kernel has acknowledged so far. It only rises.

        A local socket has no acknowledgements. There it is what the kernel has taken, which only does so while the peer
        reads.
        """
        missing = self.waiting_bytes if self._local else self.unread_bytes
        self._acknowledged = max(self._acknowledged, self.written_bytes - missing)
        return self._acknowledged

    @property
    def has_unread(self) -> bool:
        """Whether bytes of the peer wait to be decoded, here or in the kernel."""
        return not self.closed and (self._later is not None or tcp.has_unread(self._socket))

    def silent_for(self, seconds: float) -> bool:
        """Return whether the peer's kernel owes an acknowledgement for so long, though it was asked again and again.

        A peer that merely does not read is not silent: its kernel answers.
        """
        if self._local or self.closed or not self.unread_bytes:
            return False
        return tcp.gone(tcp.silence(self._socket), seconds)

    def write(self, data: bytes) -> None:
        """Send whole encoded messages. Join the messages of one iteration of the loop: every call costs the same."""
        if self._transport is None or self.closed:
            return
        if self.rewrite is not None:
            data = self.rewrite(data)
        if self._zmtp.sealing is not None:
            data = self._zmtp.sealing.seal(data)
        self.written_bytes += len(data)
        self._transport.write(data)

    def pause(self) -> None:
        """Stop reading from the peer. What has arrived stays, and TCP slows the peer down."""
        self._paused = True
        self._stop_reading()

    def resume(self) -> None:
        """Read from the peer again."""
        if self._paused:
            self._paused = False
            self._decode_later()

    def close(self, reason: str, *, linger: float = 0.0) -> None:
        """End the connection.

        Args:
            reason: why; :meth:`PeerHandler.closed` gets the first one that is given.
            linger: seconds for the bytes that wait here to leave; without it they are dropped.
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
        """Begin with our greeting."""
        # not checked, because uvloop's transports are no subclass of asyncio's
        self._transport = stream = cast("asyncio.Transport", transport)
        if self.reason is not None:
            stream.abort()
            return
        settings = self._endpoint.settings
        stream.set_write_buffer_limits(settings.high_water, settings.low_water)
        stream.write(self._zmtp.data_to_send())

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio gives it
        """Read into the endpoint's buffer: the protocol copies it before the next read."""
        return self._endpoint.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Take in what was read."""
        self._zmtp.receive_data(self._endpoint.scratch[:nbytes])
        self._decode()

    def eof_received(self) -> None:
        """End the connection: nobody reads what is still to be sent."""
        self.close(Reason.LEFT)

    def pause_writing(self) -> None:
        """Note that too much waits for the peer."""
        self.writable = False

    def resume_writing(self) -> None:
        """Tell the handler that the peer has taken most of it."""
        self.writable = True
        if self.is_open and not self.closed:
            self._endpoint.handler.drained(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the endpoint that the connection is gone."""
        if self.reason is None:
            self.reason = Reason.BROKEN if exc is not None else Reason.LEFT
        if not self.over.done():  # whoever waited for it may have been cancelled
            self.over.set_result(None)
        self._endpoint.lost(self, self.reason)

    # -- decoding ------------------------------------------------------------------------------------------------------

    def _stop_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _decode_later(self) -> None:
        """Read nothing more, and go on decoding in the next iteration of the loop."""
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
        """Decode up to :data:`EVENTS` events, and act on them."""
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
        self._answer()  # a handshake ends with an ERROR, which gets the rest of the time for handshakes to leave
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
        self._answer()  # the handshake's last bytes go before the handler's first ones, and are not sealed
        self.is_open = True
        self.since, self.opened_at = self._endpoint.loop.time(), time.time()
        self._endpoint.opened(self)

    def _answer(self) -> None:
        """Send the protocol's own answers."""
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
