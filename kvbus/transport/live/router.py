"""One connected router, as a stream sees it: one object with one state, and the table of its transitions."""

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
"""Topics shown of a router."""

TOPIC_BYTES: Final = 64
"""Bytes shown of a topic. A router may subscribe to long topics, and kvbus keeps those of routers that have left."""


class RouterState(StrEnum):
    """Where a router stands."""

    IDLE = "idle"
    WAITING = "waiting"
    RECEIVING = "receiving"
    BEHIND = "behind"
    LIVE = "live"
    STALLED = "stalled"
    GONE = "gone"


MEANING: Final = {
    RouterState.IDLE: "no subscription of the router matches the topic of the stream",
    RouterState.WAITING: "the router gets the state next; batches that are published meanwhile are part of that state",
    RouterState.RECEIVING: "the state is on its way; batches that are published meanwhile follow it",
    RouterState.BEHIND: "the router has the state, and gets batches of the ring as fast as it reads",
    RouterState.LIVE: "the router has every batch, and gets each new one at once",
    RouterState.STALLED: "the router lost batches and reads nothing; it gets the state once it reads again",
    RouterState.GONE: "the connection has ended",
}

_LOST: Final = "batches for the router were dropped"

TRANSITIONS: Final[dict[RouterState, dict[RouterState, str]]] = {
    RouterState.IDLE: {
        RouterState.WAITING: "a subscription matches, and the stream sends the state",
        RouterState.LIVE: "a subscription matches, and the router needs no state",
    },
    RouterState.WAITING: {
        RouterState.RECEIVING: "the state begins",
        RouterState.BEHIND: "the router says that it asks for replays by itself",
    },
    RouterState.RECEIVING: {
        RouterState.BEHIND: "the router was sent all of the state",
        RouterState.WAITING: f"{_LOST}, or others need its place",
        RouterState.STALLED: f"{_LOST}, or it makes no progress, and its socket is full",
    },
    RouterState.BEHIND: {
        RouterState.LIVE: "the router was sent every batch",
        RouterState.WAITING: _LOST,
        RouterState.STALLED: f"{_LOST}, and its socket is full",
    },
    RouterState.LIVE: {
        RouterState.BEHIND: "its socket is full",
        RouterState.WAITING: "the queue of the output was full, which is a loss of every router",
        RouterState.STALLED: "the same, and its socket is full",
    },
    RouterState.STALLED: {
        RouterState.WAITING: "the router reads again, or its stream ends for good",
        RouterState.BEHIND: "the router says that it asks for replays by itself",
    },
}
"""By state: the states that can follow, and when. Every state but ``gone`` can also become ``idle`` (no subscription
matches any more) or ``gone`` (the connection ends)."""


class Router:
    """A peer with its place in a stream.

    Args:
        peer: the connection.
        stream: the stream's slot.
        name: the name of its key's owner; empty where it has none.
    """

    def __init__(self, peer: Peer, stream: int = 0, name: str = "") -> None:
        self.peer = peer
        self.stream = stream
        self.name = name
        self.state = RouterState.IDLE
        """:meth:`Routers.move` alone changes it."""

        self.position: int | None = None
        """The next batch of the ring that the router gets; None while it needs none of the ring."""
        self.session: Session | None = None
        """What the sender sends it: the state, then batches of the ring."""

        # The state: why the router gets one, how often it got one, and the one under way.
        self.reason = ""
        self.wanted_at = 0.0
        self.states_sent = 0
        self.state_sent_at: float | None = None
        self.group = 0
        """The number of the state that it receives. Routers that began together share one."""
        self.in_slow_place = False
        self.has_asked = False
        """A replay was requested from its address since it last began to wait for a state."""

        self.lost_at: float | None = None
        """The loop's time since which it lacks batches; None once it has the state that makes up for them."""
        self.subscriptions = 0
        self.asks_replay = False
        """It asks for replays by itself, and wants no state."""
        self.dropped_batches = 0
        self.dropped_events = 0

    def matches(self, topic: bytes) -> bool:
        """Return whether a subscription of the router covers a topic."""
        return any(topic.startswith(prefix) for prefix in self.peer.topics)

    @property
    def host(self) -> str:
        """The address without the port; empty for a Unix socket."""
        return host_of(self.peer)

    def view(self, queued: int, behind: float, now: float) -> RouterView:
        """Show the router to people.

        Args:
            queued: batches that wait for it.
            behind: age of the oldest batch that it lacks, in seconds.
            now: the loop's time.
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
        )


class Routers:
    """The routers of a stream, with an index by state that :meth:`move` keeps.

    Args:
        output: the output's name, for logs.
        stats: counters of the output.
    """

    def __init__(self, output: str, stats: OutputStats) -> None:
        self._output = output
        self._stats = stats
        stats.router_states.update(dict.fromkeys(RouterState, 0))  # each is shown from the start
        self._by_peer: dict[int, Router] = {}
        self._by_state: dict[RouterState, dict[int, Router]] = {state: {} for state in RouterState}

    def add(self, router: Router) -> None:
        """Take in a router, which is idle."""
        self._by_peer[router.peer.id] = self._by_state[RouterState.IDLE][router.peer.id] = router

    def __iter__(self) -> Iterator[Router]:
        return iter(self._by_peer.values())

    def of(self, peer: Peer) -> Router:
        """Return the router of a connection.

        Raises:
            KeyError: it is not connected to this stream.
        """
        return self._by_peer[peer.id]

    def get(self, peer_id: int) -> Router | None:
        """Return the router of a connection, None if there is none."""
        return self._by_peer.get(peer_id)

    def are(self, *states: RouterState) -> list[Router]:
        """Return the routers in these states."""
        return [router for state in states for router in self._by_state[state].values()]

    def any(self, *states: RouterState) -> bool:
        """Return whether a router is in one of these states."""
        return any(self._by_state[state] for state in states)

    def move(self, router: Router, state: RouterState) -> None:
        """Bring a router into another state, log that and count it.

        Raises:
            ValueError: the table has no such transition.
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
    """Log what happens to a router; the text has places for the output, the router and further values."""
    peer, name = router.peer, router.name
    fields = {"output": output, "stream": router.stream, "peer": peer.address}
    if name:
        fields["router"] = name
    log.log(level, text, output, f"{name} ({peer.address})" if name else peer.address, *more, extra=fields)


def host_of(peer: Peer) -> str:
    """Return a peer's address without its port; empty for a Unix socket."""
    return peer.address.rpartition(":")[0]


def shown_topics(peer: Peer) -> tuple[list[str], int]:
    """Return the first topics that a peer has subscribed to, and how many there are."""
    return [_shown(topic) for topic in islice(peer.topics, TOPICS)], len(peer.topics)


def _shown(topic: bytes) -> str:
    text = topic[:TOPIC_BYTES].decode("utf-8", "backslashreplace")
    return f"{text}…" if len(topic) > TOPIC_BYTES else text
