"""A router on one stream of an output: its state, and the table of the allowed transitions between states."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from typing import Final

from kvbus.core.stats import OutputStats, RouterView
from kvbus.transport.sender import Session
from kvbus.transport.zmtp.peer import Peer

log = logging.getLogger("kvbus.outputs")

TOPICS: Final = 8
"""Maximum number of a router's topics that the status for operators shows."""

TOPIC_BYTES: Final = 64
"""Maximum bytes of a topic that the status for operators shows.

A router may subscribe to long topics, and kvbus also keeps the shown topics of routers that have disconnected.
"""


class RouterState(StrEnum):
    """The state of a router on one stream. :data:`MEANING` explains each state."""

    IDLE = "idle"
    WAITING = "waiting"
    RECEIVING = "receiving"
    BEHIND = "behind"
    LIVE = "live"
    STALLED = "stalled"
    GONE = "gone"


MEANING: Final = {
    RouterState.IDLE: "no subscription of the router matches the topic of the stream",
    RouterState.WAITING: "the router waits for the state; batches that are published meanwhile are part of that state",
    RouterState.RECEIVING: "kvbus is sending the state; batches that are published meanwhile follow it",
    RouterState.BEHIND: "the router has the state, and reads the batches after it from the ring (recent batches)",
    RouterState.LIVE: "the router has every batch, and gets each new batch immediately",
    RouterState.STALLED: "the router lost batches and reads nothing; it gets the state once it reads again",
    RouterState.GONE: "the connection has ended",
}

_LOST: Final = "batches for the router were dropped"

TRANSITIONS: Final[dict[RouterState, dict[RouterState, str]]] = {
    RouterState.IDLE: {
        RouterState.WAITING: "a subscription of the router matches the topic, and the output sends states",
        RouterState.LIVE: "a subscription of the router matches the topic, and the router needs no state",
    },
    RouterState.WAITING: {
        RouterState.RECEIVING: "kvbus begins to send the state",
        RouterState.BEHIND: "the router subscribes to `kvbus:asks-replay`, so it gets no state",
    },
    RouterState.RECEIVING: {
        RouterState.BEHIND: "kvbus has sent the router all of the state",
        RouterState.WAITING: f"{_LOST}, or kvbus sends the state to other routers first",
        RouterState.STALLED: f"{_LOST} or it makes no progress, and the router's socket is full",
    },
    RouterState.BEHIND: {
        RouterState.LIVE: "kvbus has sent the router every batch",
        RouterState.WAITING: _LOST,
        RouterState.STALLED: f"{_LOST}, and the router's socket is full",
    },
    RouterState.LIVE: {
        RouterState.BEHIND: "the router's socket is full",
        RouterState.WAITING: "the output's queue was full, so every router lost batches; or llm-d asks for everything",
        RouterState.STALLED: "the output's queue was full, and the router's socket is full",
    },
    RouterState.STALLED: {
        RouterState.WAITING: "the router reads again, or the stream ends for ever and sends its last, empty state",
        RouterState.BEHIND: "the router subscribes to `kvbus:asks-replay`, so it gets no state",
    },
}
"""The allowed next states of each state of a router, each with the condition for the transition.

In addition, a router can change from every state but ``gone`` to ``idle`` (no subscription matches any more) and to
``gone`` (the connection ends).
"""


class Router:
    """A connected router, and its :class:`RouterState` and position on one stream.

    Args:
        peer: the router's connection.
        stream: slot of the stream.
        name: name of the owner of the router's CURVE key; empty if the key has no name.
    """

    def __init__(self, peer: Peer, stream: int = 0, name: str = "") -> None:
        self.peer = peer
        self.stream = stream
        self.name = name
        self.state = RouterState.IDLE
        """The router's state, which only :meth:`Routers.move` changes."""

        self.position: int | None = None
        """Position, in the stream's ring of recent batches, of the batch that the router gets next.

        None if the router needs no batch from the ring.
        """
        self.session: Session | None = None
        """The sender's session for the router, which sends the stream's state and then batches from the stream's
        ring of recent batches; None if there is no session.
        """

        # The router's state transfers: why and since when it waits for a state, how many states it got, and the
        # transfer that it receives now.
        self.reason = ""
        self.wanted_at = 0.0
        self.states_sent = 0
        self.state_sent_at: float | None = None
        self.group = 0
        """Number of the state transfer that the router receives. Routers that share a transfer have the same number."""
        self.in_slow_slot = False
        self.wants_again = False
        """Whether the router gets the state again as soon as it has the batches that are queued for it."""

        self.lost_at: float | None = None
        """The event loop's time since which the router lacks batches.

        None if it lacks no batches, or if a state has replaced them.
        """
        self.subscriptions = 0
        self.asks_replay = False
        """Whether the router requests replays itself, so that it wants no state from kvbus."""
        self.dropped_batches = 0
        self.dropped_events = 0
        self.dropped_at: float | None = None

    def matches(self, topic: bytes) -> bool:
        """Return whether a subscription of the router covers this topic."""
        return any(topic.startswith(prefix) for prefix in self.peer.topics)

    @property
    def host(self) -> str:
        """The router's address without the port; empty for a Unix socket."""
        return host_of(self.peer)

    def view(self, queued: int, behind: float, now: float) -> RouterView:
        """Return the router's status for operators.

        Args:
            queued: number of batches that wait for the router.
            behind: age of the oldest batch that the router lacks, in seconds.
            now: the event loop's time.
        """
        peer = self.peer
        topics, subscriptions = shown_topics(peer)
        return RouterView(
            self.stream,
            peer.address,
            peer.opened_at,
            topics,
            subscriptions,
            self.state.value,
            self.states_sent,
            None if self.state_sent_at is None else time.time() - now + self.state_sent_at,
            queued,
            peer.unread_bytes,
            behind,
            self.dropped_batches,
            self.dropped_events,
            name=self.name,
            dropped_at=None if self.dropped_at is None else time.time() - now + self.dropped_at,
        )


