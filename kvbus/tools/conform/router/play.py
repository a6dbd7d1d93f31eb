"""The player: does to a router what a case says, and judges what the router holds then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvbus.tools.conform.router.adapters import Adapter, AdapterError, Stream
from kvbus.tools.conform.router.engine import MARKERS, Engine
from kvbus.tools.conform.router.steps import Case, Join, Pause, Restart, Seen
from kvbus.tools.conform.router.views import Score, View, score
from kvbus.tools.conform.verdict import Evidence, Outcome
from kvbus.transport.engine.publisher import EnginePublisher

_HEARTBEAT_MS: Final = 1000
_POLL_S: Final = 0.05
RIGHT: Final = Score(0, 0)
_ANYWHERE: Final = "tcp://127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class Settings:
    """How a router is tried.

    Attributes:
        endpoints: live and replay of each rank's publisher, kept over all cases; empty: new ones for each case.
        places: live and replay endpoint of each publisher otherwise.
        streams: where the router reads; empty: from the publishers themselves.
        topic: of all batches; empty: none.
        settle: seconds that a router has to come to what it must hold.
        connect: seconds that it has to subscribe.
    """

    endpoints: Sequence[tuple[str, str]] = ()
    places: Callable[[], tuple[str, str]] = lambda: (_ANYWHERE, _ANYWHERE)
    streams: Sequence[Stream] = ()
    topic: str = ""
    settle: float = 5.0
    connect: float = 60.0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case.

    Attributes:
        outcome, message: for its verdicts.
        score: what the router lacks, and what it has too much of.
        evidence: what was sent, where that is no batch.
        deaf: the router cannot be reached or asked at all.
    """

    outcome: Outcome
    message: str
    score: Score = RIGHT
    evidence: tuple[Evidence, ...] = ()
    deaf: bool = False


class UntriedError(Exception):
    """The case cannot be tried with this router; the text says why."""

    def __init__(self, text: str, *, deaf: bool = False) -> None:
        super().__init__(text)
        self.deaf = deaf


