"""A region (engines, kvbus processes that write and read a log, and routers) whose processes are replaced under
traffic.

The engines, a kvbus beside each engine that writes to the log (a leaf), the log's server and two aggregators are
processes. When an aggregator ends, one of its routers goes to the other aggregator, and the other router waits until
the aggregator is back. New routers start at each quiet point. Each router must then hold the engines' blocks.
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
"""Number of batches that each engine publishes in a second."""

BLOCKS: Final = 600
DECODE: Final = 8
"""Number of tokens that a running request of a simulated engine generates in a step."""


RECORDS: Final = "kvbus_discovery_records_total"

PATIENCE: Final = 120.0
"""Maximum seconds for which a test waits for a condition. An idle machine needs a few seconds."""


class Region:
    """The processes of a region, and the routers in this process.

    Args:
        kind: the log.
        server: the running server of the log.
        directory: directory for configurations, logs and sockets.
        stack: exit stack that stops the started processes.
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
                state_dir=None if number else str(directory / "state"),  # only leaf 0 keeps its state
            )
            for number, (live, replay) in enumerate(each)
        ]
        self.aggregators = [Aggregator(kind, directory, name) for name in ("one", "other")]
        self.dropped: Counter[str] = Counter()
        """Number of batches that stopped leaves had dropped, by reason."""
        self._said: dict[tuple[bytes, int], set[str]] = {}
        self.routers: list[Noting] = []
        self._truths = 0

    async def start(self) -> None:
        """Start all processes and routers, and wait until each router holds the engines' blocks."""
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
        """Return a new router of an aggregator, with an empty view."""
        router = Noting(aggregator.endpoint, self._said)
        self._stack.callback(router.close)
        return router

    async def ready(self, *processes: Process) -> None:
        """Wait until the readiness probes of these processes succeed."""
        for process in processes:
            await eventually(lambda process=process: process.ready(), f"{process.name}", PATIENCE)

    def run(self) -> None:
        """Let the engines publish batches until `pause` is called."""
        self._engines.run(RATE)

    def pause(self) -> dict[bytes, set[int]]:
        """Let the engines stop publishing, and return the blocks that each of them holds, by its topic."""
        self._truths += 1
        truth = self._engines.pause(self._directory / f"truth-{self._truths}")
        return dict(zip(self.topics, truth, strict=True))

    async def quiet(self, unread: bytes = b"", *at: Aggregator) -> None:
        """Let the engines stop publishing, and check that every router holds their blocks.

        A new router at each aggregator must hold them, too.

        Args:
            unread: topic of an engine whose blocks the routers of some aggregators lack.
            at: the aggregators whose routers lack them.
        """
        truth = self.pause()
        fresh = [self.router(each) for each in self.aggregators]
        for router in (*self.routers, *fresh):
            nothing = unread if router.at in [each.endpoint for each in at] else b""
            wanted = {topic: blocks for topic, blocks in truth.items() if topic != nothing}
            await eventually(lambda router=router, wanted=wanted: router.held == wanted, f"{router.at}", PATIENCE)
            # A new router may not know the topic of an engine without blocks.
            violations = [*router.violations, *(each for view in router.views.values() for each in view.violations)]
            assert not violations, f"{router.at}: {violations}"
        for router in fresh:
            router.disconnect()
        self.run()

    async def replace(self, process: Process, version: str) -> None:
        """Stop a process as the kubelet does, and start another version with the same configuration."""
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
        """Stop the log's server with SIGTERM, and start it again with its data."""
        await asyncio.to_thread(self._server.kill, signal.SIGTERM)
        await asyncio.to_thread(self._server.start)
