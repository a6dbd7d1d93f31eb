"""The share of the event loop's time that answers over HTTP may take, and whose turn it is: the stream goes first.

A hundred clients that never wait would else have all their answers made in one turn of the loop, one turn after the
other, and batches would wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import types
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

RESERVE: Final = BURST / 2
"""The part of these that is for whoever has had next to nothing. A scrape of many sources takes all others, 0.2 s long,
and a question beside it does not wait for what the scrape has taken."""

NEXT_TO_NOTHING: Final = 0.05
"""Seconds in which what an address has had becomes no more than :data:`LITTLE` of the time, if that is next to nothing:
6 ms of work just now."""

GIVE_WAY: Final = 0.1
"""Seconds for which work that nobody waits for, as a sample of the history, goes behind those who ask."""

TIMER: Final = 0.001
"""Seconds that a wait takes at least. uvloop's timers know no less, and a shorter one would come again and again before
its time. What it takes too much is not lost, since work may be ahead by :data:`BURST`."""

REQUEST: Final = 0.0003
"""Seconds of the loop's time that a request takes beside its pieces of work: it is read, and its answer is written."""

T = TypeVar("T")

NOBODY: Final = ""

client: Final[ContextVar[str]] = ContextVar("client", default=NOBODY)
"""The address of whoever asks; :data:`NOBODY` of work that is done unasked."""

Asking = tuple[str, bool]
"""An address, and whether it probes."""


@types.coroutine
def next_turn() -> Generator[None, None, None]:
    """Let the loop do its other work first, as ``asyncio.sleep(0)`` does in half the calls."""
    yield


class Pace:
    """All pieces of work together get a share of the loop's time, and each is in a turn of its own.

    The address goes first that has had least lately, and its probes are apart from what else it asks. So whoever asks
    now and then does not wait behind a crowd at another address, nor for the time that a crowd has used up. What nobody
    asks for goes last, for a while.
    """

    def __init__(self) -> None:
        self._waiting: dict[Asking, deque[asyncio.Future[None]]] = {}
        self._share_used_until = 0.0
        self._most_used_until = 0.0
        self._little_used_until: dict[Asking, float] = {}
        self._unasked_since = 0.0
        self._next: asyncio.Handle | None = None
        self._at_work = False

    @property
    def busy(self) -> bool:
        """Whether a piece has its turn, or waits for it."""
        return self._at_work or bool(self._waiting)

    @contextlib.asynccontextmanager
    async def piece(
        self,
        *,
        probe: bool = False,
        first: bool = False,
        waiting: contextlib.AbstractContextManager[None] | None = None,
    ) -> AsyncIterator[None]:
        """Wait for the turn of a piece of work, which must not wait for anything itself.

        Args:
            probe: it answers a probe.
            first: it is the first one of a request, for which what each request takes is counted.
            waiting: entered until its turn has come.
        """
        asking = client.get(), probe
        with waiting or contextlib.nullcontext():
            await self._turn(asking)
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._end(asking, begun, REQUEST if first else 0.0)

    async def begin(self, waiting: contextlib.AbstractContextManager[None]) -> None:
        """Wait for the first turn of a request that makes its answer in pieces, and count what each request takes.

        Args:
            waiting: entered until then.
        """
        asking = client.get(), False
        with waiting:
            await self._turn(asking)
        self._end(asking, time.perf_counter(), REQUEST)

    async def in_turns(self, work: Generator[None, None, T]) -> T:
        """The result of work whose steps are a piece each.

        Not by :meth:`piece`: a question has some five of them, and a context manager takes ten calls.
        """
        asking = client.get(), False
        while True:
            await self._turn(asking)
            begun = time.perf_counter()
            try:
                next(work)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            finally:
                self._end(asking, begun)

    async def _turn(self, asking: Asking) -> None:
        """Wait for a turn of the loop in which no other piece has its own."""
        now = time.perf_counter()
        if not self._at_work and not self._waiting and self._due(asking, now) <= now:
            self._at_work = True
            try:
                await next_turn()
            except asyncio.CancelledError:
                self._give_back()
                raise
            return
        if asking not in self._waiting and asking[0] == NOBODY:
            self._unasked_since = now
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(asking, deque()).append(turn)
        self._go_on()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn has come, and it does not need it
                self._give_back()
            raise

    def _end(self, asking: Asking, begun: float, more: float = 0.0) -> None:
        """Count what a piece took, and ``more``."""
        took = time.perf_counter() - begun + more
        self._share_used_until = max(begun, self._share_used_until) + took / SHARE
        self._most_used_until = max(begun, self._most_used_until) + took / MOST
        known = {each: until for each, until in self._little_used_until.items() if until > begun}
        known[asking] = known.get(asking, begun) + took / LITTLE
        self._little_used_until = known
        self._give_back()

    def _had(self, asking: Asking, now: float) -> float:
        """Seconds until what an address has had is no more than :data:`LITTLE` of the time since it began."""
        return max(0.0, self._little_used_until.get(asking, 0.0) - now)

    def _due(self, asking: Asking, now: float) -> float:
        """When the next piece of an address may have its turn."""
        had = self._had(asking, now)
        share, little = self._share_used_until - BURST, now + had - LATELY
        most = self._most_used_until - (BURST if had <= NEXT_TO_NOTHING else BURST - RESERVE)
        return max(min(share, little), most)

    def _place(self, asking: Asking, now: float) -> float:
        """Of those that wait, that of the lowest goes first."""
        had = self._had(asking, now)
        return had if asking[0] != NOBODY else max(had, self._unasked_since + GIVE_WAY - now)

    def _give_back(self) -> None:
        """End a turn."""
        self._at_work = False
        let_threads_run()
        self._go_on()

    def _go_on(self) -> None:
        """See to it that the next piece has its turn as soon as the share allows."""
        if self._at_work or not self._waiting:
            return
        if self._next is not None:
            self._next.cancel()
        now = time.perf_counter()
        wait = min(self._due(each, now) for each in self._waiting) - now
        self._next = asyncio.get_running_loop().call_later(max(wait, TIMER) if wait > 0 else 0, self._give)

    def _give(self) -> None:
        """Give its turn to the next piece of the address whose place is the first one."""
        self._next = None
        now = time.perf_counter()
        while not self._at_work and (due := [each for each in self._waiting if self._due(each, now) <= now]):
            asking = min(due, key=lambda each: self._place(each, now))
            turns = self._waiting.pop(asking)
            turn = turns.popleft()
            if turns:
                self._waiting[asking] = turns
            if not turn.done():  # its request has not been given up
                self._at_work = True
                turn.set_result(None)
        self._go_on()