class Player:
    """Plays cases to one router.

    Args:
        adapter: asks it.
        settings: where and how.
    """

    def __init__(self, adapter: Adapter, settings: Settings) -> None:
        self._adapter: Final = adapter
        self._settings: Final = settings
        self._kept: list[EnginePublisher] = []

    async def play(self, case: Case) -> Result:
        """Play a case, and judge what the router holds behind it."""
        try:
            self._refuse(case)
            async with self._publishers(case) as publishers:
                engine = Engine(case, publishers)
                try:
                    return await self._played(case, engine, publishers)
                finally:
                    if self._adapter.fresh:
                        await self._adapter.stop()
                    if self._kept:
                        engine.clear()
        except UntriedError as error:
            return Result(Outcome.NOT_SEEN, str(error), deaf=error.deaf)
        except AdapterError as error:
            outcome = Outcome.BROKEN if error.crashed else Outcome.NOT_SEEN
            return Result(outcome, str(error), deaf=not error.crashed)

    def close(self) -> None:
        """Close what was kept over the cases."""
        for each in self._kept:
            each.close()

    def _refuse(self, case: Case) -> None:
        kept = self._settings.endpoints
        if case.joins and not self._adapter.fresh:
            raise UntriedError("it takes a router that the kit starts itself")
        if kept and case.ranks > len(kept):
            raise UntriedError("it takes a second rank")
        if kept and (case.heartbeats or case.first):
            raise UntriedError("it takes endpoints that the kit chooses")

    @contextlib.asynccontextmanager
    async def _publishers(self, case: Case) -> AsyncIterator[list[EnginePublisher]]:
        settings = self._settings
        if settings.endpoints:
            if not self._kept:
                self._kept = [self._publisher(*each) for each in settings.endpoints]
            for publisher in self._kept:
                publisher.start()
            yield self._kept
            return
        heartbeat = _HEARTBEAT_MS if case.heartbeats else 0
        made = [self._publisher(*settings.places(), heartbeat) for _ in range(case.ranks)]
        try:
            for publisher in made:
                publisher.start()
            yield made
        finally:
            for publisher in made:
                publisher.close()

    def _publisher(self, live: str, replay: str, heartbeat_ms: int = 0) -> EnginePublisher:
        topic = self._settings.topic.encode()
        return EnginePublisher(live, replay, topic=topic, bind=True, heartbeat_ms=heartbeat_ms)

    async def _played(self, case: Case, engine: Engine, publishers: Sequence[EnginePublisher]) -> Result:
        if not case.joins:
            await self._begin(publishers)
        subscriptions = engine.subscriptions
        for step in case.steps:
            match step:
                case Join():
                    await self._begin(publishers)
                case Seen():
                    engine.mark()
                    if not await self._until(lambda: self._read(engine)):
                        raise UntriedError("it has not read what came before the fault")
                case Pause(seconds):
                    await asyncio.sleep(seconds)
                case _:
                    engine.do(step)
                    if isinstance(step, Restart):
                        await self._subscribed(publishers)
                    await asyncio.sleep(0)
        if case.marker:
            engine.mark()
        else:
            engine.markers.clear()
        result = await self._judged(case, engine)
        cut = engine.subscriptions - subscriptions
        if case.heartbeats and cut:
            return Result(Outcome.BROKEN, f"its connection was cut {cut} times, for want of a PONG", result.score)
        return result

    async def _begin(self, publishers: Sequence[EnginePublisher]) -> None:
        topic = self._settings.topic
        own = [Stream(each.endpoint, each.replay_endpoint or "", topic) for each in publishers]
        if self._adapter.fresh:
            await self._adapter.start(self._settings.streams[: len(own)] or own)
        if not await self._connected(publishers):
            endpoints = ", ".join(each.endpoint for each in publishers)
            raise UntriedError(f"nobody subscribes at {endpoints} within {self._settings.connect:g} s", deaf=True)
        if not self._settings.endpoints:
            return
        if not await self._until(self._holds_nothing):
            raise UntriedError("it still holds blocks that were cleared before this case: start it anew")

    async def _connected(self, publishers: Sequence[EnginePublisher]) -> bool:
        """Wait for the first subscription of a router. One that has ended will not send it."""
        subscribed = asyncio.ensure_future(self._subscribed(publishers, self._settings.connect))
        ended = asyncio.ensure_future(self._adapter.ended())
        try:
            await asyncio.wait((subscribed, ended), return_when=asyncio.FIRST_COMPLETED)
            if not subscribed.done():
                raise AdapterError(f"{ended.result()} before it subscribed")
            return subscribed.result()
        finally:
            for each in (subscribed, ended):
                each.cancel()
            await asyncio.gather(subscribed, ended, return_exceptions=True)

    async def _subscribed(self, publishers: Sequence[EnginePublisher], seconds: float = 0.0) -> bool:
        try:
            async with asyncio.timeout(seconds or self._settings.settle):
                for each in publishers:
                    await each.wait_for_subscriber()
        except TimeoutError:
            return False
        return True

    async def _until(self, condition: Callable[[], Awaitable[bool]]) -> bool:
        """Wait until it holds, or the time is over."""
        deadline = asyncio.get_running_loop().time() + self._settings.settle
        while not await condition():
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _holds_nothing(self) -> bool:
        return not _without_markers(await self._adapter.view({})).held

    async def _read(self, engine: Engine) -> bool:
        """Say whether the router has read all that was sent."""
        return _has(await self._adapter.view(engine.known), engine.markers)

    async def _judged(self, case: Case, engine: Engine) -> Result:
        """Wait until the router holds what it must, or has had the time to.

        Many routers are asked for one block after the other. So what a view shows is from before all was read, unless
        the view before it has shown that.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.settle * case.timeouts
        blocks = len(case.cache)
        read = False
        while True:
            over = loop.time() >= deadline
            view, had_read = await self._adapter.view(engine.known), read
            read = _has(view, engine.markers)
            shown = _without_markers(view)
            found = score(case.cache, shown, engine.known)
            if had_read and read and found == RIGHT:
                return Result(Outcome.KEPT, "")
            if over and (had_read or not read):
                break
            await asyncio.sleep(_POLL_S)
        if read and engine.before_loss:
            if shown.incomplete:
                return Result(Outcome.KEPT, "it says that its view is incomplete", found)
            if not found.dead and not {block.hash for block in shown.held} & engine.before_loss:
                return Result(Outcome.KEPT, "it has forgotten what it could not repair", found)
        return Result(Outcome.BROKEN, _said(found, blocks, engine.asked, read=read), found, _evidence(engine))


def _said(found: Score, blocks: int, asked: int, *, read: bool) -> str:
    text = f"its view is not the engine's {blocks} blocks" if any(found) else "its view is right"
    if not read:
        text += ", it reads no further"
    return text + f", it asked for {asked or 'no'} replay{'' if asked == 1 else 's'}"


def _evidence(engine: Engine) -> tuple[Evidence, ...]:
    return tuple(Evidence(f"payload of message {at}", payload) for at, payload in enumerate(engine.payloads[:3]))


def _has(view: View, markers: set[int]) -> bool:
    return markers <= {block.hash for block in view.held}


def _without_markers(view: View) -> View:
    return view._replace(held=frozenset(block for block in view.held if block.hash not in MARKERS))
