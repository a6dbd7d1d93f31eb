"""The routers of a stream, as people see them, and as a replay request finds them.

No view of keys with rights is meant; that is in :mod:`kvbus.core.outputs.view`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Final

from msgspec import structs

from kvbus.core.stats import RouterView
from kvbus.transport.live.ring import Ring
from kvbus.transport.live.router import Router, RouterState
from kvbus.transport.zmtp.peer import Peer

RECENT: Final = 60.0
"""Seconds in which a state can answer a replay request of the router that got it."""

LEFT: Final = 100
"""Routers that have left and are still shown."""

TOPICS: Final = 8
"""Topics shown of a router."""

TOPIC_BYTES: Final = 64
"""Bytes shown of a topic: a router may subscribe to long ones, and those that have left are kept."""


class Views:
    """What can be said of a stream's routers.

    Args:
        stream: the stream's slot.
        routers: all connected ones, by the id of their peer.
        behind: those that have not got everything.
        ring: batches that any of them lacks.
        left: keeps the views of routers that have left; None: a list of its own.
    """

    def __init__(
        self,
        stream: int,
        routers: Mapping[int, Router],
        behind: Mapping[int, Router],
        ring: Ring,
        left: deque[RouterView] | None = None,
    ) -> None:
        self.stream = stream
        self._routers = routers
        self._behind = behind
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self.left = deque(maxlen=LEFT) if left is None else left

    def leave(self, router: Router, reason: str) -> None:
        """Keep the view of a router that leaves."""
        self.left.append(structs.replace(self._view(router), left=reason, left_at=time.time()))

    def claim_state(self, requester: Peer) -> bool:
        """Return whether the state of a subscription answers the first replay request of this connection.

        It does if exactly one router is subscribed from the requester's address with its CURVE key, that router has
        just got the state or will get it, and no other request came from there since that state was due. A second
        request means that the router has lost the state again.
        """
        host = _host(requester)
        there = [
            router
            for router in self._routers.values()
            if router.state is not RouterState.IDLE and router.peer.key == requester.key and _host(router.peer) == host
        ]
        claimed = bool(host) and len(there) == 1 and not there[0].has_asked and self._has_state(there[0])
        for router in there:
            router.has_asked = True
        return claimed

    def _has_state(self, router: Router) -> bool:
        """Whether a subscription has just brought the state to a router, or will bring it."""
        if router.asks:
            return False
        if router.state is not RouterState.LIVE:
            return True
        return router.state_sent_at is not None and router.state_sent_at > self._loop.time() - RECENT

    @property
    def busy(self) -> int:
        """Routers to which something is on its way."""
        return sum(
            1
            for router in self._routers.values()
            if router.state is not RouterState.STALLED and (router.peer.waiting_bytes or router.peer.id in self._behind)
        )

    @property
    def queue_max(self) -> int:
        """The most batches that wait for one router."""
        return max((self._ring.end - router.position for router in self._behind.values()), default=0)

    @property
    def behind_seconds(self) -> float:
        """How far behind the router is that is furthest behind."""
        return max(map(self._behind_seconds, self._routers.values()), default=0.0)

    @property
    def routers(self) -> list[RouterView]:
        """The connected routers, and those that left last."""
        return [*self.connected, *self.left]

    @property
    def connected(self) -> list[RouterView]:
        """The connected routers."""
        return [*map(self._view, self._routers.values())]

    def of(self, peer: Peer) -> RouterView | None:
        """The view of one connected router."""
        router = self._routers.get(peer.id)
        return None if router is None else self._view(router)

    def _behind_seconds(self, router: Router) -> float:
        since = router.lost_at
        if since is None and router.peer.id in self._behind:
            since = self._ring.published(router.position)
        return 0.0 if since is None else self._loop.time() - since

    def _view(self, router: Router) -> RouterView:
        peer = router.peer
        wall = time.time() - self._loop.time()
        topics, subscriptions = shown_topics(peer)
        return RouterView(
            self.stream,
            peer.address,
            peer.opened_at,
            topics,
            subscriptions,
            router.state.value,
            router.states_sent,
            None if router.state_sent_at is None else wall + router.state_sent_at,
            self._ring.end - router.position if peer.id in self._behind else 0,
            peer.unread_bytes,
            self._behind_seconds(router),
            router.dropped_batches,
            router.dropped_events,
            name=router.name,
        )


def _host(peer: Peer) -> str:
    """Return a peer's address without its port; empty for a Unix socket."""
    return peer.address.rpartition(":")[0]


def shown_topics(peer: Peer) -> tuple[list[str], int]:
    """The first topics that a router has subscribed to, and how many there are."""
    return [_shown(topic) for topic in islice(peer.topics, TOPICS)], len(peer.topics)


def _shown(topic: bytes) -> str:
    text = topic[:TOPIC_BYTES].decode("utf-8", "backslashreplace")
    return f"{text}…" if len(topic) > TOPIC_BYTES else text
