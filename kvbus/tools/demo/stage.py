"""What is on the stage of the demo: simulated engines, ``kvbus run`` in a process of its own, and routers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvbus.client import BlockView, Received, Restarted, Subscriber
from kvbus.common.errors import ExitCode, KvbusError
from kvbus.core.types import Reason, medium_key
from kvbus.core.wire.codec import decode_batch
from kvbus.tools.asking import Login, NoAnswerError, asking, get
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import synthetic
from kvbus.transport.client.rawsub import RawSubscriber
from kvbus.transport.engine.publisher import EnginePublisher

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvbus.client import Update


CAST: Final = (
    ("vllm-a", "vllm-0.33", 12.0, 400),
    ("vllm-b", "vllm-0.33", 11.0, 400),
    ("sglang", "sglang-0.5.23", 9.0, 500),
)
"""Of each engine: its name, the release it imitates, its batches per second, its cache in blocks."""

Key = tuple[int | None, str, int | str]
"""(group, medium, hash). A hash of bytes is a hex string."""


async def pause(seconds: float, stop: asyncio.Event) -> None:
    """Wait for a time, or until ``stop`` is set."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), max(0.0, seconds))


class Engine:
    """An engine that publishes the events of its cache, and that can fail on request.

    Args:
        name: its name on the screen and in the bus.
        dialect: the release to imitate.
        rate: batches per second.
        blocks: size of its cache.
        seed: seed of its requests.
        directory: where its sockets are.
    """

    def __init__(self, name: str, dialect: str, rate: float, blocks: int, seed: int, directory: str) -> None:
        self.name: Final = name
        self.rate: Final = rate
        self.endpoint: Final = f"ipc://{directory}/{name}"
        self.replay_endpoint: Final = f"{self.endpoint}-replay"
        jobs = synthetic(seed, turn_tokens=96, output_tokens=96, max_tokens=2048)
        self._cache = SimEngine(dialect, jobs, options=EngineOptions(blocks=blocks, max_running=6))
        self._publisher = EnginePublisher(
            self.endpoint, self.replay_endpoint, bind=True, framing=self._cache.dialect.framing
        )
        self.published = 0
        """Batches published so far, over all restarts."""
        self._to_lose = 0
        self._known: set[Key] | None = None

    @property
    def losing(self) -> bool:
        """Whether batches are still to be lost."""
        return self._to_lose > 0

    @property
    def blocks(self) -> set[Key]:
        """The blocks in the engine's own cache."""
        if self._known is None:
            self._known = {(it["group_idx"], medium_key(it["medium"]) or "", it["hash"]) for it in self._cache.truth()}
        return self._known

    def open(self) -> None:
        """Bind the sockets."""
        self._publisher.start()

    def close(self) -> None:
        """Close the sockets."""
        self._publisher.close()

    def lose(self, batches: int) -> None:
        """Lose the next batches on the network. The engine still keeps them for a replay."""
        self._to_lose = batches

    def crash(self) -> None:
        """Restart with an empty cache, and number batches from 0 again."""
        self._publisher.restart()
        self._cache.restart()
        self._known = None

    async def serve(self, quiet: asyncio.Event) -> None:
        """Publish batches until ``quiet`` is set. Begin when kvbus and the direct router are connected."""
        while self._publisher.subscriptions < 2 and not quiet.is_set():
            await pause(0.01, quiet)
        while not quiet.is_set():
            payload = self._cache.step(time.time())
            if payload is not None:  # the workload is endless
                self._publisher.publish(payload, live=not self._to_lose)
                self.published += 1
            self._to_lose = max(0, self._to_lose - 1)
            self._known = None
            await pause(1 / self.rate, quiet)


_START_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.2


class BusError(KvbusError):
    """``kvbus run`` did not start."""

    exit_code = ExitCode.UNAVAILABLE


