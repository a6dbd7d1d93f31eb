"""The programs that the demo runs: simulated engines, a separate ``kvbus run`` process, and routers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvbus.client import BlockView, Received, Restarted, Subscriber
from kvbus.common.errors import ExitCode, KvbusError
from kvbus.core.types import Reason, medium_key
from kvbus.core.wire.codec import decode_batch
from kvbus.tools.asking import Login, NoAnswerError, asking, get
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import synthetic
from kvbus.transport.client.raw import RawSubscriber
from kvbus.transport.engine.publisher import EnginePublisher

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvbus.client import Update

_START_SECONDS: Final = 30.0

Key = tuple[int | None, str, int | str]
"""The identity of a block: KV-cache group, medium and hash. A byte hash is a hex string."""


async def pause(seconds: float, stop: asyncio.Event) -> None:
    """Wait for ``seconds`` seconds, or until ``stop`` is set."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), max(0.0, seconds))


class Engine:
    """A simulated engine that publishes the events of its cache. The demo can make it lose batches or crash.

    Args:
        name: name of the engine on the screen and in kvbus.
        dialect: dialect of the engine release to simulate.
        rate: batches per second.
        blocks: size of the cache in blocks.
        seed: seed of the requests.
        directory: directory of the sockets.
    """

    def __init__(self, name: str, dialect: str, rate: float, blocks: int, seed: int, directory: str) -> None:
        self.name: Final = name
        self.dialect: Final = dialect
        self.endpoints: Final = (f"ipc://{directory}/{name}", f"ipc://{directory}/{name}-replay")
        self.published = 0
        self.losing = 0  # number of next batches that are not sent live; the engine buffers them for a replay
        self.blocks: set[Key] = set()
        self._rate = rate
        jobs = synthetic(seed, turn_tokens=96, output_tokens=96, max_tokens=2048)
        self._cache = SimEngine(dialect, jobs, options=EngineOptions(blocks=blocks, max_running=6))
        self._publisher = EnginePublisher(*self.endpoints, bind=True, framing=self._cache.dialect.framing)
        self.open = self._publisher.start
        self.close = self._publisher.close

    def crash(self) -> None:
        """Restart the engine with an empty cache. Its next batch has seq 0."""
        self._publisher.restart()
        self._cache.restart()
        self.blocks = set()

    async def serve(self, quiet: asyncio.Event) -> None:
        """Publish batches until ``quiet`` is set. Begin when kvbus and the demo's router `no kvbus` are connected."""
        while self._publisher.subscriptions < 2 and not quiet.is_set():
            await pause(0.01, quiet)
        while not quiet.is_set():
            payload = self._cache.step(time.time())
            if payload is not None:
                self._publisher.publish(payload, live=not self.losing)
                self.published += 1
            self.losing = max(0, self.losing - 1)
            self.blocks = {(it["group_idx"], medium_key(it["medium"]) or "", it["hash"]) for it in self._cache.truth()}
            await pause(1 / self._rate, quiet)


class BusError(KvbusError):
    """``kvbus run`` did not start."""

    exit_code = ExitCode.UNAVAILABLE


