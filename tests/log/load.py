"""A set-up for tests of a log under load: an engine's stream, its writer, a reader of the log, and an aggregator.

The tests check that each published batch is either appended or counted as dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Self

from kvbus.core.log_relay import EPOCH_BITS
from kvbus.parts.log.contract import UnavailableError
from kvbus.parts.log.follower import Holds
from kvbus.parts.log.record import RANDOM_BITS
from tests.doubles.bus import eventually
from tests.log.fleet import Fleet
from tests.log.test_aggregator import TOPIC, Aggregator, Moving

MORE: Final = 20
"""Number of new batches that a test waits for, to see that a writer continues."""

PATIENCE: Final = 200.0
"""Maximum time in which the servers of a cluster find each other on a busy machine, in seconds.

An idle machine needs five to ten seconds.
"""


async def asked(what: Callable[[], Awaitable[Any]], text: str) -> Any:
    """Call a function until its result is true, and return the result.

    Exceptions are ignored in this time, because servers that are starting raise various errors.
    """
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


class BusState(contextlib.AsyncExitStack):
    """A kvbus that writes a stream to a log, a reader of the stream, and an aggregator with a router."""

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
        """The epoch of the newest record that the reader has read, without the random bits of its number."""
        return int(self.reading.follower.epoch) >> RANDOM_BITS

    @contextlib.asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Let the engine store and evict blocks in a hundred batches a second until the ``with`` block ends."""
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
        """Wait until the writer has appended new batches and the reader has read them; return the seconds that this
        took.
        """
        begun, batches, follower = time.monotonic(), self.leaf.stats.batches + MORE, self.reading.follower
        await eventually(lambda: self.leaf.stats.batches >= batches, "appends", PATIENCE)
        epoch, seq = follower.epoch, follower.seq + MORE
        while (follower.epoch, follower.seq) < (epoch, seq) or follower.holds is not Holds.ALL:
            assert time.monotonic() < begun + PATIENCE, "nothing is read"
            with contextlib.suppress(UnavailableError):
                await self.reading.take()
        return time.monotonic() - begun

    async def exact(self) -> None:
        """Wait until the reader and the router hold the engine's blocks.

        Then check that no epoch went back, and that each batch was appended or counted as dropped.
        """
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