class Bus:
    """A ``kvbus run`` process that the demo starts, reads over HTTP, and kills.

    Args:
        engines: its sources.
        directory: for its configuration, state, log and sockets.
    """

    def __init__(self, engines: Sequence[Engine], directory: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.url: Final = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self.sources: list[dict[str, Any]] = []
        """The newest answer of ``/sources``; empty while kvbus is down."""
        self._process: asyncio.subprocess.Process | None = None
        self._directory: Final = Path(directory)
        endpoint = f"ipc://{directory}/kvbus"
        self.streams: Final = {
            engine.name: (f"{endpoint}-{stream}", f"{endpoint}-replay-{stream}")
            for stream, engine in enumerate(engines)
        }
        """The live and the replay endpoint for routers, by engine."""
        sources = [
            {"name": each.name, "endpoint": each.endpoint, "replay_endpoint": each.replay_endpoint} for each in engines
        ]
        output = {"name": "routers", "endpoint": endpoint + "-{rank}", "replay_endpoint": endpoint + "-replay-{rank}"}
        self._file: Final = self._directory / "kvbus.yaml"
        # JSON is YAML
        self._file.write_text(
            json.dumps(
                {
                    "http": self.url.removeprefix("http://"),
                    "state_dir": f"{directory}/state",
                    "sources": sources,
                    "outputs": [output],
                }
            )
        )

    @property
    def up(self) -> bool:
        """Whether kvbus runs and answers."""
        return bool(self.sources)

    def total(self, count: str) -> int:
        """Return one of the counts of ``/sources``, summed over the engines."""
        return sum(source["counts"][count] for source in self.sources)

    async def start(self) -> None:
        """Start the process, and wait until it answers.

        Raises:
            BusError: it ended, or it did not answer in time.
        """
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}
        log = self._directory / "log"
        with log.open("w") as errors:
            # in a session of its own: a Ctrl-C is for the demo alone, which then ends this process
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvbus", "run", str(self._file)),
                stdin=asyncio.subprocess.DEVNULL, stdout=errors, stderr=errors, env=env, start_new_session=True,
            )  # fmt: skip
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_SECONDS):
                while self._process.returncode is None and not self.up:  # noqa: ASYNC110 - `watch` sets no event
                    await asyncio.sleep(0.02)
        if not self.up:
            raise BusError("kvbus run did not start: " + " ".join(log.read_text().splitlines()[-1:]))

    async def kill(self) -> None:
        """Kill the process with SIGKILL, and wait for its end."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None
        self.sources = []

    async def watch(self) -> None:
        """Read ``/sources`` again and again, until cancelled."""
        async with Login().session() as session:
            while True:
                process, answer = self._process, []
                with contextlib.suppress(NoAnswerError):
                    async with asking(self.url, 2.0):
                        body, _ = await get(session, f"{self.url}/sources")
                        answer = json.loads(body)
                self.sources = answer if process is self._process and process is not None else []
                await asyncio.sleep(_POLL_SECONDS if self.up else 0.05)


class Router:
    """A router that follows kvbus with the client library.

    Args:
        name: its name on the screen.
        streams: the live and the replay endpoint, by engine.
    """

    behind_kvbus = True

    def __init__(self, name: str, streams: Mapping[str, tuple[str, str]]) -> None:
        self.name: Final = name
        self.views: dict[str, BlockView] = {}
        """The blocks of each engine; empty before it starts."""
        self.restarts = 0
        self._streams: Final = streams
        self._task: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """Whether it runs."""
        return self._task is not None

    @property
    def blocks(self) -> int:
        """The number of blocks that it holds."""
        return sum(len(view) for view in self.views.values())

    def wrong(self, engines: Sequence[Engine]) -> tuple[int, int]:
        """Count the blocks that only the engines have (missing), and those that only the router has (dead)."""
        missing = dead = 0
        for engine in engines:
            held: set[Key] = {
                (it.group_idx, it.medium, it.hash.hex() if isinstance(it.hash, bytes) else it.hash)
                for it in self.views[engine.name]
            }
            missing += len(engine.blocks - held)
            dead += len(held - engine.blocks)
        return missing, dead

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start without any block."""
        self.views = {name: self.new_view() for name in self._streams}
        self.restarts = 0
        self._task = group.create_task(self._run())

    async def stop(self) -> None:
        """Stop, and forget all blocks."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.views = {}

    def new_view(self) -> BlockView:
        """Return an empty view for a stream of kvbus."""
        return BlockView()

    async def follow(self, name: str, live: str, replay: str) -> None:
        """Apply the updates of one engine, until cancelled."""
        async for update in Subscriber(live, replay):
            self.apply(name, update)

    def apply(self, name: str, update: Update) -> None:
        """Apply one update."""
        self.restarts += isinstance(update, Restarted)
        self.views[name].update(update)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name, (live, replay) in self._streams.items():
                group.create_task(self.follow(name, live, replay))


class DirectRouter(Router):
    """A router that reads the engines themselves, in the way of llm-d-kv-cache 0.9.0 (docs/INTEROP.md).

    It asks for no replay and looks at no sequence number, so it notices neither a lost batch nor a restart. It counts
    copies of a block, so that only the faults make it wrong.
    """

    behind_kvbus = False

    def new_view(self) -> BlockView:
        """Return an empty view for a stream of an engine."""
        return BlockView(copies=True)

    async def follow(self, name: str, live: str, replay: str) -> None:  # noqa: ARG002 - it asks for no replay
        """Apply what arrives, until cancelled."""
        async with RawSubscriber(live) as messages:
            async for topic, seq, payload in messages:
                batch = decode_batch(payload)
                if not isinstance(batch, Reason):
                    self.apply(name, Received(int.from_bytes(seq, "big"), topic, batch))
