"""The timeline: the newest changes of sources and routers, each with a number and its cause."""

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

MAX_CHANGES: Final = 1000
"""Maximum number of changes of sources and routers that the timeline keeps."""


class Transition(msgspec.Struct, frozen=True):
    """A change of a source or a router, as the status page shows it.

    Attributes:
        number: the number of the change. Each process counts from 1.
        at: the time of day, in seconds.
        kind: the kind of the change: state, epoch, repaired, finding or router.
        name: the source's name, or the name of the router's output.
        after: the new state. For a change without a state it is a word such as ``connected``. It selects the colour of
            the change on the page.
        text: a sentence about what has happened and why.
    """

    number: int
    at: float
    kind: str
    name: str
    after: str
    text: str


class Timeline:
    """The newest changes of the states of sources and routers.

    Their numbers have no gaps, so a client can count the changes that it has missed.
    """

    def __init__(self) -> None:
        self.process: Final = secrets.token_hex(4)
        """A random identifier of this process.

        Each process numbers its changes from 1. The identifier shows a client which process has numbered a change.
        """
        self.last = 0
        """The number of the newest change of the state of a source or router; 0 before the first change."""
        self._kept: deque[Transition] = deque(maxlen=MAX_CHANGES)
        self._routers: dict[tuple[str, int, str, float], RouterView] = {}
        self._counted: list[tuple[int, int]] = []

    def add(self, kind: str, name: str, after: str, text: str) -> None:
        """Add a change that has just been observed. See :class:`Transition` for the arguments."""
        self.last += 1
        self._kept.append(Transition(self.last, time.time(), kind, name, after, text))

    @property
    def first(self) -> int:
        """The number of the oldest change that is kept. If none is kept, it is :attr:`last` plus 1."""
        return self.last - len(self._kept) + 1

    def since(self, number: int) -> Iterator[Transition]:
        """Return the kept changes whose number is higher than ``number``, oldest first."""
        return islice(self._kept, max(0, number + 1 - self.first), None)

    def look_at_routers(self, relay: Relay, drivers: Sequence[Driver], stats: Sequence[OutputStats]) -> None:
        """Add a change for each router that has connected or disconnected since the last call.

        If no output has counted a new connection or disconnection, the routers are not read, because that takes longer.
        """
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
