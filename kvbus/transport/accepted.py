"""The live stream of engines that dial in, on kvbus's own ZMTP.

What an engine sends is handed on as it is read: batches wait in the kernel and with the engine, never here. A message
without an end costs little: only its first frames are kept, and its size is bounded.
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
"""Reasons for which a connection does not become a publisher, in the terms of a source; all others are PROTOCOL."""


def limits_of_publishers(frame_bytes: int) -> Limits:
    """Return how much kvbus keeps for an engine: as much as libzmq would, but for the size of a message."""
    most = 4 * frame_bytes
    # a frame costs at least a byte, so the bytes of a message bound its frames where those are not empty
    return Limits(frame_bytes=frame_bytes, message_frames=most, kept_frames=MAX_KEPT_FRAMES, message_bytes=most)


class AcceptedStream:
    """The publishers of one source, which dial in; a :class:`~kvbus.transport.zmtp.peer.PeerHandler`.

    For its source it works as a :class:`~kvbus.transport.ingress.LiveStream` does. It reads several publishers side by
    side, and the connection is up from the beginning of the first one to the end of the last one.

    Args:
        topics: subscription prefixes.
        events: the callbacks.
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
        """Return None: the publishers dial in."""

    @property
    def unread(self) -> bool:
        """Whether batches wait to be read."""
        return any(peer.has_unread for peer in self._peers.values())

    @property
    def peers(self) -> list[str]:
        """Addresses of the publishers that are connected."""
        return [peer.address for peer in self._peers.values()]

    def beside(self, endpoint: str) -> str:
        """Return an endpoint of the engine as it is: kvbus has looked up no name to reach the engine."""
        return endpoint

    def opened(self, peer: Peer) -> None:
        """Subscribe."""
        peer.write(b"".join([subscribe(topic, peer.version) for topic in self._topics]))
        self._peers[peer.id] = peer
        if len(self._peers) == 1:
            self._events.connection(True)

    def received(self, peer: Peer, frames: list[bytes]) -> None:  # noqa: ARG002 - the source is one, whoever publishes
        """Hand a batch on. The batches that follow from a burst are sent after it."""
        if self._closed:
            return
        self._events.message(frames)
        if self._soon is None and self._events.drained is not None:
            self._soon = self._loop.call_soon(self._drained, self._events.drained)

    def _drained(self, drained: Callable[[], None]) -> None:
        self._soon = None
        drained()

    def closed(self, peer: Peer, reason: str) -> None:
        """Forget a publisher."""
        del self._peers[peer.id]
        if self._closed:
            return
        if reason in _TOO_LARGE:
            self._events.oversize()
        if not self._peers:
            self._events.connection(False)

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Never called: a publisher subscribes to nothing."""

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Never called."""

    def drained(self, peer: Peer) -> None:
        """Do nothing: kvbus sends an engine its subscriptions alone."""

    def close(self) -> None:
        """Disconnect the publishers."""
        self._closed = True
        for peer in self._peers.values():
            peer.close(Reason.CLOSED)


class BoundStream(AcceptedStream):
    """The publishers of one source, which dial in at a port of its own.

    Args:
        endpoint: where to listen, ``tcp://host:port`` or ``ipc://path``.
        topics: subscription prefixes.
        events: the callbacks.
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
        """Report a connection that did not become a publisher, in the terms of a source."""
        self._events.refused(_REFUSED.get(reason, Refused.PROTOCOL))

    def allow(self, clients: Collection[bytes]) -> None:
        """Replace the allow-list, and end the connections of those publishers that are not on it any more."""
        self._keys.allow(clients, self._listener.peers.values())

    def close(self) -> None:
        """Disconnect the publishers, and listen no more."""
        self._closed = True
        self._listener.close()
