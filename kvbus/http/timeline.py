"""The newest transitions of sources and routers, each with its cause, numbered and limited."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import msgspec

from kvbus.core.relay import Relay
from kvbus.core.stats import OutputStats, RouterView
from kvbus.telemetry.readings import Driver, read_routers

KEPT: Final = 1000
"""Number of transitions that are kept."""


class Transition(msgspec.Struct, frozen=True):
    """A change of a source or a router.

    Attributes:
        number: counts from 1 in each process.
        at: time of day, in seconds.
        kind: state, epoch, repaired, finding or router.
        name: the source's name, or the name of the router's output.
        after: the new state, or a word for it; it selects the colour.
        text: what happened and why, in words.
    """

    number: int
    at: float
    kind: str
    name: str
    after: str
    text: str


class Timeline:
    """The newest transitions. Their numbers have no gaps, so a reader knows how many it has missed."""

    def __init__(self) -> None:
        self.process: Final = secrets.token_hex(4)
        """Identifies the process whose numbers these are. Each process numbers from 1."""
        self.last = 0
        """The newest number; 0 for none."""
        self._kept: deque[Transition] = deque(maxlen=KEPT)
        self._routers: dict[tuple[str, int, str, float], RouterView] = {}
        self._counted: list[tuple[int, int]] = []

    def add(self, kind: str, name: str, after: str, text: str) -> None:
        """Add a transition that has just been observed."""
        self.last += 1
        self._kept.append(Transition(self.last, time.time(), kind, name, after, text))

    @property
    def first(self) -> int:
        """The oldest number that is kept; :attr:`last` plus 1 while none is kept."""
        return self.last - len(self._kept) + 1

    def since(self, number: int) -> Iterator[Transition]:
        """Return the transitions after a number, oldest first."""
        return islice(self._kept, max(0, number + 1 - self.first), None)

    def look_at_routers(self, relay: Relay, drivers: Sequence[Driver], stats: Sequence[OutputStats]) -> None:
        """Add the routers that have connected or disconnected. Routers are only read if a counter has changed."""
        counted = [(each.routers, sum(each.router_disconnects.values())) for each in stats]
        if counted == self._counted:
            return
        self._counted = counted
        before, self._routers = self._routers, {}
        for each in read_routers(relay, drivers, time.time()):
            key, output, router = each.key, each.output, each.router
            self._routers[key] = router
            known = before.get(key)
            if known is None:
                self.add("router", output, "connected", f"router {router.name or router.peer} connected")
            if router.left is not None and (known is None or known.left is None):
                why = "" if router.left == "left" else f" ({router.left})"
                lacks = f"; {router.dropped_batches:,} batches did not reach it" if router.dropped_batches else ""
                self.add("router", output, "left", f"router {router.name or router.peer} disconnected{why}{lacks}")
