"""The set-up of an interop case: one engine, one kvbus, and two routers of the same kind.

One router reads the engine directly, the other reads kvbus. Every connection of a router goes through a link that can
be cut. Each event of a case happens to both routers at the same time, so that they are compared under the same traffic.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import TYPE_CHECKING, Any, Final, Literal

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.link import Link
from tests.ports import ports_in_a_row

from .cache import Cache, Known, Score, score
from .routers import Stream
from .support import Kvbus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from pathlib import Path

    from .routers import Kind, Router

BYTES: Final = 120
"""Approximate size of a block on the wire, in bytes."""

QUIET: Final = 2.0
"""Seconds for which a wrong view must stay unchanged before it counts as wrong, where a wrong view is expected."""

PATIENT: Final = 15.0
"""Seconds for which a wrong view must stay unchanged before it counts as wrong, where an exact view is expected.

A test waits this long only if the machine is busy or the test has found a defect.
"""

RECONNECTED: Final = 20.0
"""Maximum seconds for which a case waits until a disconnected router has connected again.

After that the case continues without the router.
"""

REPLAY: Final = 4
"""Number that is added to the port of a live stream to get the port of its replay."""

Layout = Literal["per_source", "merged", "per_topic"]


class Rank:
    """One rank of the engine: its cache and its sockets."""

    def __init__(self, number: int, port: int, kind: Kind, **cache: int) -> None:
        self.cache = Cache(seed=number, rank=number, by_position=kind.by_position, **cache)
        live, replay = (f"tcp://127.0.0.1:{first + number}" for first in (port, port + REPLAY))
        self.publisher = EnginePublisher(live, replay, topic=kind.topic.encode(), bind=True)
        self.subscriptions = 0
        """Number of subscriptions that the rank must have received in this epoch."""
        self._number = number
        self._epochs = 1

    def restart(self) -> None:
        """Restart the rank with an empty cache, a new epoch and seqs from 0."""
        self._epochs += 1
        self.publisher.restart()
        self.cache.restart(seed=1000 * self._epochs + self._number)


class Side:
    """One or two routers, and the links to the program that they read: the engine, or kvbus."""

    def __init__(self, kind: Kind, directory: Path, name: str, links: list[tuple[Link, Link]]) -> None:
        self.name = name
        self.routers: list[Router] = []
        self.lives = [live for live, _ in links]
        self._links = links
        self._kind = kind
        self._directory = directory
        self._made = 0

    async def join(self) -> None:
        self._made += 1
        router = self._kind.make(self._directory, f"{self.name}{self._made}")
        self.routers.append(router)
        await router.start([Stream(live.host, live.port, replay.port) for live, replay in self._links])

    async def leave(self) -> None:
        await self.routers.pop(0).stop()

    async def cut(self) -> None:
        for link in self._both():
            await link.refuse()

    async def mend(self) -> None:
        for link in self._both():
            await link.listen()

    async def start(self) -> None:
        for link in self._both():
            await link.start()

    async def close(self) -> None:
        for router in self.routers:
            await router.stop()
        for link in self._both():
            await link.close()

    def _both(self) -> list[Link]:
        return [link for pair in self._links for link in pair]


class Scene:
    """The engine's ranks, the kvbus and the routers of a case."""

    def __init__(self, ranks: list[Rank], bus: Kvbus, direct: Side, behind: Side) -> None:
        self.ranks = ranks
        self.bus = bus
        self.sides = (direct, behind)
        self._behind = behind
        self._rng = random.Random(5)

    @property
    def live(self) -> Known:
        """The blocks that the engine's ranks hold now."""
        return {block: entry for rank in self.ranks for block, entry in rank.cache.live.items()}

    @property
    def known(self) -> Known:
        """The blocks that the engine's ranks hold now or held recently. A test asks the routers for them."""
        return {block: entry for rank in self.ranks for block, entry in rank.cache.known.items()}

    async def publish(self, count: int, *, lost: float = 0.0, rate: float | None = None) -> None:
        """Publish ``count`` batches from each rank.

        On the live stream a batch is lost with the probability ``lost``.
        """
        begin = time.monotonic()
        for at in range(count):
            for rank in self.ranks:
                rank.publisher.publish(rank.cache.batch(), live=self._rng.random() >= lost)
            if rate is not None:
                await asyncio.sleep(max(0.0, begin + (at + 1) / rate - time.monotonic()))
            elif at % 25 == 24:
                await asyncio.sleep(0.02)  # do not overrun a router's queue

    async def bus_has_all(self) -> None:
        """Wait until kvbus has read every batch that the engine has published."""
        for at, rank in enumerate(self.ranks):
            await _until(
                lambda at=at, rank=rank: self.bus.last_seq(at) == rank.publisher.next_seq - 1,  # type: ignore[misc]
                "kvbus has everything",
            )

    async def join(self) -> None:
        """Start one more router at the engine and one more at kvbus, and wait until they have subscribed."""
        await asyncio.gather(*(side.join() for side in self.sides))
        self._again()
        await self.subscribed()

    async def restart_routers(self, between: Callable[[], Awaitable[None]]) -> None:
        """Stop the oldest router that reads the engine and the oldest that reads kvbus, call ``between``, and start
        new routers.
        """
        await asyncio.gather(*(side.leave() for side in self.sides))
        await self._unsubscribed()
        await between()
        await self.join()

    async def flap(self, between: Callable[[], Awaitable[None]]) -> None:
        """Cut every connection of every router, call ``between``, and let the routers connect again."""
        await asyncio.gather(*(side.cut() for side in self.sides))
        await self._unsubscribed()
        await between()
        await asyncio.gather(*(side.mend() for side in self.sides))
        for _ in self.sides[0].routers:
            self._again()
        await self.subscribed()

    async def join_and_be_cut(self) -> None:
        """Start a router at the engine and at kvbus, and cut the live connection of each once.

        The cut comes in the middle of the state on subscription, if the router gets one.
        """
        lives = [link for side in self.sides for link in side.lives]
        for link in lives:
            link.cut_after(len(self.live) // len(self.ranks) * BYTES // 2)
        await self.join()
        with contextlib.suppress(TimeoutError):
            await _until(lambda: not any(link.to_be_cut for link in lives), "cut", QUIET)
        for rank, link in zip(self.ranks, self.sides[0].lives, strict=True):
            rank.subscriptions += not link.to_be_cut
        for link in lives:
            link.cut_after(None)
        await self.subscribed()

    async def restart_engine(self, number: int = 0) -> None:
        """Restart one rank, and wait until the routers and kvbus have subscribed to it again."""
        await self.bus_has_all()
        rank = self.ranks[number]
        rank.restart()
        rank.subscriptions = 1 + len(self.sides[0].routers)
        await _wait_for_subscriptions(rank)

    async def kill_bus(self, between: Callable[[], Awaitable[None]]) -> None:
        """Kill kvbus with SIGKILL, call ``between``, and start kvbus again with the same command line."""
        self.bus.kill()
        await between()
        self.bus.start_again()
        self._again()
        await self.subscribed()

    async def subscribed(self) -> None:
        """Wait until every router, at the engine and at kvbus, has subscribed."""
        await asyncio.gather(*(_wait_for_subscriptions(rank) for rank in self.ranks), self._behind_is_subscribed())

    async def settle(self) -> None:
        """Wait until every router's view is exact, or has stayed wrong for `PATIENT` seconds."""
        await self.scores(PATIENT, PATIENT)

    async def scores(self, *quiet: float) -> tuple[Score, Score]:
        """Return the score of the router at the engine and the score of the router at kvbus.

        A wrong score counts only if it has not changed for some seconds. ``quiet`` has this time for each of the two
        routers.
        """
        sides = zip(self.sides, quiet, strict=True)
        direct, behind = await asyncio.gather(*(self._settled(side, seconds) for side, seconds in sides))
        return direct, behind

    def _again(self) -> None:
        """Count one more subscription that each rank must receive, because a router or kvbus subscribes again."""
        for rank in self.ranks:
            rank.subscriptions += 1

    async def _behind_is_subscribed(self) -> None:
        wanted = len(self._behind.routers) * len(self._behind.lives)
        with contextlib.suppress(TimeoutError):
            await _until(lambda: self._subscribers() >= wanted, "routers at kvbus", RECONNECTED)

    async def _unsubscribed(self) -> None:
        await _until(lambda: self._subscribers() == 0, "no router at kvbus")

    def _subscribers(self) -> float:
        return self.bus.metric('kvbus_output_subscribers{output="routers"}')

    async def _settled(self, side: Side, quiet: float) -> Score:
        loop = asyncio.get_running_loop()
        last: Score | None = None
        since = loop.time()
        while True:
            found = [score(await router.held(self.known), self.live) for router in side.routers]
            now = Score(sum(each.missing for each in found), sum(each.dead for each in found))
            if now != last:
                last, since = now, loop.time()
            elif loop.time() > since + (0.3 if now == Score(0, 0) else quiet):
                return now
            await asyncio.sleep(0.1)


async def _until(condition: Callable[[], bool], what: str, patience: float = 60.0) -> None:
    try:
        async with asyncio.timeout(patience):
            while not condition():  # noqa: ASYNC110 - other processes say it
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise TimeoutError(f"not within {patience:g} s: {what}") from None


async def _wait_for_subscriptions(rank: Rank) -> None:
    with contextlib.suppress(TimeoutError):
        await rank.publisher.wait_for_subscriber(RECONNECTED, count=rank.subscriptions)


@contextlib.asynccontextmanager
async def running(
    kind: Kind,
    directory: Path,
    *,
    ranks: int = 1,
    cache: Mapping[str, int] | None = None,
    layout: Layout = "per_source",
    **config: Any,
) -> AsyncIterator[Scene]:
    """Run an engine and kvbus, and yield the set-up for a case. The case itself starts the routers."""
    async with contextlib.AsyncExitStack() as stack:
        own, ports = ports_in_a_row(8), ports_in_a_row(8)
        engine = [Rank(number, own, kind, **(cache or {})) for number in range(ranks)]
        for rank in engine:
            await stack.enter_async_context(rank.publisher)
        output = {
            "endpoint": f"tcp://127.0.0.1:{ports}",
            "replay_endpoint": f"tcp://127.0.0.1:{ports + REPLAY}",
            "layout": layout,
            **kind.output,
        }
        source = {
            "name": "engine",
            "endpoint": engine[0].publisher.endpoint,
            "replay_endpoint": engine[0].publisher.replay_endpoint,
            "data_parallel_size": ranks,
        }
        bus = stack.enter_context(Kvbus(engine[0].publisher, directory, output, sources=[source], **config))
        for rank in engine:
            rank.subscriptions = 1
            await rank.publisher.wait_for_subscriber(60)
        streams = {"direct": (own, ranks), "kvbus": (ports, ranks if layout == "per_source" else 1)}
        sides = []
        for name, (first, count) in streams.items():
            links = []
            for at in range(count):
                host, live, replay = kind.listens()
                links.append(
                    (
                        Link(f"{name}-{at}", live, first + at, "server", host),
                        Link(f"{name}-{at}-replay", replay, first + REPLAY + at, None, host),
                    )
                )
            side = Side(kind, directory, name, links)
            stack.push_async_callback(side.close)
            await side.start()
            sides.append(side)
        yield Scene(engine, bus, *sides)
