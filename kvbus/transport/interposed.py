"""One port at which engines and routers both dial in: each peer's socket type says which of them it is.

The port is an output's. The output serves the peers that subscribe, and a source takes the peers that publish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvbus.core.stats import OutputStats
from kvbus.transport.accepted import AcceptedStream
from kvbus.transport.ingress import Events
from kvbus.transport.zmtp.endpoint import Listener, Refused, Settings
from kvbus.transport.zmtp.mechanism import PUBLISHERS, Role
from kvbus.transport.zmtp.peer import Peer, PeerHandler

MAX_PUBLISHERS: Final = 16
"""Engines at one port. One is right; with a second there is a conflict, which only batches show."""

NO_SOURCE: Final = "no_source"
"""Why an engine is disconnected: its source is being replaced."""


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


class InterposedStream(AcceptedStream):
    """The publishers of one source, which dial in at a port that routers dial, too.

    Args:
        port: the port.
        topics: subscription prefixes.
        events: the callbacks.
    """

    def __init__(self, port: Interposed, *, topics: Sequence[bytes], events: Events) -> None:
        super().__init__(topics=topics, events=events)
        self._port = port
        port.publishers = self

    def close(self) -> None:
        """Disconnect the publishers, and leave the port."""
        self._port.publishers = None
        super().close()
