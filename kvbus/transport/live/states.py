"""When routers get the state: routers that come together share one, and slow routers hold up nobody.

A state that is being sent keeps the index of that moment alive, so few states are sent at a time: the places. Routers
that need more than :data:`SLOW_AFTER` count as slow, and slow routers have places of their own. Streams that share an
endpoint share the places too, and a router gets one of their states at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final, Protocol

from kvbus.transport.live.router import Router, Routers, RouterState

PACE: Final = 0.02
"""Seconds between two looks."""

GATHER: Final = 0.05
"""Seconds that a router waits for others to share a state with, and for the rest of its own subscriptions."""

PLACES: Final = 2
"""States under way at once, and as many of slow routers."""

SLOW_AFTER: Final = 5.0
"""Seconds after which a router that has not got all of the state counts as slow."""


class Stream(Protocol):
    """A stream that sends its state."""

    routers: Routers

    def request(self, routers: list[Router]) -> None:
        """Ask for the state, for these routers. Those that get it are receiving it afterwards."""

    def restart(self, router: Router) -> None:
        """Take the place of a router away: it waits for another state."""


class StatePlaces:
    """Gives places to routers that wait for a state."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        """By slot."""
        self._loop = asyncio.get_running_loop()
        self._slow_peers: set[int] = set()
        self._groups = 0
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None

    def want(self, router: Router) -> None:
        """Give a router, which waits, the state as soon as there is a place."""
        router.wanted_at = self._loop.time()
        self._schedule()

    def begin(self, routers: list[Router]) -> None:
        """Take note that routers begin to receive one state together."""
        self._groups += 1
        for router in routers:
            router.group = self._groups
            router.in_slow_place = router.peer.id in self._slow_peers
        if routers:
            self._schedule()

    def has_state(self, router: Router) -> None:
        """Take note that a router has got all of the state: it is not slow."""
        self._slow_peers.discard(router.peer.id)

    def left(self, router: Router) -> None:
        """Forget a router whose connection has ended."""
        self._slow_peers.discard(router.peer.id)

    def look_soon(self) -> None:
        """Look for waiting routers at once: a place may be free."""
        if self._soon is None and self._timer is not None:
            self._soon = self._loop.call_soon(self._give_places)

    def close(self) -> None:
        """Give no places any more."""
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self._timer = self._soon = None

    @property
    def under_way(self) -> dict[int, list[Router]]:
        """The routers that receive a state, by the number of that state."""
        groups: dict[int, list[Router]] = {}
        for router in self._in(RouterState.RECEIVING):
            groups.setdefault(router.group, []).append(router)
        return groups

    def _in(self, state: RouterState) -> Iterator[Router]:
        return (router for stream in self.streams.values() for router in stream.routers.are(state))

    def _look(self) -> None:
        self._timer = None
        self._find_slow(self._loop.time())
        self._give_places()
        if any(each.routers.any(RouterState.WAITING, RouterState.RECEIVING) for each in self.streams.values()):
            self._schedule()

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(PACE, self._look)

    def _find_slow(self, now: float) -> None:
        """Move states that take long to the places of slow routers, or end them where these are taken."""
        groups = list(self.under_way.values())
        slow = sum(routers[0].in_slow_place for routers in groups)
        for routers in groups:
            if routers[0].in_slow_place or now - (routers[0].state_sent_at or now) <= SLOW_AFTER:
                continue
            slow += 1
            for router in routers:
                self._slow_peers.add(router.peer.id)
                router.in_slow_place = True
                if slow > PLACES:
                    self.streams[router.stream].restart(router)

    def _give_places(self) -> None:
        self._soon = None
        now = self._loop.time()
        waiting = [stream for stream in self.streams.values() if stream.routers.any(RouterState.WAITING)]
        waiting.sort(key=_waits_since)
        groups = self.under_way if waiting else {}
        for slow in (False, True):
            for stream in waiting:
                if sum(routers[0].in_slow_place == slow for routers in groups.values()) >= PLACES:
                    break
                receiving = {router.peer.id for routers in groups.values() for router in routers}
                ready = [
                    router
                    for router in stream.routers.are(RouterState.WAITING)
                    if (router.peer.id in self._slow_peers) == slow
                    and router.peer.id not in receiving
                    and router.peer.writable
                    and now - router.wanted_at >= GATHER
                ]
                if ready:
                    stream.request(ready)
                    groups = self.under_way


def _waits_since(stream: Stream) -> float:
    return min((router.wanted_at for router in stream.routers.are(RouterState.WAITING)), default=float("inf"))
