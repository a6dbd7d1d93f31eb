"""Tests for a client that reads many workers with one subscription, at a real kvbus with ``layout: per_topic``."""

from __future__ import annotations

import asyncio
import contextlib

from kvbus.client import BlockView, Lost, PrefixRouter, Received, Subscriber, Worker
from tests.doubles.bus import eventually
from tests.doubles.payloads import tokens_of
from tests.system.test_per_topic import OUTPUT, Workers, topic
from tests.system.test_reload import Fleet, at, running


class Views:
    """One view of blocks for each topic, as an application would keep them."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.views: dict[bytes, BlockView] = {}
        self.lost: list[bytes] = []
        self._subscriber = subscriber

    async def follow(self) -> None:
        async for update in self._subscriber:
            if isinstance(update, Received | Lost):
                self.views.setdefault(update.topic, BlockView()).update(update)
            if isinstance(update, Lost):
                self.lost.append(update.topic)

    @property
    def held(self) -> dict[bytes, set[int | bytes]]:
        found = {name: {block.hash for block in view} for name, view in self.views.items()}
        return {name: blocks for name, blocks in found.items() if blocks}


async def test_a_subscriber_by_topic_has_the_blocks_of_each_worker() -> None:
    fleet = Fleet("abc", output=OUTPUT)
    async with running(fleet), Workers(fleet) as workers, contextlib.AsyncExitStack() as stack:
        for n, name in enumerate("abc"):
            await workers.start(n, name)
            workers.publish(name, count=3 + n)
        subscriber = Subscriber(at(fleet.out), by_topic=True)
        views = Views(subscriber)
        task = asyncio.ensure_future(views.follow())
        stack.push_async_callback(subscriber.aclose)
        await eventually(lambda: views.held == workers.truth, "the states")
        workers.all_publish()
        await eventually(lambda: views.held == workers.truth, "live batches")
        fleet.sources = fleet.sources[1:]
        await fleet.reload()
        await eventually(lambda: views.held == workers.truth, "the end of one")
        assert views.lost == []
        assert (subscriber.epoch, subscriber.duplicates) == (0, 0)
        await subscriber.aclose()
        await task


async def test_a_prefix_router_names_each_worker_by_its_topic() -> None:
    fleet = Fleet("ab", output=OUTPUT)
    async with running(fleet), Workers(fleet) as workers:
        for n, name in enumerate("ab"):
            await workers.start(n, name)
            workers.publish(name, count=2)
        async with PrefixRouter({"bus": Subscriber(at(fleet.out), by_topic=True)}) as router:
            await eventually(lambda: len(router) == 4, "both workers' blocks")
            for name in "ab":
                block, *_ = workers.holds[topic(name)]
                assert router.longest_prefix(tokens_of(block)) == {Worker(f"bus/{topic(name).decode()}", 0): 1}
            fleet.sources = fleet.sources[:1]
            await fleet.reload()
            await eventually(lambda: len(router) == 2, "one of them gone")
            assert router.status()["bus"].state == "live"
            router.discard("bus")
            assert len(router) == 0