class Routers:
    """The routers of one stream, indexed by connection and by state.

    Args:
        output: the output's name, for logs.
        stats: counters of the output.
    """

    def __init__(self, output: str, stats: OutputStats) -> None:
        self._output = output
        self._stats = stats
        stats.router_states.update(dict.fromkeys(RouterState, 0))  # so that the metrics show every state from the start
        self._by_peer: dict[int, Router] = {}
        self._by_state: dict[RouterState, dict[int, Router]] = {state: {} for state in RouterState}

    def add(self, router: Router) -> None:
        """Add a router that has connected. It is in the state IDLE."""
        self._by_peer[router.peer.id] = self._by_state[RouterState.IDLE][router.peer.id] = router

    def __iter__(self) -> Iterator[Router]:
        return iter(self._by_peer.values())

    def of(self, peer: Peer) -> Router:
        """Return the router of a connection.

        Raises:
            KeyError: the connection has no router on this stream.
        """
        return self._by_peer[peer.id]

    def get(self, peer_id: int) -> Router | None:
        """Return the router of the connection with this id; None if the connection has no router on this stream."""
        return self._by_peer.get(peer_id)

    def are(self, *states: RouterState) -> list[Router]:
        """Return the routers that are in one of these states."""
        return [router for state in states for router in self._by_state[state].values()]

    def any(self, *states: RouterState) -> bool:
        """Return whether at least one router is in one of these states."""
        return any(self._by_state[state] for state in states)

    def move(self, router: Router, state: RouterState) -> None:
        """Change the state of a router, and log and count the transition.

        Raises:
            ValueError: :data:`TRANSITIONS` has no such transition.
        """
        before = router.state
        if state not in (RouterState.IDLE, RouterState.GONE) and state not in TRANSITIONS[before]:
            raise ValueError(f"a router that is {before} cannot become {state}")
        router.state = state
        del self._by_state[before][router.peer.id]
        if state is RouterState.GONE:
            del self._by_peer[router.peer.id]
        else:
            self._by_state[state][router.peer.id] = router
        self._stats.router_states[state] += 1
        if log.isEnabledFor(logging.DEBUG):
            say(logging.DEBUG, "output %s: router %s was %s and is %s", self._output, router, before, state)


def say(level: int, text: str, output: str, router: Router, *more: object) -> None:
    """Log an event of a router on an output.

    Args:
        level: the log level.
        text: the log line, with a ``%s`` for the output, for the router and for each further value.
        output: the output's name.
        router: the router. It is shown by its name, if it has one, and its address.
        more: further values for the log line.
    """
    peer, name = router.peer, router.name
    fields = {"output": output, "stream": router.stream, "peer": peer.address}
    if name:
        fields["router"] = name
    log.log(level, text, output, f"{name} ({peer.address})" if name else peer.address, *more, extra=fields)


def host_of(peer: Peer) -> str:
    """Return a peer's address without its port; empty for a Unix socket."""
    return peer.address.rpartition(":")[0]


def shown_topics(peer: Peer) -> tuple[list[str], int]:
    """Return the topics that a peer has subscribed to, as text for operators, and the number of these topics.

    The text has only the first :data:`TOPICS` topics.
    """
    return [_shown(topic) for topic in islice(peer.topics, TOPICS)], len(peer.topics)


def _shown(topic: bytes) -> str:
    text = topic[:TOPIC_BYTES].decode("utf-8", "backslashreplace")
    return f"{text}…" if len(topic) > TOPIC_BYTES else text
