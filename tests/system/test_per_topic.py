"""Tests for ``layout: per_topic``: one endpoint, on which each worker has its own topic, seqs and state."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from kvbus.core.stats import OutputStats
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.doubles.socket_routers import TopicRouter
from tests.ports import ports_in_a_row
from tests.state.left import opened
from tests.system.test_reload import Fleet, at, running

OUTPUT = {"layout": "per_topic", "topic": "kv@{source}.{rank}@m", "replay_endpoint": None}


def topic(name: str, rank: int = 0) -> bytes:
    return f"kv@{name}.{rank}@m".encode()


@contextlib.contextmanager
def reading(*routers: TopicRouter) -> Iterator[None]:
    try:
        yield
        for router in routers:
            router.read()
            assert router.violations == []
            assert [view.violations for view in router.views.values() if view.violations] == []
    finally:
        for router in routers:
            router.close()


class Workers:
    """Running engines by name, and the blocks that each engine holds."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.holds: dict[bytes, set[int | bytes]] = {}
        self._stack = contextlib.AsyncExitStack()
        self._engines: dict[bytes, EnginePublisher] = {}
        self._next = 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self, n: int, name: str) -> None:
        await self.start_rank(self.fleet.engine(n), name, 0)

    async def start_rank(self, publisher: EnginePublisher, name: str, rank: int) -> None:
        await self.begin(publisher, name, rank)
        await publisher.wait_for_subscriber(60)

    async def begin(self, publisher: EnginePublisher, name: str, rank: int) -> None:
        """Start the event publisher of one rank of the worker ``name``, without waiting until kvbus subscribes."""
        self._engines[topic(name, rank)] = await self._stack.enter_async_context(publisher)
        self.holds[topic(name, rank)] = set()

    def publish(self, name: str, rank: int = 0, count: int = 1) -> None:
        for _ in range(count):
            self._engines[topic(name, rank)].publish(batch(store([self._next]), rank=rank))
            self.holds[topic(name, rank)].add(self._next)
            self._next += 1

    def all_publish(self) -> None:
        for each in self.fleet.sources:
            self.publish(each["name"])

    @property
    def truth(self) -> dict[bytes, set[int | bytes]]:
        """Return the blocks of the engines that kvbus has as sources, by topic."""
        names = {topic(each["name"], rank) for each in self.fleet.sources for rank in range(8)}
        return {name: blocks for name, blocks in self.holds.items() if name in names and blocks}

    async def exact(self, *routers: TopicRouter) -> None:
        for router in routers:
            await eventually(lambda router=router: router.held == self.truth, "an exact router")


async def test_a_router_gets_the_states_of_the_worker_topics_it_subscribes_to() -> None:
    """Two engines, one with three ranks, share one endpoint.

    Each rank has a topic, and a router gets the states of the topics to which it subscribes.
    """
    fleet = Fleet("b", output=OUTPUT)
    first = ports_in_a_row(8)
    async with running(fleet), Workers(fleet) as workers:
        early = TopicRouter(at(fleet.out))
        with reading(early):
            a = {"name": "a", "endpoint": at(first), "replay_endpoint": at(first + 4), "data_parallel_size": 3}
            fleet.sources = [a, *fleet.sources]
            await fleet.reload()
            for rank in range(3):
                await workers.start_rank(EnginePublisher(at(first + rank), at(first + 4 + rank), bind=True), "a", rank)
            await workers.start(0, "b")
            for name, rank in (("a", 0), ("a", 1), ("a", 2), ("b", 0)):
                workers.publish(name, rank, count=5)
            await workers.exact(early)
            late, alone = TopicRouter(at(fleet.out)), TopicRouter(at(fleet.out), topic("a", 1))
            with reading(late, alone):
                await workers.exact(late)
                only = {topic("a", 1): workers.holds[topic("a", 1)]}
                await eventually(lambda: alone.held == only, "one worker's state")
                workers.publish("a", 1)
                workers.publish("b")
                await workers.exact(early, late)
                await eventually(lambda: alone.held == only, "one worker's batch")
                assert set(alone.views) == {topic("a", 1)}
                late.disconnect()
                workers.publish("a", 2, count=3)
                late.connect()
                await workers.exact(early, late)
                [*_, view] = [view for view in fleet.daemon.outputs.drivers[0].routers if view.left is None]
                assert (view.stream, view.state) == (0, "live")
                assert fleet.daemon.output_stats[0].routers == 3


