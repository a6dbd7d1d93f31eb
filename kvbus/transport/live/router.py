"""One connected router, as the live side of an output sees it."""

from __future__ import annotations

import logging
from enum import StrEnum

from kvbus.core.outputs.state_transfer import Reading
from kvbus.transport.zmtp.peer import Peer

log = logging.getLogger("kvbus.outputs")


class RouterState(StrEnum):
    """Where a router stands."""

    IDLE = "idle"
    """No subscription of its matches the stream's topic."""
    WAITING = "waiting"
    """It gets the state next. What is published meanwhile is in that state."""
    RECEIVING = "receiving"
    """The state is on its way. What is published meanwhile follows it."""
    LIVE = "live"
    """It gets each batch."""
    STALLED = "stalled"
    """Batches for it were dropped, and it does not read. It gets the state again once it reads."""


class Router:
    """A peer with its place in the stream.

    Args:
        peer: the connection.
        stream: the stream's slot.
        name: of its key's owner; empty where it has none.
    """

    def __init__(self, peer: Peer, stream: int = 0, name: str = "") -> None:
        self.peer = peer
        self.stream = stream
        self.name = name
        self.state = RouterState.IDLE

        # What it gets next: the rest of a state, then batches of the ring from a position on.
        self.reader: Reading | None = None
        self.position = 0
        self.queued = False
        """It is in the line of routers that have something to get."""

        # The state: why it gets one, how often it got one, and how it takes the one under way.
        self.reason = ""
        self.wanted_at = 0.0
        self.states_sent = 0
        self.state_sent_at: float | None = None
        self.has_asked = False
        """A replay was requested from its address since it last began to wait for a state."""
        self.slow = False
        self.acknowledged = 0
        self.progress_at = 0.0
        self.lost_at: float | None = None
        """The loop's time since which it lacks batches; None once it has the state that makes up for them."""

        self.subscriptions = 0
        self.asks = False
        """It asks for replays, and wants no state."""
        self.dropped_batches = 0
        self.dropped_events = 0

    def matches(self, topic: bytes) -> bool:
        """Whether a subscription of its covers a topic."""
        return any(topic.startswith(prefix) for prefix in self.peer.topics)


def say(level: int, text: str, output: str, router: Router, *more: object) -> None:
    """Log what happens to a router; the text has places for the output, the router and what is more."""
    peer, name = router.peer, router.name
    fields = {"output": output, "stream": router.stream, "peer": peer.address}
    if name:
        fields["router"] = name
    log.log(level, text, output, f"{name} ({peer.address})" if name else peer.address, *more, extra=fields)
