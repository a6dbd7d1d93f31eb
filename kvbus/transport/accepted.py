"""The live stream of engines that dial in, over kvbus's own ZMTP implementation.

Each message is passed on as soon as it is read: unread batches wait in the kernel and at the engine, never in kvbus. A
message that never ends costs little memory, because kvbus keeps only its first frames and bounds its size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final

from kvbus.core.types import Refused
from kvbus.transport.ingress import Events
from kvbus.transport.pump import MAX_KEPT_FRAMES
from kvbus.transport.sockets import PeerPolicy
from kvbus.transport.zmtp.endpoint import Listener, Settings
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.peer import Peer
from kvbus.transport.zmtp.protocol import Limits
from kvbus.transport.zmtp.reasons import Reason
from kvbus.transport.zmtp.wire import subscribe
from kvbus.transport.zmtp_keys import Keys

_TOO_LARGE: Final = frozenset({Reason.FRAME_BYTES, Reason.MESSAGE_BYTES})

_REFUSED: Final[dict[str, Refused]] = {
    Reason.KEY: Refused.KEY,
    Reason.MECHANISM: Refused.MECHANISM,
    Reason.HANDSHAKE_TIMEOUT: Refused.CLOSED,
    Reason.HALF_OPEN: Refused.CLOSED,
    Reason.TOO_MANY_PEERS: Refused.CLOSED,
    Reason.NO_DESCRIPTOR: Refused.CLOSED,
    Reason.REFUSED: Refused.CLOSED,
    Reason.LEFT: Refused.CLOSED,
    Reason.BROKEN: Refused.CLOSED,
}
"""Why a connection does not become a publisher: the source's reason by ZMTP reason. Any other reason is PROTOCOL."""


def limits_of_publishers(frame_bytes: int) -> Limits:
    """Return the limits of an engine's connection: those of libzmq, and a maximum size of a message in bytes."""
    most = 4 * frame_bytes
    # a frame that is not empty has at least one byte, so the limit in bytes also bounds the number of such frames
    return Limits(frame_bytes=frame_bytes, message_frames=most, kept_frames=MAX_KEPT_FRAMES, message_bytes=most)


class AcceptedStream:
    """The publishers of one source, which dial in; a :class:`~kvbus.transport.zmtp.peer.PeerHandler`.

    A source uses it like a :class:`~kvbus.transport.ingress.LiveStream`. Several publishers can be connected. The
    source's connection is up while at least one of them is.

    Args:
        topics: subscription prefixes.
        events: the callbacks of the source.
    """

    def __init__(self, *, topics: Sequence[bytes], events: Events) -> None:
        self._topics = topics
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._peers: dict[int, Peer] = {}
        self._soon: asyncio.Handle | None = None
        self._closed = False

    @property
    def reached(self) -> None:
        """None: kvbus has dialled no address, because the publishers dial in."""

    @property
    def unread(self) -> bool:
        """Whether a publisher has sent batches that are not read yet."""
        return any(peer.has_unread for peer in self._peers.values())

    @property
    def peers(self) -> list[str]:
        """Addresses of the connected publishers."""
        return [peer.address for peer in self._peers.values()]

    def beside(self, endpoint: str) -> str:
        """Return the endpoint unchanged: kvbus did not look up a host name to reach the engine."""
        return endpoint

    def opened(self, peer: Peer) -> None:
        """Send the subscriptions to a new publisher."""
        peer.write(b"".join([subscribe(topic, peer.version) for topic in self._topics]))
        self._peers[peer.id] = peer
        if len(self._peers) == 1:
            self._events.connection(True)

    def received(self, peer: Peer, frames: list[bytes]) -> None:  # noqa: ARG002 - all peers publish for one source
        """Pass a batch to the source, and call ``drained`` once after the burst of batches."""
        if self._closed:
            return
        self._events.message(frames)
        if self._soon is None and self._events.drained is not None:
            self._soon = self._loop.call_soon(self._drained, self._events.drained)

    def _drained(self, drained: Callable[[], None]) -> None:
        self._soon = None
        drained()

    def closed(self, peer: Peer, reason: str) -> None:
        """Forget a publisher, and report the connection as down after the last one."""
        del self._peers[peer.id]
        if self._closed:
            return
        if reason in _TOO_LARGE:
            self._events.oversize()
        if not self._peers:
            self._events.connection(False)

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Do nothing: a publisher does not subscribe."""

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Do nothing: a publisher does not subscribe."""

    def drained(self, peer: Peer) -> None:
        """Do nothing: kvbus sends an engine only its subscriptions."""

    def close(self) -> None:
        """Disconnect the publishers."""
        self._closed = True
        for peer in self._peers.values():
            peer.close(Reason.CLOSED)


class BoundStream(AcceptedStream):
    """The publishers of one source, which dial in at the source's own port.

    Args:
        endpoint: where to listen, ``tcp://host:port`` or ``ipc://path``.
        topics: subscription prefixes.
        events: the callbacks of the source.
        policy: who may connect, and the largest frame to accept.

    Raises:
        BindError: the endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, *, topics: Sequence[bytes], events: Events, policy: PeerPolicy) -> None:
        super().__init__(topics=topics, events=events)
        self._keys = Keys(policy.curve, bind=True)
        self._listener = Listener(
            endpoint,
            Role.SUB,
            self,
            settings=Settings(limits_of_publishers(policy.max_frame_bytes)),
            refused=self._refused,
            mechanism=self._keys.mechanism,
        )

    def _refused(self, reason: str, _address: str, _detail: str) -> None:
        """Report a connection that did not become a publisher, with the source's reason."""
        self._events.refused(_REFUSED.get(reason, Refused.PROTOCOL))

    def allow(self, clients: Collection[bytes]) -> None:
        """Replace the allow-list, and disconnect every publisher whose key is no longer on it."""
        self._keys.allow(clients, self._listener.peers.values())

    def close(self) -> None:
        """Disconnect the publishers and stop listening."""
        self._closed = True
        self._listener.close()
