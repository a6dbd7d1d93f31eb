"""Who gets the state, and when: routers that come together share one, and slow ones hold up nobody.

A state that is being sent keeps the index of that moment alive, so few are sent at a time. Each has a group: all
routers that waited when it began. Routers that are not done after a while belong to the slow ones, which have places of
their own. A router that takes nothing at all loses its place, and waits for a new one once it reads again.
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
        self.routers = {router.peer.id: router for router in routers}
        self.since = since


class Transfers:
    """The routers of one stream that wait for the state or receive it.

    Args:
        request: asks for the state of the stream, for the routers with these ids; :meth:`begin` follows at once.
        abandon: called with a router that has lost its place.
    """

    def __init__(self, request: Callable[[tuple[int, ...]], None], abandon: Callable[[Router], None]) -> None:
        self._request = request
        self._abandon = abandon
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, Router] = {}
        self._fast: list[_Group] = []
        self._slow: list[_Group] = []
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting) + sum(len(group.routers) for group in (*self._fast, *self._slow))

    def want(self, router: Router) -> None:
        """Give a router the state as soon as it is its turn."""
        self._waiting[router.peer.id] = router
        router.wanted_at = self._loop.time()
        self._schedule()

    def begin(self, routers: list[Router]) -> None:
        """A state is on its way to these routers."""
        now = self._loop.time()
        for router in routers:
            self._waiting.pop(router.peer.id, None)
            router.acknowledged, router.progress_at = router.peer.acknowledged_bytes, now
        if routers:
            (self._slow if routers[0].slow else self._fast).append(_Group(routers, now))
            self._schedule()

    def forget(self, router: Router) -> None:
        """Take a router out: it has its state, or it is gone."""
        self._waiting.pop(router.peer.id, None)
        for groups in (self._fast, self._slow):
            for group in groups:
                group.routers.pop(router.peer.id, None)

    def close(self) -> None:
        """Forget everybody."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
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
            groups[:] = [group for group in groups if group.routers]
            for group in groups:
                for router in list(group.routers.values()):
                    self._watch(group, router, now)
        for group in [group for group in self._fast if now - group.since > SLOW_AFTER]:
            self._fast.remove(group)
            self._slow_down(group)
        for groups, slow in ((self._fast, False), (self._slow, True)):
            ready = tuple(
                name
                for name, router in self._waiting.items()
                if router.slow == slow and now - router.wanted_at >= GATHER
            )
            if ready and len(groups) < GROUPS:
                self._request(ready)
        if len(self):
            self._schedule()

    def _watch(self, group: _Group, router: Router, now: float) -> None:
        acknowledged = router.peer.acknowledged_bytes
        if acknowledged != router.acknowledged:
            router.acknowledged, router.progress_at = acknowledged, now
        elif now - router.progress_at > STALLED_AFTER:
            del group.routers[router.peer.id]
            self._abandon(router)

    def _slow_down(self, group: _Group) -> None:
        for router in group.routers.values():
            router.slow = True
        if len(self._slow) < GROUPS:
            self._slow.append(group)
            return
        for router in group.routers.values():
            self._abandon(router)
