"""A port that both engines and routers dial. kvbus distinguishes engines from routers by their socket types.

The port belongs to an output. The output serves the peers that subscribe, and a source reads the peers that publish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvbus.core.stats import OutputStats
from kvbus.transport.subscription import AcceptedStream, Events
from kvbus.transport.zmtp.endpoint import Listener, Refused
from kvbus.transport.zmtp.mechanism import PUBLISHERS, Role
from kvbus.transport.zmtp.peer import Peer, PeerHandler
from kvbus.transport.zmtp.settings import Settings

MAX_PUBLISHERS: Final = 16
"""Maximum number of engines that are connected to one shared port.

Only one engine should connect to a port. kvbus also reads the batches of further engines, to detect the conflict.
"""

NO_SOURCE: Final = "no_source"
"""The reason for disconnecting an engine if no source reads the port, because the source is being replaced."""


class Interposed:
    """A port that engines and routers dial, and the handler of their connections.

    Args:
        endpoint: the endpoint to bind, ``tcp://host:port``.
        routers: the handler of the peers that subscribe.
        settings: limits and timeouts of the port.
        stats: counters of the output.
        refused: called for each connection that is refused.

    Raises:
        BindError: the endpoint cannot be bound.
    """

    def __init__(
        self, endpoint: str, routers: PeerHandler, *, settings: Settings, stats: OutputStats, refused: Refused
    ) -> None:
        self.publishers: PeerHandler | None = None
        """The handler of the engines, which publish; None while no source reads the port."""
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
        """The endpoint that the port is bound to, with its real port number."""
        return self._listener.endpoint

    @property
    def peers(self) -> list[Peer]:
        """The connections of all engines and routers at the port."""
        return [*self._listener.peers.values()]

    def opened(self, peer: Peer) -> None:
        """Pass a new peer to the source if it publishes, or to the output if it subscribes."""
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
        """Pass a peer's subscription to the handler of the peer."""
        self._sides[peer.id].subscribed(peer, topic)

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Pass the end of a peer's subscription to the handler of the peer."""
        self._sides[peer.id].cancelled(peer, topic)

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        """Pass a peer's message to the handler of the peer."""
        self._sides[peer.id].received(peer, frames)

    def drained(self, peer: Peer) -> None:
        """Report to the handler of a peer that the peer is writable again."""
        self._sides[peer.id].drained(peer)

    def closed(self, peer: Peer, reason: str) -> None:
        """Remove a peer whose connection has ended, and report the end to the handler of the peer."""
        side = self._sides.pop(peer.id, None)
        if side is None:
            return
        if peer.socket_type in PUBLISHERS:
            self._stats.publishers -= 1
        side.closed(peer, reason)

    def close(self, linger: float = 0.0) -> None:
        """Close the port and all its connections. Bytes queued for a router are sent for up to ``linger`` seconds."""
        if not self._closed:
            self._closed = True
            self._stats.publishers_limit -= MAX_PUBLISHERS
            self._listener.close(linger)


class InterposedStream(AcceptedStream):
    """The live stream of one source whose publishers dial a port that routers dial as well.

    Args:
        port: the shared port.
        topics: prefixes of the topics that kvbus subscribes to.
        events: the callbacks of the source.
    """

    def __init__(self, port: Interposed, *, topics: Sequence[bytes], events: Events) -> None:
        super().__init__(topics=topics, events=events)
        self._port = port
        port.publishers = self

    def close(self) -> None:
        """Disconnect the publishers. The shared port stays open for routers."""
        self._port.publishers = None
        super().close()
