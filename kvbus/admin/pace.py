"""The share of the event loop's time that answers over HTTP may take, and whose turn it is: the stream goes first.

A hundred clients that never wait would else have all their answers made in one turn of the loop, one turn after the
other, and batches would wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Generator
from contextvars import ContextVar
from typing import Final, TypeVar

from kvbus.common.threads import let_threads_run

SHARE: Final = 1 / 4
"""Of the loop's time, for all answers."""

MOST: Final = 1 / 2
"""With those that go before it is free again, to whoever asks little."""

LITTLE: Final = 1 / 8
"""What an address may take of about :data:`LATELY` and still asks little."""

LATELY: Final = 1.0
"""Seconds."""

BURST: Final = 0.01
"""Seconds that work may be ahead of its share of the event loop's time."""

TIMER: Final = 0.001
"""Seconds that a wait takes at least. uvloop's timers know no less, and a shorter one would come again and again before
its time. What it takes too much is not lost, since work may be ahead by :data:`BURST`."""

REQUEST: Final = 0.0003
"""Seconds of the loop's time that a request takes beside its pieces of work: it is read, and its answer is written."""

T = TypeVar("T")

client: Final[ContextVar[str]] = ContextVar("client", default="")
"""The address of whoever asks."""

Asking = tuple[str, bool]
"""An address, and whether it probes."""


class Pace:
    """All pieces of work together get a share of the loop's time, and each is in a turn of its own.

    The address goes first that has had least lately, and its probes are apart from what else it asks. So whoever asks
    now and then does not wait behind a crowd at another address, nor for the time that a crowd has used up.
    """

    def __init__(self) -> None:
        self._waiting: dict[Asking, deque[asyncio.Future[None]]] = {}
        self._share_used_until = 0.0
        self._most_used_until = 0.0
        self._little_used_until: dict[Asking, float] = {}
        self._next: asyncio.Handle | None = None
        self._at_work = False

    @contextlib.asynccontextmanager
    async def piece(self, *, probe: bool = False, first: bool = False) -> AsyncIterator[None]:
        """Wait for the turn of a piece of work, which must not wait for anything itself.

        Args:
            probe: it answers a probe.
            first: it is the first one of a request, for which what each request takes is counted.
        """
        asking = client.get(), probe
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(asking, deque()).append(turn)
        self._go_on()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn has come, and it does not need it
                self._end()
            raise
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._took(asking, begun, time.perf_counter() - begun + (REQUEST if first else 0.0))
            self._end()

    async def in_turns(self, work: Generator[None, None, T]) -> T:
        """The result of work whose steps are a piece each."""
        while True:
            async with self.piece():
                try:
                    next(work)
                except StopIteration as done:
                    return done.value  # type: ignore[no-any-return]

    def _took(self, asking: Asking, begun: float, took: float) -> None:
        self._share_used_until = max(begun, self._share_used_until) + took / SHARE
        self._most_used_until = max(begun, self._most_used_until) + took / MOST
        known = {each: until for each, until in self._little_used_until.items() if until > begun}
        known[asking] = known.get(asking, begun) + took / LITTLE
        self._little_used_until = known

    def _had(self, asking: Asking) -> float:
        """When what an address has had will be no more than :data:`LITTLE` of the time since it began."""
        return self._little_used_until.get(asking, 0.0)

    def _due(self, asking: Asking) -> float:
        """When the next piece of an address may have its turn."""
        share, little = self._share_used_until - BURST, self._had(asking) - LATELY
        return max(min(share, little), self._most_used_until - BURST)

    def _end(self) -> None:
        self._at_work = False
        let_threads_run()
        self._go_on()

    def _go_on(self) -> None:
        """See to it that the next piece has its turn as soon as the share allows."""
        if self._at_work or not self._waiting:
            return
        if self._next is not None:
            self._next.cancel()
        wait = min(map(self._due, self._waiting)) - time.perf_counter()
        self._next = asyncio.get_running_loop().call_later(max(wait, TIMER) if wait > 0 else 0, self._give)

    def _give(self) -> None:
        """Give its turn to the next piece of the address that has had least lately."""
        self._next = None
        now = time.perf_counter()
        while not self._at_work and (due := [each for each in self._waiting if self._due(each) <= now]):
            asking = min(due, key=self._had)
            turns = self._waiting.pop(asking)
            turn = turns.popleft()
            if turns:
                self._waiting[asking] = turns
            if not turn.done():  # its request has not been given up
                self._at_work = True
                turn.set_result(None)
        self._go_on()
