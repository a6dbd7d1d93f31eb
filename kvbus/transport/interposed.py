"""One port where both engines and routers dial in. The socket type of a peer tells engines and routers apart.

The port belongs to an output. The output serves the peers that subscribe, and a source reads the peers that publish.
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
"""Maximum number of engines at one port. Only one is correct, but kvbus has to read batches to detect a conflict."""

NO_SOURCE: Final = "no_source"
"""Reason to disconnect an engine: no source reads the port, because the source is being replaced."""


class Interposed:
    """A port for engines and routers; a :class:`~kvbus.transport.zmtp.peer.PeerHandler`.

    Args:
        endpoint: where to listen, ``tcp://host:port``.
        routers: the handler of the peers that subscribe.
        settings: bounds and times.
        stats: counters of the output.
        refused: called for each refused connection.

    Raises:
        BindError: the endpoint cannot be bound.
    """

    def __init__(
        self, endpoint: str, routers: PeerHandler, *, settings: Settings, stats: OutputStats, refused: Refused
    ) -> None:
        self.publishers: PeerHandler | None = None
        """The handler of the peers that publish; None while no source reads the port."""
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
        """The endpoint where it listens, with the real port."""
        return self._listener.endpoint

    @property
    def peers(self) -> list[Peer]:
        """The connections of engines and routers."""
        return [*self._listener.peers.values()]

    def opened(self, peer: Peer) -> None:
        """Hand a new peer to the source or to the output, by its socket type."""
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
        """Pass a subscription to the peer's handler."""
        self._sides[peer.id].subscribed(peer, topic)

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Pass the end of a subscription to the peer's handler."""
        self._sides[peer.id].cancelled(peer, topic)

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        """Pass a message to the peer's handler."""
        self._sides[peer.id].received(peer, frames)

    def drained(self, peer: Peer) -> None:
        """Tell the peer's handler that the peer is writable again."""
        self._sides[peer.id].drained(peer)

    def closed(self, peer: Peer, reason: str) -> None:
        """Forget a peer, and tell its handler."""
        side = self._sides.pop(peer.id, None)
        if side is None:
            return
        if peer.socket_type in PUBLISHERS:
            self._stats.publishers -= 1
        side.closed(peer, reason)

    def close(self, linger: float = 0.0) -> None:
        """Close the port and all connections. Bytes queued for a router are sent for up to ``linger`` seconds."""
        if not self._closed:
            self._closed = True
            self._stats.publishers_limit -= MAX_PUBLISHERS
            self._listener.close(linger)


class InterposedStream(AcceptedStream):
    """The publishers of one source, which dial in at a port that routers dial as well.

    Args:
        port: the shared port.
        topics: subscription prefixes.
        events: the callbacks of the source.
    """

    def __init__(self, port: Interposed, *, topics: Sequence[bytes], events: Events) -> None:
        super().__init__(topics=topics, events=events)
        self._port = port
        port.publishers = self

    def close(self) -> None:
        """Disconnect the publishers. The port stays open for routers."""
        self._port.publishers = None
        super().close()
