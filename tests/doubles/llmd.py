"""llm-d's subscriber with replay: the rules by which it takes, drops and requests batches, and a router with these rules.

They are the rules of ``pkg/kvevents`` in llm-d-router (August 2026). ``tests/doubles/data`` has recorded conversations of
that program, which the router here has to repeat.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import ClassVar, Final, NamedTuple

from kvbus.daemon.runtime import RunningClock
from tests.doubles.router import PlainSetRouter
from tests.doubles.socket_routers import Context, SocketRouter

IDLE: Final = 2.0
"""Seconds without a message after which llm-d repeats a replay request from its next seq."""

TOTAL: Final = 120.0
"""Seconds after which llm-d gives up an answer."""

ATTEMPTS: Final = 3
"""Number of requests without a batch or END after which llm-d gives up."""


class Answered(NamedTuple):
    """What one replay request brought.

    Attributes:
        batches: seq and payload of each batch of the answer.
        ended: whether END came. If not, the answer broke off.
        malformed: whether a message was no batch and not END.
    """

    batches: list[tuple[int, bytes]]
    ended: bool = True
    malformed: bool = False


Asking = Generator[int, Answered, None]
"""A step of the subscriber. It yields the start of each replay request, and is sent what the request brought."""


class LlmdRules:
    """The rules of one llm-d subscriber, without sockets.

    Args:
        clock: returns the time in seconds.
        apply: called with the seq and the payload of each batch that the subscriber applies.
        forget: called when the subscriber drops the blocks of the pod.
    """

    def __init__(self, clock: Callable[[], float], apply: Callable[[int, bytes], object], forget: Callable[[], object]):
        self.cooldown = 30.0
        """Seconds after a refused answer in which the subscriber requests nothing, and drops what it cannot use."""
        self.refused = 0
        """Number of answers that the subscriber has refused. Each time it dropped all blocks."""
        self.last: int | None = None
        """The seq of the newest batch that the subscriber has applied. None if it has no batch to continue from."""
        self._last_live: int | None = None
        self._refused_at: float | None = None
        self._clock = clock
        self._apply = apply
        self._forget = forget

    def _may_ask(self) -> bool:
        return self._refused_at is None or self._clock() >= self._refused_at + self.cooldown

    def connected(self) -> Asking:
        """Begin to read a live connection. A subscriber that has nothing requests everything first."""
        if self.last is None and self._may_ask():
            yield from self._request(0)

    def live(self, seq: int, payload: bytes) -> Asking:
        """Read one batch of the live stream."""
        asked = False
        if self._last_live is not None and seq < self._last_live:
            self._forget()
            self.last = self._refused_at = None
            asked = True
            yield from self._request(0)
        if seq == self._last_live:
            return
        self._last_live = seq
        if self.last is None:
            if seq > 0 and (asked or not self._may_ask() or not (yield from self._request(0))):
                return
        elif seq > self.last + 1 and (not self._may_ask() or not (yield from self._request(self.last + 1))):
            return
        if self.last is None or seq == self.last + 1:
            self._take(seq, payload)

    def _take(self, seq: int, payload: bytes) -> None:
        self._apply(seq, payload)
        self.last = seq

    def _refuse(self) -> bool:
        self.refused += 1
        self._forget()
        self.last, self._refused_at = None, self._clock()
        return False

    def _request(self, start: int) -> Generator[int, Answered, bool]:
        """Request all batches from ``start`` on. Return whether the subscriber takes the answer."""
        until, following, silent = self._clock() + TOTAL, start, 0
        while silent < ATTEMPTS and self._clock() < until:
            found = yield following
            before = following
            for seq, payload in found.batches:
                if seq != following:
                    return self._refuse()
                self._take(seq, payload)
                following += 1
            if found.malformed:
                break
            if found.ended:
                if following == start > 0:
                    break
                self._refused_at = None
                return True
            silent = silent + 1 if following == before else 0
        return self._refuse()


class LlmdWithReplay(SocketRouter):
    """llm-d's subscriber with replay, on real sockets.

    libzmq connects again at once, and llm-d only after 5 s.
    """

    rebuilds = False
    cooldown: ClassVar[float | None] = None
    """Replaces `LlmdRules.cooldown`, so that a test need not wait for half a minute."""

    def __init__(self, endpoint: str, replay_endpoint: str, context: Context | None = None) -> None:
        super().__init__(endpoint, replay_endpoint, context)
        self._clock = RunningClock(time.monotonic)  # it does not count time in which this process is suspended
        self.rules = LlmdRules(time.monotonic, self._apply, self._forget)
        if self.cooldown is not None:
            self.rules.cooldown = self.cooldown
        self._queue: deque[tuple[int, bytes]] = deque()
        self._connected = True
        self.subscribe()

    @property
    def refused(self) -> int:
        return self.rules.refused

    def _apply(self, seq: int, payload: bytes) -> None:
        self.view.take(seq, payload)

    def _forget(self) -> None:
        self.view = PlainSetRouter()

    async def read_on(self) -> set[int]:
        """Read the live batches that have arrived, with the replays that the rules request.

        Return the hashes of all blocks in the view, without those that are byte strings.
        """
        if self._connected or self.disconnected():
            self._connected = False
            await self._step(self.rules.connected())
        self._queue.extend(self.arrived())
        while self._queue:
            await self._step(self.rules.live(*self._queue.popleft()))
        return {block for _, _, block in self.view.blocks if isinstance(block, int)}

    async def _step(self, step: Asking) -> None:
        try:
            start = next(step)
            while True:
                start = step.send(await self._ask(start))
        except StopIteration:
            return

    async def _ask(self, start: int) -> Answered:
        """Send one replay request, and read its answer until END or until it breaks off."""
        batches: list[tuple[int, bytes]] = []
        dealer = self.request(start, hwm=0)
        heard = self._clock.time()
        try:
            while True:
                if dealer.poll(0):
                    heard = self._clock.time()
                    empty, *frames = dealer.recv_multipart()
                    if not empty and len(frames) == 3 and not frames[2]:
                        return Answered(batches)
                    if empty or len(frames) != 3 or len(frames[1]) < 8:
                        return Answered(batches, malformed=True)
                    batches.append((int.from_bytes(frames[1][:8], "big"), frames[2]))
                    if len(batches) % 100:
                        continue
                elif self._clock.time() > heard + IDLE:
                    return Answered(batches, ended=False)
                await asyncio.sleep(0.001)
        finally:
            dealer.close(0)
