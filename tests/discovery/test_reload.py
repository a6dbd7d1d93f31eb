"""SIGHUP where engines are found: entries come, go and look elsewhere; who stays notices nothing."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from kvbus.config import Config, load
from kvbus.daemon.reload import Reloader
from tests.discovery.fleet import Bus, Worker, running, write
from tests.system.bus import eventually


@pytest.fixture
async def workers():
    made = [Worker(f"pod-{n}", n) for n in range(3)]
    for worker in made:
        await worker.start()
    yield made
    for worker in made:
        await worker.stop()


def entry(path: Any, name: str = "workers", **more: Any) -> dict[str, Any]:
    return {"name": name, "discover": {"file": {"path": str(path), "interval": 0.02}}, **more}


class Reloading:
    """A bus whose configuration can be another one after SIGHUP."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.settings = {**bus.config.to_dict(), "sources": []}
        self.reloader = Reloader(bus.daemon, self._load)

    def _load(self) -> Config:
        return load(None, env={}, overrides=self.settings)

    async def reload(self, outcome: str, *sources: dict[str, Any], **settings: Any) -> None:
        self.settings.update(sources=list(sources), **settings)
        counts = self.bus.daemon.process.config_reloads
        before = counts[outcome]
        self.reloader.reload()
        await eventually(lambda: counts[outcome] > before, f"a reload {outcome}")


@contextlib.asynccontextmanager
async def reloading(path: Any, **settings: Any) -> Any:
    bus = Bus(entry(path)["discover"], **settings)
    async with running(bus):
        made = Reloading(bus)
        try:
            yield bus, made.reload
        finally:
            made.reloader.close()


async def test_a_configured_source_joins_beside_those_that_were_found(tmp_path, workers):
    one, two, _ = workers
    file = tmp_path / "a"
    write(file, [one.entry])
    async with reloading(file) as (bus, reload):
        await bus.sources("pod-0")
        source, slot = bus.source("pod-0"), bus.labels["pod-0"]
        await reload("applied", two.entry, entry(file))
        await bus.sources("pod-0", "pod-1")
        await bus.exact(one, two)
        assert (bus.source("pod-0"), bus.labels["pod-0"], bus.clears("pod-0")) == (source, slot, 0)
        await reload("applied", entry(file))
        await bus.sources("pod-0")
        await bus.exact(one)


async def test_an_entry_that_looks_elsewhere_keeps_its_engines_until_it_has_an_answer(tmp_path, workers):
    one, two, _ = workers
    before, after = tmp_path / "a", tmp_path / "b"
    write(before, [one.entry])
    async with reloading(before, discovery_grace=0) as (bus, reload):
        await bus.sources("pod-0")
        source = bus.source("pod-0")
        await reload("applied", entry(after))
        await eventually(lambda: "/b: " in bus.stats.failing, "it looks elsewhere")
        assert bus.source("pod-0") is source
        write(after, [one.entry, two.entry])
        await bus.sources("pod-0", "pod-1")
        await bus.exact(one, two)
        assert (bus.source("pod-0"), bus.clears("pod-0")) == (source, 0)
        write(before, [])
        assert bus.stats.changes == {"joined": 2}


async def test_an_entry_that_goes_takes_its_engines_along_at_once(tmp_path, workers):
    one, two, three = workers
    first, second = tmp_path / "a", tmp_path / "b"
    write(first, [one.entry])
    write(second, [two.entry, three.entry])
    async with reloading(first, discovery_grace=1000) as (bus, reload):
        await reload("applied", entry(first), entry(second, "others"))
        await bus.sources("pod-0", "pod-1", "pod-2")
        assert [stats.name for stats in bus.daemon.discoveries] == ["workers", "others"]
        await reload("applied", entry(first))
        await bus.sources("pod-0")
        await bus.exact(one)
        assert [stats.name for stats in bus.daemon.discoveries] == ["workers"]


async def test_the_last_entry_goes_and_another_comes(tmp_path, workers):
    one, two, _ = workers
    file = tmp_path / "a"
    write(file, [one.entry])
    async with reloading(file) as (bus, reload):
        await bus.sources("pod-0")
        await reload("applied", two.entry)
        await bus.sources("pod-1")
        await reload("applied", two.entry, entry(file, "again"))
        await bus.sources("pod-0", "pod-1")
        await bus.exact(one, two)


async def test_what_is_refused_leaves_discovery_as_it_is(tmp_path, workers):
    one, two, _ = workers
    file = tmp_path / "a"
    write(file, [one.entry])
    async with reloading(file) as (bus, reload):
        await bus.sources("pod-0")
        await reload("refused", entry(tmp_path / "b"), heartbeat=3)
        write(file, [one.entry, two.entry])
        await bus.sources("pod-0", "pod-1")
        await bus.exact(one, two)


async def test_another_grace_holds_from_then_on(tmp_path, workers):
    one, two, _ = workers
    file = tmp_path / "a"
    write(file, [one.entry, two.entry])
    async with reloading(file, discovery_grace=1000) as (bus, reload):
        await bus.sources("pod-0", "pod-1")
        await reload("applied", entry(file), discovery_grace=0)
        write(file, [one.entry])
        await bus.sources("pod-0")