class Bus:
    """The ``kvbus run`` process of the demo. The demo starts it, reads its state over HTTP, and kills it.

    Args:
        engines: the engines that are the sources of the bus.
        directory: directory for the bus's configuration, state, log and sockets.
    """

    def __init__(self, engines: Sequence[Engine], directory: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.url: Final = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self.sources: list[dict[str, Any]] = []  # newest answer of /sources; empty while kvbus is down
        self._process: asyncio.subprocess.Process | None = None
        self._directory: Final = Path(directory)
        live, replay = f"ipc://{directory}/kvbus-", f"ipc://{directory}/kvbus-replay-"
        self.streams: Final = {each.name: (f"{live}{n}", f"{replay}{n}") for n, each in enumerate(engines)}
        configuration = {
            "http": self.url.removeprefix("http://"),
            "state_dir": f"{directory}/state",
            "sources": [
                {"name": each.name, "endpoint": each.endpoints[0], "replay_endpoint": each.endpoints[1]}
                for each in engines
            ],
            "outputs": [{"name": "routers", "endpoint": live + "{rank}", "replay_endpoint": replay + "{rank}"}],
        }
        (self._directory / "kvbus.yaml").write_text(json.dumps(configuration))  # JSON is valid YAML

    def total(self, count: str) -> int:
        """Return the sum over all engines of one counter in ``/sources``, such as ``batches``.

        ``count`` is the counter's name in the object ``counts``.
        """
        return sum(source["counts"][count] for source in self.sources)

    async def start(self) -> None:
        """Start the process, and wait until it answers over HTTP.

        Raises:
            BusError: the process ended, or did not answer in time.
        """
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}
        log = self._directory / "log"
        with log.open("w") as errors:
            # Start a new session, so that Ctrl-C signals only the demo, and not the bus. The demo kills the bus at its
            # end.
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvbus", "run", str(self._directory / "kvbus.yaml")),
                stdin=asyncio.subprocess.DEVNULL, stdout=errors, stderr=errors, env=env, start_new_session=True,
            )  # fmt: skip
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_SECONDS):
                while self._process.returncode is None and not self.sources:
                    await self.read()
                    await asyncio.sleep(0.02)
        if not self.sources:
            raise BusError("kvbus run did not start: " + " ".join(log.read_text().splitlines()[-1:]))

    async def kill(self) -> None:
        """Kill the process with SIGKILL, and wait for its end."""
        process, self._process, self.sources = self._process, None, []
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def read(self) -> None:
        """Request ``/sources`` of the bus, and store the answer in ``sources``."""
        process, answer = self._process, b"[]"
        with contextlib.suppress(NoAnswerError):
            async with asking(self.url, 2.0), Login().session() as session:
                answer, _ = await get(session, f"{self.url}/sources")
        if process is self._process is not None:  # ignore the answer if kvbus was killed or restarted meanwhile
            self.sources = json.loads(answer)


class Row(NamedTuple):
    """The comparison of one router's blocks with the engines' caches, which is shown as a row of the screen.

    ``blocks`` is the number of blocks that the router holds; None while the router does not run.
    """

    name: str
    direct: bool
    blocks: int | None = None
    missing: int = 0
    dead: int = 0

    @property
    def wrong(self) -> int:
        """Number of blocks that are wrong at the router: missing and dead ones together."""
        return self.missing + self.dead


class Router:
    """A router of the demo, which follows streams with kvbus's client library.

    Args:
        name: name of the router on the screen.
        streams: live endpoint and replay endpoint for each engine, by the engine's name.
        direct: whether the router reads the engines' own streams, and not those of kvbus. It then reads them as
            llm-d-kv-cache 0.9.0 does (docs/INTEROP.md): it requests no replay and ignores seqs, so it notices neither a
            lost batch nor a restart. But it counts copies of a block, so that its view is wrong only after a fault of
            the demo.
    """

    def __init__(self, name: str, streams: Mapping[str, tuple[str, str]], *, direct: bool = False) -> None:
        self.name: Final = name
        self.direct: Final = direct
        self.views: dict[str, BlockView] = {}  # blocks by engine; empty while the router does not run
        self.restarts = 0
        self._streams: Final = streams
        self._tasks: list[asyncio.Task[None]] = []

    def compare(self, engines: Sequence[Engine]) -> Row:
        """Compare the router's blocks with the engines' caches, and count the missing and dead blocks."""
        if not self.views:
            return Row(self.name, self.direct)
        have = {(engine.name, *block) for engine in engines for block in engine.blocks}
        blocks = {
            (name, it.group_idx, it.medium, it.hash.hex() if isinstance(it.hash, bytes) else it.hash)
            for name, view in self.views.items() for it in view
        }  # fmt: skip
        return Row(self.name, self.direct, len(blocks), len(have - blocks), len(blocks - have))

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start the router without blocks, and follow all its streams."""
        self.views = {name: BlockView(copies=self.direct) for name in self._streams}
        self.restarts = 0
        self._tasks = [group.create_task(self.follow(name, *endpoints)) for name, endpoints in self._streams.items()]

    async def stop(self) -> None:
        """Stop following the streams, and delete the router's blocks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks, self.views = [], {}

    async def follow(self, name: str, live: str, replay: str) -> None:
        """Apply every update of one engine's stream until the task is cancelled."""
        if not self.direct:
            async for update in Subscriber(live, replay):
                self.apply(name, update)
            return
        async with RawSubscriber(live) as messages:
            async for topic, seq, payload in messages:
                batch = decode_batch(payload)
                if not isinstance(batch, Reason):
                    self.apply(name, Received(int.from_bytes(seq, "big"), topic, batch))

    def apply(self, name: str, update: Update) -> None:
        """Apply one update to the router's blocks of an engine. If the update is a restart, count it.

        ``name`` is the name of the engine.
        """
        self.restarts += isinstance(update, Restarted)
        self.views[name].update(update)
