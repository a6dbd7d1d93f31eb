"""The account of batches that routers of a stream did not get: each is counted, and who lacks some is named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvbus.core.stats import OutputStats
from kvbus.transport.live.ring import Entry, Ring
from kvbus.transport.live.router import Router, say


class Losses:
    """What a stream drops, and for whom.

    Args:
        output: the output's name, for logs.
        stats: counters of the output.
        ring: batches kept for routers that are behind.
        behind: these routers, by the id of their peer.
        restart: called with a router that is to get the state again; None on streams that send none.
    """

    def __init__(
        self,
        output: str,
        stats: OutputStats,
        ring: Ring,
        behind: Mapping[int, Router],
        restart: Callable[[Router], None] | None,
    ) -> None:
        self._output = output
        self._stats = stats
        self._ring = ring
        self._behind = behind
        self._restart = restart
        ring.give_up = self._give_up

    def queue_full(self, events: int) -> None:
        """Count a batch that nobody gets."""
        self._stats.dropped_batches["queue_full"] += 1
        self._stats.dropped_events["queue_full"] += events

    def slow_router(self, router: Router, batches: int, events: int) -> None:
        """Count batches that one router does not get."""
        router.dropped_batches += batches
        router.dropped_events += events
        self._stats.dropped_batches["slow_router"] += batches
        self._stats.dropped_events["slow_router"] += events

    def make_room(self) -> None:
        """Let go of what is beyond the ring's limits."""
        while (dropped := self._ring.overflow()) is not None:
            self._gone(dropped)

    def _give_up(self) -> None:
        """Let go of the oldest entry, because all streams together keep too much."""
        self._gone(self._ring.pop())

    def _gone(self, dropped: Entry) -> None:
        for router in [router for router in self._behind.values() if router.position < self._ring.first]:
            self._lose(router, dropped)

    def _lose(self, router: Router, entry: Entry) -> None:
        """The ring has let go of a batch that a router did not get."""
        first = not router.dropped_batches
        self.slow_router(router, 1, entry.events)
        router.position = self._ring.first
        if self._restart is not None and not router.asks:
            say(logging.WARNING, "output %s: router %s is too slow; it gets the state again", self._output, router)
            router.lost_at = entry.at
            self._restart(router)
        elif first:
            text = "output %s: router %s is too slow and loses batches; it has to ask the replay"
            say(logging.WARNING, text, self._output, router)
