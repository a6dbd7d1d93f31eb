"""A peer: one connection whose handshake is over, as the roles on top see it."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable
from typing import Final, Protocol

from kvbus.transport.zmtp import tcp
from kvbus.transport.zmtp.events import Opened
from kvbus.transport.zmtp.mechanism import Sealing
from kvbus.transport.zmtp.subscriptions import Subscriptions

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
        """Take in a whole message (ROUTER)."""

    def drained(self, peer: Peer) -> None:
        """Take in that the peer is writable again."""

    def closed(self, peer: Peer, reason: str) -> None:
        """Forget the peer. Called once for each, in a later turn of the loop than :meth:`Peer.close`.

        Args:
            peer: the peer.
            reason: what :meth:`Peer.close` was given, or a :class:`~kvbus.transport.zmtp.reasons.Reason`.
        """


class Steering(Protocol):
    """What a peer may ask of its connection."""

    def end(self, reason: str) -> None:
        """End the connection."""

    def hold(self) -> None:
        """Stop reading."""

    def release(self) -> None:
        """Read again."""


class Peer:
    """One connection, handshake done.

    Attributes:
        id: unique in the process, never used again.
        address: ``10.0.0.7:40132``, or ``unix``.
        since: the loop's time when the handshake was over.
        opened_at: the same as time of day, in seconds; steps of the clock do not move it.
        socket_type: of the peer, such as ``b"SUB"``.
        identity: that the peer gave itself; often empty, and not unique.
        version: of ZMTP, spoken on this connection.
        key: the public key that the peer has proven to own; empty without CURVE.
        topics: what the peer has subscribed to (PUB).
        writable: False from the high-water mark of :attr:`waiting_bytes` down to the low one.
        written_bytes: given to :meth:`write` so far, sealed.
        unsent_bytes: what the kernel had not taken when the connection ended; None while it stands, and where it broke.
        closed: True from :meth:`close` or the end of the connection on; writes do nothing then.
        rewrite: makes what this peer gets of what :meth:`write` is given; None: nothing has to be made of it.
    """

    def __init__(
        self,
        steering: Steering,
        transport: asyncio.Transport,
        connection: socket.socket,
        address: str,
        opened: Opened,
        topics: Subscriptions,
        sealing: Sealing | None = None,
        queued_bytes: Callable[[socket.socket], int] = tcp.queued_bytes,
    ) -> None:
        self.id = next(_IDS)
        self.address = address
        self.since = asyncio.get_running_loop().time()
        self.opened_at = time.time()
        self.socket_type = opened.socket_type
        self.identity = opened.identity
        self.version = opened.version
        self.key = opened.key
        self.topics = topics
        self.writable = True
        self.written_bytes = 0
        self.unsent_bytes: int | None = None
        self.closed = False
        self.rewrite: Callable[[bytes], bytes] | None = None

        self._steering = steering
        self._transport = transport
        self._send = transport.write
        self._sealing = sealing
        self._socket = connection
        self._queued_bytes = queued_bytes
        self._local = connection.family == socket.AF_UNIX
        self._acknowledged = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes accepted by :meth:`write` that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size()

    @property
    def unread_bytes(self) -> int:
        """Bytes that are on their way: waiting here, or in the kernel without an acknowledgement of the peer's."""
        return self.waiting_bytes + self._queued_bytes(self._socket)

    @property
    def acknowledged_bytes(self) -> int:
        """Bytes that the peer's kernel has acknowledged so far. It only rises.

        On a local socket there is no such thing; there it is what the kernel has taken, which only does so while the
        peer reads.
        """
        missing = self.waiting_bytes if self._local else self.unread_bytes
        self._acknowledged = max(self._acknowledged, self.written_bytes - missing)
        return self._acknowledged

    @property
    def window(self) -> tcp.Window | None:
        """What the peer's kernel has taken and would take; None where that is not known, as on a local socket."""
        return None if self._local or self.closed else tcp.window(self._socket)

    def silent_for(self, seconds: float) -> bool:
        """Return whether the peer's kernel owes an acknowledgement for so long, though it was asked again and again.

        A peer that merely does not read is not silent: its kernel answers.
        """
        if self._local or self.closed or not self.unread_bytes:
            return False
        return tcp.gone(tcp.silence(self._socket), seconds)

    def write(self, data: bytes, *, in_two: bool = False) -> None:
        """Send encoded messages, whole ones. Join what is to be sent in one turn: every call costs the same.

        Args:
            data: the messages.
            in_two: send them as two segments. A kernel acknowledges the second one at once, and may wait 40 ms with a
                single one (RFC 5681, 4.2).
        """
        if not self.closed:
            if self.rewrite is not None:
                data = self.rewrite(data)
            if self._sealing is not None:
                data = self._sealing.seal(data)
            self.written_bytes += len(data)
            if in_two:
                self._send(data[: len(data) // 2])
                data = data[len(data) // 2 :]
            self._send(data)

    def close(self, reason: str) -> None:
        """End the connection. What waits here is dropped; :meth:`PeerHandler.closed` gets the reason."""
        self._steering.end(reason)

    def limit(self, *, waiting: int, unsent: int) -> None:
        """Let so many bytes wait here before the peer is not writable any more, and so many unsent in the kernel."""
        self._transport.set_write_buffer_limits(waiting, 0)
        if not self._local:
            tcp.limit_unsent(self._socket, unsent)

    def pause(self) -> None:
        """Stop reading from the peer. What has arrived stays, and TCP slows the peer down."""
        self._steering.hold()

    def resume(self) -> None:
        """Read from the peer again."""
        self._steering.release()
