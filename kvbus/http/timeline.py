"""What has happened lately: transitions of sources and routers, each with its cause, numbered and bounded."""

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
"""Transitions."""


class Transition(msgspec.Struct, frozen=True):
    """One thing that happened.

    Attributes:
        number: counts from 1 in each process.
        at: time of day, in seconds.
        kind: state, epoch, repaired, partial, remark or router.
        name: the source's, or the router's output.
        after: the state that it led to, or a word for it; it chooses the colour.
        text: what happened and why, in words.
    """

    number: int
    at: float
    kind: str
    name: str
    after: str
    text: str


class Timeline:
    """The newest transitions. Their numbers are dense, so a reader knows what it has missed."""

    def __init__(self) -> None:
        self.process: Final = secrets.token_hex(4)
        """Names the numbering: another process has another one."""
        self.last = 0
        """The newest number; 0 for none."""
        self._kept: deque[Transition] = deque(maxlen=KEPT)
        self._routers: dict[tuple[str, int, str, float], RouterView] = {}
        self._counted: list[tuple[int, int]] = []

    def add(self, kind: str, name: str, after: str, text: str) -> None:
        """Take in a transition that has just been seen."""
        self.last += 1
        self._kept.append(Transition(self.last, time.time(), kind, name, after, text))

    @property
    def first(self) -> int:
        """The oldest number that is kept; one past :attr:`last` while there is none."""
        return self.last - len(self._kept) + 1

    def since(self, number: int) -> Iterator[Transition]:
        """Those behind a number, oldest first."""
        return islice(self._kept, max(0, number + 1 - self.first), None)

    def look_at_routers(self, relay: Relay, drivers: Sequence[Driver], stats: Sequence[OutputStats]) -> None:
        """Add the routers that have come and gone. While no counter has moved, no router is looked at."""
        counted = [(each.routers, sum(each.router_disconnects.values())) for each in stats]
        if counted == self._counted:
            return
        self._counted = counted
        before, self._routers = self._routers, {}
        for each in read_routers(relay, drivers):
            key, output, router = each.key, each.output, each.router
            self._routers[key] = router
            known = before.get(key)
            if known is None:
                self.add("router", output, "connected", f"router {router.name or router.peer} connected")
            if router.left is not None and (known is None or known.left is None):
                why = "" if router.left == "left" else f" ({router.left})"
                lacks = f"; {router.dropped_batches:,} batches did not reach it" if router.dropped_batches else ""
                self.add("router", output, "left", f"router {router.name or router.peer} disconnected{why}{lacks}")
