"""Tests that every kind of discovery fulfils its contract: see kvbus/parts/discovery/contract.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbus.config import parts
from kvbus.parts.discovery.contract import DiscoveryError, Engine, Publisher, Services, fitting_name
from tests.discovery.fleet import DiscoveringBus, Worker, running
from tests.discovery.worlds import Address, World
from tests.doubles.bus import eventually

SECONDS = 60


class DiscoveredSets:
    """The sets of engines that a discoverer returns, one after the other."""

    def __init__(self, world: World, ranks: int = 1) -> None:
        cls = parts.load(parts.DISCOVERY, world.kind)
        settings = cls.Settings.model_validate(world.settings)
        self.discoverer = cls(settings, Services("workers", ranks, asyncio.Event()))
        self.sets = self.discoverer.watch()

    async def next(self) -> dict[str, Engine]:
        async with asyncio.timeout(SECONDS):
            return {engine.name: engine for engine in await anext(self.sets)}

    async def becomes(self, expected: dict[str, tuple[Publisher, ...]]) -> None:
        """Wait until the discoverer returns exactly these engines. It may return other sets before."""
        async with asyncio.timeout(SECONDS):
            while {name: engine.publishers for name, engine in (await self.next()).items()} != expected:
                pass

    async def until_it_fails(self) -> list[dict[str, tuple[Publisher, ...]]]:
        """Return the sets of engines that the discoverer finds before it reports a failure."""
        seen: list[dict[str, tuple[Publisher, ...]]] = []

        async def follow() -> None:
            while True:
                seen.append({name: engine.publishers for name, engine in (await self.next()).items()})

        with pytest.raises(DiscoveryError, match=r"\S"):
            await follow()
        return seen


@contextlib.asynccontextmanager
async def watching(world: World, ranks: int = 1) -> AsyncIterator[DiscoveredSets]:
    watched = DiscoveredSets(world, ranks)
    try:
        yield watched
    finally:
        await watched.sets.aclose()


def expected_publishers(world: World, *numbers: int) -> dict[str, tuple[Publisher, ...]]:
    places = {world.name(number): world.place(number) for number in world.some(*numbers)}
    return {name: (Publisher(0, at.endpoint, at.replay_endpoint),) for name, at in places.items()}


def set_engines(world: World, *numbers: int) -> None:
    world.have({world.name(number): world.place(number) for number in world.some(*numbers)})


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_discoverer_first_returns_all_engines_with_their_endpoints(world):
    set_engines(world, 1, 2)
    async with watching(world) as watched:
        first = await watched.next()
        assert {name: engine.publishers for name, engine in first.items()} == expected_publishers(world, 1, 2)
        assert all(engine.where.startswith(world.kind) for engine in first.values())


async def test_a_discoverer_follows_engines_that_appear_and_leave(world):
    set_engines(world, 1)
    async with watching(world) as watched:
        await watched.becomes(expected_publishers(world, 1))
        for numbers in [(1, 2, 3), (3,), (1, 3), (2,)]:
            set_engines(world, *numbers)
            await watched.becomes(expected_publishers(world, *numbers))


async def test_a_discoverer_follows_an_engine_to_another_address(world):
    set_engines(world, 1, 2)
    async with watching(world) as watched:
        await watched.becomes(expected_publishers(world, 1, 2))
        world.have({world.name(number): world.place(number + 7) for number in world.some(1, 2)})
        moved = {
            world.name(number): expected_publishers(world, number + 7)[world.name(number + 7)]
            for number in world.some(1, 2)
        }
        await watched.becomes(moved)


async def test_a_discoverer_may_find_no_engine(world):
    set_engines(world)
    async with watching(world) as watched:
        await watched.becomes({})
        set_engines(world, 1)
        await watched.becomes(expected_publishers(world, 1))
        set_engines(world)
        await watched.becomes({})


async def test_a_discoverer_reports_an_unreachable_server_and_no_set_of_engines(world):
    """A discoverer that cannot reach its server reports a failure and no set of engines: an empty set would remove all
    engines.

    After the server has returned, a new watch by the discoverer works.
    """
    set_engines(world, 1)
    async with watching(world) as watched:
        await watched.becomes(expected_publishers(world, 1))
        world.fail()
        assert all(each == expected_publishers(world, 1) for each in await watched.until_it_fails())
    async with watching(world) as watched:
        assert await watched.until_it_fails() == []
    world.heal()
    async with watching(world) as watched:
        await watched.becomes(expected_publishers(world, 1))


async def test_a_discoverer_counts_ports_up_for_ranks_that_the_engine_does_not_name(world):
    if world.says_ranks:
        pytest.skip("the engine says its ranks")
    set_engines(world, 1)
    at = world.place(1)
    async with watching(world, ranks=3) as watched:
        await watched.becomes(
            {
                world.name(1): tuple(
                    Publisher(r, f"tcp://{at.host}:{at.port + r}", f"tcp://{at.host}:{at.replay_port + r}")
                    for r in range(3)
                )
            }
        )


async def test_an_invalid_entry_hides_no_other_engine_and_is_a_finding(world):
    """One entry is invalid: kvbus reads the other engine, and a finding names the entry, its value and a valid one.

    Once the entry is valid, the finding ends. If the entry becomes invalid again, its engine stays a source.
    """
    good, bad = (Worker(label, number) for number, label in enumerate(world.pair(), 1))
    places = {}
    for worker in (good, bad):
        await worker.start()
        places[worker.name] = Address(worker.host, *worker.ports)
    world.have(places)
    value = world.spoil(bad.name)
    bus = DiscoveringBus({world.kind: world.settings}, discovery_grace=0)

    def findings() -> list[str]:
        return [str(each) for each in bus.daemon.findings if each.id == "engine_invalid"]

    def invalid() -> bool:
        name = world.name(1) if world.one else bad.name
        said = f"the discovery workers finds {name} with an invalid value: "
        return any(said in each and value in each and "; for example " in each for each in findings())

    async with running(bus):
        await bus.sources(good.name)
        await eventually(invalid, "the finding")
        assert not bus.stats.failing
        world.have(places)
        await bus.sources(good.name, bad.name)
        await eventually(lambda: findings() == [], "the end of the finding")
        world.spoil(bad.name)
        await eventually(invalid, "the finding, again")
        await bus.exact(good, bad)
        assert bus.clears(good.name) == bus.clears(bad.name) == 0
    for worker in (good, bad):
        await worker.stop()


async def test_a_port_without_room_for_all_ranks_is_a_fault_of_its_engine_only(world):
    if world.says_ranks:
        pytest.skip("the engine says its ranks")
    world.have({world.name(1): world.place(1), world.name(2): Address("127.0.0.1", 65535, 7021)})
    async with watching(world, ranks=2) as watched:
        found = await watched.next()
    (fault,) = found[world.name(2)].faults
    assert "65535" in str(fault)
    assert "; for example " in str(fault)
    assert found[world.name(2)].publishers == found[world.name(1)].faults == ()
    assert len(found[world.name(1)].publishers) == 2


async def test_a_closed_discoverer_has_no_task_socket_or_file(world):
    set_engines(world, 1)
    tasks, descriptors = asyncio.all_tasks(), count_descriptors()
    async with watching(world) as watched:
        await watched.next()
    await eventually(lambda: not asyncio.all_tasks() - tasks, "no task of its own")
    await eventually(lambda: count_descriptors() <= descriptors, "no socket or file of its own")


async def test_discovered_engines_stay_sources_of_a_daemon_after_a_failure(world):
    workers = [Worker(world.name(n), n) for n in world.some(1, 2)]
    for worker in workers:
        await worker.start()
    places = {worker.name: Address(worker.host, *worker.ports) for worker in workers}
    world.have({world.name(1): places[world.name(1)]})
    bus = DiscoveringBus({world.kind: world.settings}, discovery_grace=0)
    async with running(bus):
        await bus.sources(world.name(1))
        world.fail()
        await eventually(lambda: bus.stats.failures, "a failure")
        assert set(bus.labels) == {world.name(1)}
        world.heal()
        world.have(places)
        await bus.sources(*places)
        await bus.exact(*workers)
        assert bus.clears(world.name(1)) == 0
    for worker in workers:
        await worker.stop()


@pytest.mark.parametrize("text", ["pod-a", "a.b_c-D9", "x" * 63])
def test_a_valid_engine_name_is_kept(text):
    assert fitting_name(text) == text


def test_invalid_engine_names_become_distinct_and_stable_names():
    texts = ["fd00::1", "fd00--1", "x" * 64, "x" * 65, "", "pod a", "pod/a", "é"]
    names = [fitting_name(text) for text in texts]
    assert len(set(names)) == len(texts)
    assert names == [fitting_name(text) for text in texts]
    assert all(len(name) <= 63 for name in names)
