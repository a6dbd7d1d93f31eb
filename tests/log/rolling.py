"""A region whose parts are replaced one after the other while its engines publish.

Engines, a leaf for each, a log's server and two aggregators are processes. Of the routers one goes to the other
aggregator when its own ends, one waits until its own is back, and new ones begin at each quiet point. Whoever is asked
then holds what the engines hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from pathlib import Path
from typing import Any, Final

from tests.doubles.bus import eventually
from tests.log.engines import EnginesProcess, Spec
from tests.log.processes import Aggregator, Noting, Process
from tests.ports import free_ports

ENGINES: Final = 2
RATE: Final = 30.0
"""Batches a second of each."""

BLOCKS: Final = 600
DECODE: Final = 8
"""Of each engine's cache, and tokens that a request makes in a step."""


RECORDS: Final = "kvbus_discovery_records_total"

PATIENCE: Final = 120.0
"""Seconds for whatever is to become true; a few of them where nothing else runs."""


class Region:
    """The processes, and the routers of this one.

    Args:
        kind: the log.
        server: where it is; it runs.
        directory: for configurations, logs and sockets.
        stack: ends what is started.
    """

    def __init__(self, kind: Any, server: Any, directory: Path, stack: contextlib.ExitStack) -> None:
        self._server, self._directory, self._stack = server, directory, stack
        self.topics = [f"kv@pod-{n}.engine.0@m".encode() for n in range(ENGINES)]
        ports = [free_ports(2) for _ in range(ENGINES)]
        each = [(f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}") for live, replay in ports]
        self._engines = EnginesProcess(Spec(each, BLOCKS, DECODE), directory / "engines.log")
        stack.callback(self._engines.close)
        ((name, keys),) = kind.settings().items()
        output = {"name": "log", "type": name, "endpoint": kind.endpoint, "token_ids": "keep", name: keys}
        self.leaves = [
            Process(
                directory,
                f"leaf-{number}",
                model="m",
                worker=f"pod-{number}",
                sources=[{"name": "engine", "endpoint": live, "replay_endpoint": replay}],
                outputs=[output],
                state_dir=None if number else str(directory / "state"),  # one begins with it, one asks its engine
            )
            for number, (live, replay) in enumerate(each)
        ]
        self.aggregators = [Aggregator(kind, directory, name) for name in ("one", "other")]
        self.dropped: Counter[str] = Counter()
        """Batches that leaves which have ended let go, by reason."""
        self._said: dict[tuple[bytes, int], set[str]] = {}
        self.routers: list[Noting] = []
        self._truths = 0

    async def start(self) -> None:
        """Everything, up to routers that hold all."""
        for process in (*self.leaves, *self.aggregators):
            process.start()
            self._stack.callback(process.close)
        await self.ready(*self.leaves, *self.aggregators)
        one, other = self.aggregators
        self.going, _, _ = self.routers = [self.router(each) for each in (one, one, other)]
        reading = asyncio.get_running_loop().create_task(self._read())
        self._stack.callback(reading.cancel)
        await self.quiet()

    async def _read(self) -> None:
        while True:
            for router in self.routers:
                router.read()
            await asyncio.sleep(0.005)

    def router(self, aggregator: Aggregator) -> Noting:
        """A router that knows nothing."""
        router = Noting(aggregator.endpoint, self._said)
        self._stack.callback(router.close)
        return router

    async def ready(self, *processes: Process) -> None:
        """Until their probes say so."""
        for process in processes:
            await eventually(lambda process=process: process.ready(), f"{process.name}", PATIENCE)

    def run(self) -> None:
        """Let the engines publish."""
        self._engines.run(RATE)

    def pause(self) -> dict[bytes, set[int]]:
        """Stop them; what each holds."""
        self._truths += 1
        truth = self._engines.pause(self._directory / f"truth-{self._truths}")
        return dict(zip(self.topics, truth, strict=True))

    async def quiet(self, unread: bytes = b"", *at: Aggregator) -> None:
        """Nobody publishes: each router, and a new one at each aggregator, holds the truth.

        Args:
            unread: topic of an engine of which routers hold nothing
            at: these aggregators.
        """
        truth = self.pause()
        fresh = [self.router(each) for each in self.aggregators]
        for router in (*self.routers, *fresh):
            nothing = unread if router.at in [each.endpoint for each in at] else b""
            wanted = {topic: blocks for topic, blocks in truth.items() if topic != nothing}
            await eventually(lambda router=router, wanted=wanted: router.held == wanted, f"{router.at}", PATIENCE)
            # a new one may not have heard yet of an engine that holds nothing
            violations = [*router.violations, *(each for view in router.views.values() for each in view.violations)]
            assert not violations, f"{router.at}: {violations}"
        for router in fresh:
            router.disconnect()
        self.run()

    async def replace(self, process: Process, version: str) -> None:
        """End it as the kubelet does, and start another version in its place."""
        if process in self.leaves:
            self.dropped.update(process.counts("kvbus_output_dropped_batches_total"))
        await asyncio.to_thread(process.stop)
        left = [each for each in self.aggregators if each is not process]
        if isinstance(process, Aggregator) and self.going.at == process.endpoint:
            self.going.go_to(left[0])
        process.version = version
        process.start()
        await self.ready(process)

    async def restart_server(self) -> None:
        """End the log's server with SIGTERM; it begins again with what it has on its disk."""
        await asyncio.to_thread(self._server.kill, signal.SIGTERM)
        await asyncio.to_thread(self._server.start)
