"""The moment between a router's subscription and :data:`~kvbus.core.wire.frames.ASKS_REPLAY`, if that comes at all.

A router that asks for replays by itself says so behind its subscription. Until then it waits for the state, as others
do, and what is published meanwhile may be needed: it gets that in place of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvbus.transport.live.ring import Entry

MOST: Final = 1000
"""Batches kept for a router."""


class Undecided:
    """Keeps batches for these routers."""

    def __init__(self) -> None:
        self._missed: dict[int, list[Entry]] = {}
        """What was published since a router subscribed, by the id of its peer."""

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._missed)

    def begin(self, router: int) -> None:
        """A router has subscribed, and has not said anything yet."""
        self._missed[router] = []

    def keep(self, burst: Sequence[Entry]) -> None:
        """Keep a burst for each of them; one that has missed too much finds a gap, and asks."""
        for missed in self._missed.values():
            missed.extend(burst)
            if len(missed) > MOST:
                missed.clear()

    def end(self, router: int) -> list[Entry]:
        """It is decided, if it was not: return what the router has missed until now."""
        return self._missed.pop(router, [])
