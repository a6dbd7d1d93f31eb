"""One listener for all views of a stream: each connection goes to the view of its key."""

from __future__ import annotations

from collections.abc import Callable

from kvbus.transport.zmtp.peer import Peer, PeerHandler
from kvbus.transport.zmtp.reasons import Reason


class Doors:
    """Hand each peer to what serves it; a :class:`~kvbus.transport.zmtp.peer.PeerHandler`.

    Args:
        pick: what serves a peer, once its key is known; None: nothing does.
    """

    def __init__(self, pick: Callable[[Peer], PeerHandler | None]) -> None:
        self._pick = pick
        self._handlers: dict[int, PeerHandler] = {}

    def opened(self, peer: Peer) -> None:
        """Take in a new peer."""
        handler = self._pick(peer)
        if handler is None:
            peer.close(Reason.REVOKED)
            return
        self._handlers[peer.id] = handler
        handler.opened(peer)

    def subscribed(self, peer: Peer, topic: bytes) -> None:
        """Hand on a subscription."""
        if (handler := self._handlers.get(peer.id)) is not None:
            handler.subscribed(peer, topic)

    def cancelled(self, peer: Peer, topic: bytes) -> None:
        """Hand on that a subscription ends."""
        if (handler := self._handlers.get(peer.id)) is not None:
            handler.cancelled(peer, topic)

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        """Hand on a message."""
        if (handler := self._handlers.get(peer.id)) is not None:
            handler.received(peer, frames)

    def drained(self, peer: Peer) -> None:
        """Hand on that a peer has read."""
        if (handler := self._handlers.get(peer.id)) is not None:
            handler.drained(peer)

    def closed(self, peer: Peer, reason: str) -> None:
        """Forget a peer."""
        if (handler := self._handlers.pop(peer.id, None)) is not None:
            handler.closed(peer, reason)


class NoDoor:
    """In place of the listener of a view: the stream's own one has the connections, and ends them."""

    def close(self, linger: float = 0.0) -> None:
        """Do nothing."""
