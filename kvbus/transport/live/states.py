"""Schedule the sending of states, so that routers can share a state and slow routers do not delay other routers.

A state is a snapshot of the live blocks of a stream. While kvbus sends a state, it keeps a frozen copy of the index in
memory. So only a few states are sent at the same time, and each of them occupies a slot. A router that needs more than
:data:`SLOW_AFTER` seconds for its state counts as slow, and slow routers have separate slots. The streams of one
endpoint share the slots, and a router gets the state of only one stream at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final, Protocol

from kvbus.transport.live.router import Router, Routers, RouterState

PACE: Final = 0.02
"""Seconds between two checks for routers that wait for a state or receive a state slowly."""

GATHER: Final = 0.05
"""Seconds that a router waits before kvbus begins to send it the state of a stream.

In this time other routers can join to share the state, and further subscriptions of the router can arrive.
"""

MAX_STATES: Final = 2
"""Maximum number of states that are sent at the same time to fast routers.

The same number of states can be sent at the same time to slow routers.
"""

SLOW_AFTER: Final = 5.0
"""Seconds after which a router counts as slow, if it has not received all of the state that kvbus sends it."""


class Stream(Protocol):
    """The methods of a stream that the scheduler of states calls to send the stream's state to routers."""

    routers: Routers

    def request(self, routers: list[Router]) -> None:
        """Request one state from the relay for all of these routers.

        On return, each router that gets the state is in :attr:`RouterState.RECEIVING`.
        """

    def restart(self, router: Router) -> None:
        """Stop sending a router its state. The router then waits for a new state."""


class StateSlots:
    """The scheduler of states at one endpoint. It limits how many states are sent at the same time.

    Each state that is being sent occupies one of a limited number of slots. Waiting routers get the free slots.
    """

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        """The streams of the endpoint, by slot."""
        self._loop = asyncio.get_running_loop()
        self._slow_peers: set[int] = set()
        self._groups = 0
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None

    def want(self, router: Router) -> None:
        """Let a router wait for the state of its stream.

        kvbus sends the state as soon as fewer than the maximum number of states are being sent.
        """
        router.wanted_at = self._loop.time()
        self._schedule()

    def begin(self, routers: list[Router]) -> None:
        """Record that these routers begin to receive one state, which they share.

        The state counts towards the maximum number of states that are sent at the same time.
        """
        self._groups += 1
        for router in routers:
            router.group = self._groups
            router.in_slow_slot = router.peer.id in self._slow_peers
        if routers:
            self._schedule()

    def has_state(self, router: Router) -> None:
        """Record that a router has received all of its state, so that it no longer counts as slow."""
        self._slow_peers.discard(router.peer.id)

    def left(self, router: Router) -> None:
        """Forget whether a router was slow, because its connection has ended."""
        self._slow_peers.discard(router.peer.id)

    def look_soon(self) -> None:
        """Check in the next iteration of the event loop whether kvbus can begin to send a state to a waiting router."""
        if self._soon is None and self._timer is not None:
            self._soon = self._loop.call_soon(self._give_places)

    def close(self) -> None:
        """Stop the scheduler, so that no further router begins to receive a state."""
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self._timer = self._soon = None

    @property
    def under_way(self) -> dict[int, list[Router]]:
        """Routers that are receiving a state, by the number of the state transfer that they share."""
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
        """Count as slow the routers that have been receiving a state for more than :data:`SLOW_AFTER` seconds.

        At most :data:`MAX_STATES` states are sent to slow routers at the same time. If routers of one more state become
        slow, kvbus stops sending this state, and the routers wait for a new one.
        """
        groups = list(self.under_way.values())
        slow = sum(routers[0].in_slow_slot for routers in groups)
        for routers in groups:
            if routers[0].in_slow_slot or now - (routers[0].state_sent_at or now) <= SLOW_AFTER:
                continue
            slow += 1
            for router in routers:
                self._slow_peers.add(router.peer.id)
                router.in_slow_slot = True
                if slow > MAX_STATES:
                    self.streams[router.stream].restart(router)

    def _give_places(self) -> None:
        self._soon = None
        now = self._loop.time()
        waiting = [stream for stream in self.streams.values() if stream.routers.any(RouterState.WAITING)]
        waiting.sort(key=_waits_since)
        groups = self.under_way if waiting else {}
        for slow in (False, True):
            for stream in waiting:
                if sum(routers[0].in_slow_slot == slow for routers in groups.values()) >= MAX_STATES:
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
