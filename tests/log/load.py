"""A writer under load, and who reads what it writes: from the log alone, and by an aggregator; all of it is counted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Self

from kvbus.core.numbered import EPOCH_BITS
from kvbus.parts.log.contract import UnavailableError
from kvbus.parts.log.follower import Holds
from kvbus.parts.log.record import RANDOM_BITS
from tests.doubles.bus import eventually
from tests.log.fleet import Fleet
from tests.log.test_aggregator import TOPIC, Aggregator, Moving

MORE: Final = 20
"""Batches that show that writing goes on."""

PATIENCE: Final = 200.0
"""Seconds for servers to find together on a busy machine; five to ten where nothing else runs."""


async def asked(what: Callable[[], Awaitable[Any]], text: str) -> Any:
    """The answer to a question, once there is one; servers that are on their way say all kinds of things."""
    until, said = time.monotonic() + PATIENCE, None
    while time.monotonic() < until:
        try:
            said = await what()
            if said:
                return said
        except Exception as error:  # noqa: BLE001
            said = error
        await asyncio.sleep(0.05)
    raise AssertionError(f"{text}: {said!r}")


class Observed(contextlib.AsyncExitStack):
    """A leaf, a reader of its stream, and an aggregator with a router."""

    def __init__(self, kind: Any, log: Fleet, directory: Any, monkeypatch: Any) -> None:
        super().__init__()
        self._log = log
        self._make = lambda: Aggregator(kind, directory, monkeypatch)
        self.published = 0

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.leaf, self.reading = await self._log.followed_leaf(queue_batches=1000)
        self.aggregator = self._make()
        await self.aggregator.daemon.start()
        self.push_async_callback(self.aggregator.daemon.close, 0)
        self.router = Moving(self.aggregator.endpoint)
        self.callback(self.router.close)
        return self

    @property
    def epoch(self) -> int:
        """Of the newest record that was read, as a number of turns."""
        return int(self.reading.follower.epoch) >> RANDOM_BITS

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """The engine stores and evicts blocks, a hundred batches a second."""
        over = asyncio.Event()

        async def run() -> None:
            while not over.is_set():
                self.leaf.store(5, gone=4)
                self.published += 1
                await asyncio.sleep(0.01)

        task = asyncio.ensure_future(run())
        try:
            yield
        finally:
            over.set()
            await task

    async def goes_on(self) -> float:
        """New batches are appended, and read. Returns the seconds that it took."""
        begun, batches, follower = time.monotonic(), self.leaf.stats.batches + MORE, self.reading.follower
        await eventually(lambda: self.leaf.stats.batches >= batches, "appends", PATIENCE)
        epoch, seq = follower.epoch, follower.seq + MORE
        while (follower.epoch, follower.seq) < (epoch, seq) or follower.holds is not Holds.ALL:
            assert time.monotonic() < begun + PATIENCE, "nothing is read"
            with contextlib.suppress(UnavailableError):
                await self.reading.take()
        return time.monotonic() - begun

    async def exact(self) -> None:
        """Everybody holds what the engine holds, epochs went forward, and each batch was appended or counted."""
        until = time.monotonic() + PATIENCE
        await eventually(
            lambda: self.leaf.stats.states_sent and not self.leaf.driver.busy, "everything in the log", PATIENCE
        )
        while self.reading.follower.holds is not Holds.ALL or self.reading.blocks != self.leaf.blocks:
            assert time.monotonic() < until, "the reader holds something else"
            with contextlib.suppress(UnavailableError):
                await self.reading.take()
        await eventually(lambda: self.router.blocks(TOPIC) == self.leaf.blocks, "the router", PATIENCE)
        assert self.router.violations == []
        assert self.router.next[TOPIC] >> EPOCH_BITS == self.epoch
        stats = self.leaf.stats
        assert stats.batches + sum(stats.dropped_batches.values()) == self.published
        assert self.reading.follower.counts["lost"] == 0
        assert self.reading.epochs == sorted(self.reading.epochs)
