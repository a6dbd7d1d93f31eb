"""The live stream of engines that dial kvbus. kvbus reads it with its own ZMTP implementation, without libzmq.

kvbus passes on each batch as soon as it has read it, so unread batches wait in the kernel and at the engine. A message
without an end costs little memory, because kvbus keeps only its first frames and limits its total size.
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
"""Maps the reason why kvbus's ZMTP code refused an engine's connection to the reason that the source reports.

Every reason that is not listed here is reported as PROTOCOL.
"""


def limits_of_publishers(frame_bytes: int) -> Limits:
    """Return the limits for the data that an engine sends on its connection.

    Args:
        frame_bytes: maximum bytes of one frame. A message may have four times as many bytes.
    """
    most = 4 * frame_bytes
    # The limit of bytes also serves as the limit of frames: a message of that many one-byte frames reaches both limits.
    return Limits(frame_bytes=frame_bytes, message_frames=most, kept_frames=MAX_KEPT_FRAMES, message_bytes=most)


class AcceptedStream:
    """The live stream of one source whose publishers dial kvbus, and the handler of their connections.

    A source uses it like a :class:`~kvbus.transport.ingress.LiveStream`. Several publishers may be connected. The
    source counts as connected while it has at least one publisher.

    Args:
        topics: prefixes of the topics that kvbus subscribes to.
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
        """The address that kvbus has dialled. It is always None, because the publishers dial kvbus."""

    @property
    def unread(self) -> bool:
        """Whether a publisher has sent bytes that kvbus has not decoded yet."""
        return any(peer.has_unread for peer in self._peers.values())

    @property
    def peers(self) -> list[str]:
        """Addresses of the connected publishers."""
        return [peer.address for peer in self._peers.values()]

    def beside(self, endpoint: str) -> str:
        """Return the engine's replay or snapshot endpoint unchanged.

        :meth:`LiveStream.beside <kvbus.transport.ingress.LiveStream.beside>` replaces the host name by the connected
        address. Here the engine dials kvbus, so kvbus has looked up no host name.
        """
        return endpoint

    def opened(self, peer: Peer) -> None:
        """Send kvbus's subscriptions to a publisher that has connected, and report the first publisher's connection."""
        peer.write(b"".join([subscribe(topic, peer.version) for topic in self._topics]))
        self._peers[peer.id] = peer
        if len(self._peers) == 1:
            self._events.connection(True)

    def received(self, peer: Peer, frames: list[bytes]) -> None:  # noqa: ARG002 - all peers publish for one source
        """Pass a batch to the source, and call the source's ``drained`` callback once after each burst of batches."""
        if self._closed:
            return
        self._events.message(frames)
        if self._soon is None and self._events.drained is not None:
            self._soon = self._loop.call_soon(self._drained, self._events.drained)

    def _drained(self, drained: Callable[[], None]) -> None:
        self._soon = None
        drained()

    def closed(self, peer: Peer, reason: str) -> None:
        """Remove a publisher. After the last publisher, report that the source is no longer connected."""
        del self._peers[peer.id]
        if self._closed:
            return
        if reason in _TOO_LARGE:
            self._events.oversize()
        if not self._peers:
            self._events.connection(False)

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Do nothing, because a publisher does not subscribe."""

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Do nothing, because a publisher has no subscription to cancel."""

    def drained(self, peer: Peer) -> None:
        """Do nothing when an engine is writable again, because kvbus sends an engine only its subscriptions."""

    def close(self) -> None:
        """Disconnect all publishers."""
        self._closed = True
        for peer in self._peers.values():
            peer.close(Reason.CLOSED)


class BoundStream(AcceptedStream):
    """The live stream of one source whose publishers connect to a port that kvbus opens only for this source.

    Args:
        endpoint: the endpoint to bind, ``tcp://host:port`` or ``ipc://path``.
        topics: prefixes of the topics that kvbus subscribes to.
        events: the callbacks of the source.
        policy: the rules for publishers: who may connect, and the largest frame that kvbus accepts.

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
        """Tell the source why a connection did not become one of its publishers."""
        self._events.refused(_REFUSED.get(reason, Refused.PROTOCOL))

    def allow(self, clients: Collection[bytes]) -> None:
        """Replace the allow-list of CURVE keys, and disconnect every publisher whose key is not on the new list."""
        self._keys.allow(clients, self._listener.peers.values())

    def close(self) -> None:
        """Disconnect all publishers, and close the source's port."""
        self._closed = True
        self._listener.close()
