"""A kvbus that discovers its engines, engines that run on loopback, and a router that must hold exactly their
blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

from kvbus.config import load
from kvbus.daemon.daemon import Daemon
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import PATIENCE, eventually
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.doubles.router import RankedRouter
from tests.doubles.runtimes import runtime_of
from tests.doubles.socket_routers import RouterOnASet
from tests.ports import free_ports


class Worker:
    """An engine with a name. While it runs, it stores a new block every 10 ms."""

    def __init__(self, name: str, number: int, host: str = "127.0.0.1", ports: list[int] | None = None) -> None:
        self.name = name
        self.number = number
        self.host = host
        self.ports = ports or free_ports(2)
        self.publisher = EnginePublisher(self.endpoint, self.replay_endpoint, bind=True)
        self.stored: set[int] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.host}:{self.ports[0]}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://{self.host}:{self.ports[1]}"

    @property
    def entry(self) -> dict[str, Any]:
        return {"name": self.name, "endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}

    async def start(self) -> None:
        await self.publisher.__aenter__()
        self._task = asyncio.create_task(self._publish())

    async def _publish(self) -> None:
        while True:
            block = self.number * 1_000_000 + self.publisher.next_seq + 1
            self.stored.add(block)
            self.publisher.publish(batch(store([block])))
            await asyncio.sleep(0.01)

    async def rest(self) -> None:
        """Stop publishing batches. The engine keeps the blocks in its cache."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def go_on(self) -> None:
        self._task = asyncio.create_task(self._publish())

    async def stop(self) -> None:
        await self.rest()
        await self.publisher.__aexit__(None, None, None)


class DiscoveringBus:
    """A kvbus daemon with discovered sources and one merged output, and a router that reads it from the start."""

    def __init__(self, discover: dict[str, Any], **settings: Any) -> None:
        self.ports = settings.pop("ports", None) or free_ports(2)
        self.out, self.out_replay = (f"tcp://127.0.0.1:{port}" for port in self.ports)
        source = {"name": "workers", "discover": discover, **settings.pop("source", {})}
        overrides = {
            "sources": [*settings.pop("fixed", []), source],
            "outputs": [
                {"endpoint": self.out, "replay_endpoint": self.out_replay, "layout": "merged", "heartbeat": 0.2}
            ],
            "http": "127.0.0.1:0",
            "discovery_grace": 0.2,
            "probe_interval": 0.2,
            "replay_timeout": 1.0,
            "source_timeout": 60,
            **settings,
        }
        self.config = load(None, env={}, overrides=overrides)
        self.daemon = Daemon(self.config, runtime=runtime_of(settings))
        self.router = RouterOnASet(self.out, self.out_replay)
        self.view = RankedRouter()
        self.router.view = cast("Any", self.view)

    @property
    def labels(self) -> dict[str, int]:
        return {stream.label: slot for slot, stream in self.daemon.streams.items()}

    @property
    def stats(self) -> Any:
        return self.daemon.discovery.stats[0]

    def source(self, label: str) -> Any:
        return self.daemon.relay.sources[self.labels[label]]

    def live(self, *names: str) -> bool:
        return set(names) == set(self.labels) and all(self.source(name).state == "live" for name in names)

    async def sources(self, *names: str) -> None:
        """Wait until exactly these workers are sources, and all of them are live."""
        await eventually(lambda: self.live(*names), f"the sources {names}, not {self.labels}")

    async def exact(self, *workers: Worker) -> None:
        """Stop these workers' traffic, and wait until the router holds exactly their blocks, by rank."""
        for worker in workers:
            await worker.rest()
        truth = {self.labels[worker.name]: worker.stored for worker in workers if worker.stored}
        end = asyncio.get_running_loop().time() + PATIENCE
        while True:
            await self.router.follow()
            known = {rank: blocks for rank, blocks in self.view.hashes().items() if blocks}
            if known == truth:
                break
            assert asyncio.get_running_loop().time() < end, (known, truth)
            await asyncio.sleep(0.01)
        assert self.view.violations == []
        assert self.router.went_back == 0

    def clears(self, name: str) -> int:
        """Return how often the router's view of a worker was cleared."""
        view = self.view.views.get(self.labels[name])
        return 0 if view is None else view.clears


def write(path: Path, workers: list[Any]) -> None:
    """Replace a file with a list of engines atomically, by a rename."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(workers))
    new.rename(path)


@contextlib.asynccontextmanager
async def running(bus: DiscoveringBus) -> AsyncIterator[DiscoveringBus]:
    await bus.daemon.start()
    bus.router.subscribe()
    try:
        yield bus
    finally:
        bus.router.close()
        await bus.daemon.close(drain=0)
