"""The limit for the bytes that wait in kvbus's memory for all routers together.

A router that reads slowly has a full socket, so the bytes that kvbus writes for it wait in kvbus. Above the limit,
kvbus writes only to routers for which no byte waits. The other routers wait for their states and batches, but lose
nothing because of the limit.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Final, Protocol
from weakref import WeakSet

LOOK_SECONDS: Final = 0.05
"""Minimum seconds between two measurements of the waiting bytes of all peers."""


class Writable(Protocol):
    """The part of a peer that :class:`Unsent` needs."""

    @property
    def waiting_bytes(self) -> int:
        """Number of bytes for the peer that wait in kvbus."""


class Unsent:
    """The waiting bytes of the peers of several endpoints, and their limit.

    Args:
        limit: number of bytes above which :attr:`over` is True.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.over = False
        """Whether kvbus writes only to peers for which no byte waits."""
        self.added = 0
        """Waiting bytes at the last measurement and all bytes written since then, which is at least the real number."""
        self.peers: WeakSet[Writable] = WeakSet()
        self._held: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def bytes(self) -> int:
        """Number of bytes that wait for all peers together."""
        return sum(peer.waiting_bytes for peer in self.peers)

    def look(self) -> None:
        """Measure the waiting bytes, unless they were measured less than :data:`LOOK_SECONDS` ago.

        Call it when :attr:`added` has exceeded the limit.
        """
        if self._timer is None:
            self._measure()

    def hold(self, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` after the next measurement."""
        self._held.append(go_on)
        self.look()

    def _measure(self) -> None:
        self._timer = None
        self.added = self.bytes
        self.over = self.added > self.limit
        held, self._held = self._held, []
        if self.over or held:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._measure)
        for go_on in held:
            go_on()


UNLIMITED: Final = Unsent(sys.maxsize)
"""For the endpoints whose peers are not routers."""