def _lose_the_state(directory: Path) -> None:
    with opened(directory) as store:
        store.wipe()


async def test_outputs_with_topics_and_with_ports_follow_a_replaced_source() -> None:
    """A source is removed, and another source gets its slot. kvbus has an output with ports and an output with topics.

    At the output with ports, the slot has a fixed port, so the stream at this port continues with the new source.

    At the output with topics, each source has its own topic. So the stream of the removed source ends, and a new stream
    begins.
    """
    ports = ports_in_a_row(4)
    output = {"name": "routers", "endpoint": at(ports), **OUTPUT}
    by_port = {"name": "ports", "endpoint": at(ports + 1), "heartbeat": 0}
    fleet = Fleet("ab", outputs=[output, by_port])
    async with running(fleet), Workers(fleet) as workers:
        router, reader = TopicRouter(at(ports)), TopicRouter(at(ports + 2))
        with reading(router, reader):
            for n, name in enumerate("ab"):
                await workers.start(n, name)
                workers.publish(name, count=3)
            await workers.exact(router)
            await eventually(lambda: reader.blocks(b"") == workers.holds[topic("b")], "the port")
            fleet.sources = [fleet.source(0, "a"), fleet.source(2, "x")]
            await fleet.reload()
            await workers.start(2, "x")
            workers.publish("x")
            await workers.exact(router)
            await eventually(lambda: reader.blocks(b"") == workers.holds[topic("x")], "the same port")
            assert topic("b") in router.views


async def test_an_output_with_topics_may_connect_to_a_listening_router() -> None:
    """With ``bind: false``, kvbus sends all workers through one connection to a router that listens."""
    fleet = Fleet("ab", output={**OUTPUT, "bind": False})
    router = TopicRouter(at(fleet.out), b"kv@", bind=True)
    with reading(router):
        async with running(fleet), Workers(fleet) as workers:
            for n, name in enumerate("ab"):
                await workers.start(n, name)
                workers.publish(name, count=3)
            await workers.exact(router)
            router.disconnect()
            workers.publish("a")
            await eventually(router.listen_again, "its own address")
            await workers.exact(router)


@pytest.mark.parametrize("seed", range(4))
async def test_readers_are_exact_and_no_seq_goes_back_after_random_source_changes(tmp_path: Path, seed: int) -> None:
    """Sources join, leave and change their order in the configuration, which allows at most six sources.

    kvbus restarts with and without its state, and routers disconnect.
    """
    rng = random.Random(seed)
    names = "abcdefghij"
    fleet = Fleet("abc", output=dict(OUTPUT), state_dir=str(tmp_path), limits={"max_sources": 6})
    everybody = {name: fleet.source(n, name) for n, name in enumerate(names)}
    async with Workers(fleet) as workers:
        for n, name in enumerate(names):
            await workers.begin(fleet.engine(n), name, 0)
        stays, away = TopicRouter(at(fleet.out)), TopicRouter(at(fleet.out))
        with reading(stays, away):
            for _ in range(4):
                async with running(fleet):
                    stats = fleet.daemon.output_stats[0]

                    def both(stats: OutputStats = stats) -> bool:
                        for router in (stays, away):
                            router.read()  # libzmq sends its subscriptions again when the socket is used
                        return stats.subscribers == 2

                    await eventually(both, "both routers")
                    for _ in range(4):
                        chosen = rng.sample(names, rng.randrange(1, 7))
                        if rng.random() < 0.5:
                            away.disconnect()
                        fleet.sources = [everybody[name] for name in chosen]
                        await fleet.reload()
                        present = fleet.daemon.relay.present
                        await eventually(
                            lambda present=present: all(source.state == "live" for source in present),
                            "every source",
                        )
                        workers.all_publish()
                        await workers.exact(stays)
                        away.disconnect()
                        away.connect()
                        known = {topic(*worker) for worker in fleet.daemon.placement.slots}
                        await eventually(
                            lambda known=known: (
                                {at: held for at, held in away.held.items() if at in known} == workers.truth
                            ),
                            "what is remembered",
                        )
                if rng.random() < 0.5:
                    _lose_the_state(tmp_path)
                fleet.daemon = type(fleet.daemon)(fleet.load())
            await fleet.daemon.close(drain=0)
