"""One port at which engines and routers both dial in: each peer's socket type says which of them it is.

The port is an output's, and the source behind it takes the peers that publish. What they send is handed on as it is
read: batches wait in the kernel and with the engine, never here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from kvbus.core.stats import OutputStats
from kvbus.transport.ingress import Events
from kvbus.transport.pump import MAX_KEPT_FRAMES
from kvbus.transport.zmtp.endpoint import Listener, Refused, Settings
from kvbus.transport.zmtp.mechanism import PUBLISHERS, Role
from kvbus.transport.zmtp.peer import Peer, PeerHandler
from kvbus.transport.zmtp.protocol import Limits
from kvbus.transport.zmtp.reasons import Reason
from kvbus.transport.zmtp.wire import subscribe

MAX_PUBLISHERS: Final = 16
"""Engines at one port. One is right; with a second there is a conflict, which only batches show."""

NO_SOURCE: Final = "no_source"
"""Why an engine is disconnected: its source is being replaced."""

_TOO_LARGE: Final = frozenset({Reason.FRAME_BYTES, Reason.MESSAGE_BYTES})


def limits_of_publishers(frame_bytes: int) -> Limits:
    """Return what an engine may make kvbus keep: what libzmq lets it, but for the size of a message."""
    most = 4 * frame_bytes
    # a frame costs at least a byte, so the bytes of a message bound its frames where those are not empty
    return Limits(frame_bytes=frame_bytes, message_frames=most, kept_frames=MAX_KEPT_FRAMES, message_bytes=most)


class Interposed:
    """A port for both roles; a :class:`~kvbus.transport.zmtp.peer.PeerHandler`.

    Args:
        endpoint: where to listen, ``tcp://host:port``.
        routers: what serves the peers that subscribe.
        settings: bounds and times.
        stats: counters of the output.
        refused: called for each connection that is turned away.

    Raises:
        BindError: the endpoint cannot be bound.
    """

    def __init__(
        self, endpoint: str, routers: PeerHandler, *, settings: Settings, stats: OutputStats, refused: Refused
    ) -> None:
        self.publishers: PeerHandler | None = None
        """What takes the peers that publish."""
        self._routers = routers
        self._stats = stats
        self._refused = refused
        self._closed = False
        self._sides: dict[int, PeerHandler] = {}
        settings = replace(settings, max_publishers=MAX_PUBLISHERS)
        self._listener = Listener(endpoint, Role.EITHER, self, settings=settings, refused=refused)
        stats.publishers_limit += MAX_PUBLISHERS

    @property
    def endpoint(self) -> str:
        """Where it listens, with its real port."""
        return self._listener.endpoint

    @property
    def peers(self) -> list[Peer]:
        """The connections of both sides."""
        return [*self._listener.peers.values()]

    def opened(self, peer: Peer) -> None:
        """Hand a new peer to its side."""
        side = self.publishers if peer.socket_type in PUBLISHERS else self._routers
        if side is None:
            self._refused(NO_SOURCE, peer.address, "")
            peer.close(NO_SOURCE)
            return
        self._sides[peer.id] = side
        if peer.socket_type in PUBLISHERS:
            self._stats.publishers += 1
            self._stats.publishers_accepted += 1
        side.opened(peer)

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Hand on a subscription."""
        self._sides[peer.id].subscribed(peer, topic)

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Hand on that a subscription ends."""
        self._sides[peer.id].cancelled(peer, topic)

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        """Hand on a message."""
        self._sides[peer.id].received(peer, frames)

    def drained(self, peer: Peer) -> None:
        """Hand on that a peer has read."""
        self._sides[peer.id].drained(peer)

    def closed(self, peer: Peer, reason: str) -> None:
        """Forget a peer."""
        side = self._sides.pop(peer.id, None)
        if side is None:
            return
        if peer.socket_type in PUBLISHERS:
            self._stats.publishers -= 1
        side.closed(peer, reason)

    def close(self, linger: float = 0.0) -> None:
        """Give up the port and end all connections; what waits for a router has ``linger`` seconds to leave."""
        if not self._closed:
            self._closed = True
            self._stats.publishers_limit -= MAX_PUBLISHERS
            self._listener.close(linger)


class AcceptedStream:
    """The engine publisher of one source, which dials in; a :class:`~kvbus.transport.zmtp.peer.PeerHandler`.

    To its source it is what a :class:`~kvbus.transport.ingress.LiveStream` is: several publishers are read side by
    side, and the connection is up from the first one's to the last one's end.

    Args:
        port: where it dials in.
        topics: subscription prefixes.
        events: the callbacks.
    """

    def __init__(self, port: Interposed, *, topics: Sequence[bytes], events: Events) -> None:
        self._port = port
        self._topics = topics
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._peers: dict[int, Peer] = {}
        self._soon: asyncio.Handle | None = None
        self._closed = False
        port.publishers = self

    @property
    def reached(self) -> None:
        """Nothing: the publishers dial in."""

    @property
    def unread(self) -> bool:
        """Never: what has come is read by this thread, in each turn of the loop."""
        return False

    @property
    def peers(self) -> list[str]:
        """Addresses of the publishers that are connected."""
        return [peer.address for peer in self._peers.values()]

    def beside(self, endpoint: str) -> str:
        """Return an endpoint of the engine as it is: it was not looked up to be dialled."""
        return endpoint

    def opened(self, peer: Peer) -> None:
        """Subscribe."""
        peer.write(b"".join([subscribe(topic, peer.version) for topic in self._topics]))
        self._peers[peer.id] = peer
        if len(self._peers) == 1:
            self._events.connection(True)

    def received(self, peer: Peer, frames: list[bytes]) -> None:  # noqa: ARG002 - the source is one, whoever publishes
        """Hand a batch on; what follows from it is sent behind the burst."""
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
        """Do nothing: subscriptions are all that is sent."""

    def close(self) -> None:
        """Disconnect the publishers and leave the port."""
        self._closed = True
        self._port.publishers = None
        for peer in self._peers.values():
            peer.close(Reason.CLOSED)
