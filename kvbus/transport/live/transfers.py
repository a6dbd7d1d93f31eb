"""When routers get the state that are to get it: those that come together share one, and slow ones hold up nobody.

A state that is being sent keeps the index of that moment alive, so few are sent at a time. Each has a group: all
routers of its stream that were ready when it began, slow ones apart. Routers that are not done after a while belong to
the slow ones, which have places of their own. A router that takes nothing at all loses its place, and waits for a new
one once it reads again.
Streams that share an endpoint share the places too, and a router gets one state of theirs at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvbus.transport.live.router import Router

PACE: Final = 0.02
"""Seconds between two looks."""

GATHER: Final = 0.05
"""Seconds that a router waits for others to share a state with, and for the rest of its own subscriptions."""

GROUPS: Final = 2
"""States under way at once; and as many of the slow routers."""

SLOW_AFTER: Final = 5.0
"""Seconds after which the rest of a group counts as slow."""

STALLED_AFTER: Final = 10.0
"""Seconds in which a router's kernel acknowledges nothing, until it loses its place."""


class _Group:
    def __init__(self, routers: list[Router], since: float) -> None:
        self.routers = dict.fromkeys(routers)
        self.since = since


class Transfers:
    """The routers of a stream, or of several, that wait for the state or receive it.

    Args:
        request: asks for the state of a stream, for these routers of it; :meth:`begin` follows at once.
        abandon: called with a router that has lost its place.
    """

    def __init__(self, request: Callable[[list[Router]], None], abandon: Callable[[Router], None]) -> None:
        self._request = request
        self._abandon = abandon
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, dict[Router, None]] = {}
        """By stream."""
        self._fast: list[_Group] = []
        self._slow: list[_Group] = []
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None

    def __len__(self) -> int:
        under_way = sum(len(group.routers) for group in (*self._fast, *self._slow))
        return under_way + sum(map(len, self._waiting.values()))

    def want(self, router: Router) -> None:
        """Give a router the state as soon as it is its turn."""
        self._waiting.setdefault(router.stream, {})[router] = None
        router.wanted_at = self._loop.time()
        self._schedule()

    def begin(self, routers: list[Router]) -> None:
        """A state is on its way to these routers."""
        now = self._loop.time()
        for router in routers:
            self._wait_no_more(router)
            router.acknowledged, router.progress_at = router.peer.acknowledged_bytes, now
        if routers:
            (self._slow if routers[0].slow else self._fast).append(_Group(routers, now))
            self._schedule()

    def forget(self, router: Router) -> None:
        """Take a router out: it has its state, or it is gone."""
        self._wait_no_more(router)
        for groups in (self._fast, self._slow):
            for group in groups:
                if router in group.routers:
                    del group.routers[router]
                    if self._waiting and self._soon is None:
                        self._soon = self._loop.call_soon(self._give_places)

    def _wait_no_more(self, router: Router) -> None:
        waiting = self._waiting.get(router.stream)
        if waiting is not None:
            waiting.pop(router, None)
            if not waiting:
                del self._waiting[router.stream]

    def look_again(self) -> None:
        """A router can be written to again."""
        if self._waiting:
            self._give_places()

    def close(self) -> None:
        """Forget everybody."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._waiting.clear()
        self._fast.clear()
        self._slow.clear()

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(PACE, self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for groups in (self._fast, self._slow):
            for group in groups:
                for router in list(group.routers):
                    self._watch(group, router, now)
        for group in [group for group in self._fast if now - group.since > SLOW_AFTER]:
            self._fast.remove(group)
            self._slow_down(group)
        self._give_places()
        if len(self):
            self._schedule()

    def _give_places(self) -> None:
        self._soon = None
        now = self._loop.time()
        for groups, slow in ((self._fast, False), (self._slow, True)):
            groups[:] = [group for group in groups if group.routers]
            for waiting in list(self._waiting.values()):
                if len(groups) >= GROUPS:
                    break
                ready = [router for router in waiting if router.slow == slow and self._is_ready(router, now)]
                if ready:
                    self._request(ready)

    def _is_ready(self, router: Router, now: float) -> bool:
        """Whether it may get a state now: a router that is not read from, or gets another stream's, waits."""
        return now - router.wanted_at >= GATHER and router.peer.writable and router.peer.id not in self._receiving

    @property
    def _receiving(self) -> set[int]:
        """The peers that a state is on its way to."""
        return {router.peer.id for group in (*self._fast, *self._slow) for router in group.routers}

    def _watch(self, group: _Group, router: Router, now: float) -> None:
        acknowledged = router.peer.acknowledged_bytes
        if acknowledged != router.acknowledged:
            router.acknowledged, router.progress_at = acknowledged, now
        elif now - router.progress_at > STALLED_AFTER:
            del group.routers[router]
            self._abandon(router)

    def _slow_down(self, group: _Group) -> None:
        for router in group.routers:
            router.slow = True
            for waiting in self._waiting.values():
                for other in waiting:
                    other.slow = other.slow or other.peer is router.peer
        if len(self._slow) < GROUPS:
            self._slow.append(group)
            return
        for router in group.routers:
            self._abandon(router)
