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
        self.missed: dict[int, list[Entry]] = {}
        """What was published since a router subscribed, by the id of its peer."""

    def keep(self, burst: Sequence[Entry]) -> None:
        """Keep a burst for each of them; one that has missed too much finds a gap, and asks."""
        for missed in self.missed.values():
            missed.extend(burst)
            if len(missed) > MOST:
                missed.clear()
