"""Engines as processes (`kvbus sim`, `kvbus play`), and the true contents of their caches."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import zmq

from kvbus.core.types import medium_key
from kvbus.tools.sim.dialects import DIALECTS
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import Job, synthetic
from tests.chaos.namespaces import Namespaces
from tests.chaos.plan import TRAFFIC, Shape
from tests.chaos.router import Key, digest, key_of, tokens_digest
from tests.doubles.child import Child, python

RATE: Final = 90.0
"""Number of batches that each rank publishes in a second."""

BLOCKS: Final = 600
_DIALECTS: Final = ("vllm-0.33", "sglang-0.5.23", "vllm-0.22", "sglang-0.5.9", "vllm-0.10.2", "dynamo-mocker")


@dataclass(slots=True)
class Truth:
    """The true content of a rank's cache: its blocks and their tokens."""

    keys: set[Key]
    tokens: str

    @property
    def digest(self) -> str:
        return digest(self.keys)


class Engine:
    """Base class of the two kinds of engine processes in a fault campaign.

    Args:
        shape: the cell's shape.
        host: address at which the engine listens, or to which it connects for its live stream.
        ports: live and replay port of rank 0.
        directory: directory of logs and truth files.
        place: the Linux namespaces in which the engine runs; None: the namespaces of the test's process.
    """

    def __init__(
        self, shape: Shape, host: str, ports: tuple[int, int], directory: Path, place: Namespaces | None, seed: int
    ) -> None:
        self.shape = shape
        self.host = host
        self.live, self.replay = ports
        self.directory = directory
        self.place = place
        self.rng = random.Random(f"engine/{seed}")
        self.child = Child("engine", [], directory, piped=shape.engine == "piped", on_line=self._line)
        self.lives = 0
        self._idle = asyncio.Event()

    @property
    def endpoints(self) -> list[str]:
        return [
            *("--endpoint", f"tcp://{self.host}:{self.live}", "--connect" if self.shape.dials_in else "--bind"),
            *("--replay-endpoint", f"tcp://{self.host}:{self.replay}"),
        ]

    def _line(self, line: str) -> None:
        if "the workload has ended" in line:
            self._idle.set()

    def _command(self, *arguments: str) -> list[str]:
        command = python("kvbus", *arguments, *self.endpoints)
        return self.place.inside(command) if self.place else command

    async def begin(self, seed: int) -> None:
        """Begin to publish the batches of a round."""
        raise NotImplementedError

    async def revive(self) -> None:
        """Start the engine again after a SIGKILL, in a new epoch, and continue the round's traffic."""
        raise NotImplementedError

    async def idle(self) -> None:
        """Wait until the engine has published all batches of the round."""
        await self._idle.wait()

    async def truths(self) -> list[Truth]:
        """Return the true content of each rank's cache. Some kinds of engines must end their process to report it."""
        raise NotImplementedError

    async def last_seqs(self) -> list[int]:
        """Return the newest seq of each rank, by a replay request that does not pass through a proxy."""
        return [await self._ask(self.replay + rank) for rank in range(self.shape.ranks)]

    async def _ask(self, port: int) -> int:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        last = -1
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.connect(f"tcp://{self.host}:{port}")
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        loop = asyncio.get_running_loop()
        end = loop.time() + 60
        try:
            while True:
                while not dealer.poll(0):
                    assert loop.time() < end, f"{self.child.name} does not answer on its own replay"
                    await asyncio.sleep(0.005)
                frames = dealer.recv_multipart()
                if frames[-2] == b"\xff" * 8:
                    return last
                last = int.from_bytes(frames[-2], "big")
        finally:
            dealer.close(0)

    async def close(self) -> None:
        await self.child.close()


class SimProcess(Engine):
    """The engine `kvbus sim`: a new process each round, which writes its cache's content to a file on SIGTERM."""

    async def begin(self, seed: int) -> None:
        await self.child.close()  # for kvbus this is a crash of the last round's engine
        self.rng = random.Random(f"engine/{seed}")
        self._dialect = self.rng.choice(_DIALECTS)
        await self.revive()

    async def revive(self) -> None:
        self.lives += 1
        self._idle.clear()
        self._truth = self.directory / f"truth-{self.lives}.json"
        requests = int(RATE * TRAFFIC / 6)
        tiers = ["--tier", "CPU=300"] if self._dialect == "vllm-0.33" and self.rng.random() < 0.5 else []
        self.child.command = self._command(
            *("sim", "--dialect", self._dialect, "--seed", str(self.rng.randrange(1 << 30)), "--rate", str(RATE)),
            *("--ranks", str(self.shape.ranks), "--requests", str(requests), "--blocks", str(BLOCKS), *tiers),
            *("--truth-file", str(self._truth)),
        )
        await self.child.start()

    async def truths(self) -> list[Truth]:
        await self.child.end(signal.SIGTERM)
        written = json.loads(self._truth.read_text())
        self._truth.unlink()
        ranks: list[list[dict[str, Any]]] = [[] for _ in range(self.shape.ranks)]
        for block in written["blocks"]:
            ranks[block["rank"]].append(block)
        return [truth_of(blocks) for blocks in ranks]


def truth_of(blocks: list[dict[str, Any]]) -> Truth:
    pairs = []
    for block in blocks:
        medium = medium_key(block["medium"])
        assert medium is not None, block["medium"]
        pairs.append((key_of(block["group_idx"], medium, block["hash"]), [*block["tokens"]]))
    return Truth({key for key, _ in pairs}, tokens_digest(pairs))


class PipedEngine(Engine):
    """The engine `kvbus play -`: a real publisher fed by a simulated cache, whose content can be read at any time."""

    def __init__(
        self, shape: Shape, host: str, ports: tuple[int, int], directory: Path, place: Namespaces | None, seed: int
    ) -> None:
        super().__init__(shape, host, ports, directory, place, seed)
        name = self.rng.choice(_DIALECTS)
        tiers = {"CPU": 300} if DIALECTS[name].media else {}
        jobs: Iterator[Job] = synthetic(seed, max_tokens=2048)
        self._cache = SimEngine(name, jobs, options=EngineOptions(blocks=BLOCKS, tiers=tiers))
        self._seq = 0
        self._feeder: asyncio.Task[None] | None = None
        self._feeding = asyncio.Lock()
        framing = DIALECTS[name].framing
        self.child.command = self._command("play", "-", "--rate", "100000", "--framing", framing)

    async def begin(self, seed: int) -> None:
        del seed
        if not self.child.running:
            await self._live()
        self._feeder = asyncio.ensure_future(self._feed(int(RATE * TRAFFIC)))

    async def _live(self) -> None:
        self.lives += 1
        self._seq = 0
        await self.child.start()

    async def revive(self) -> None:
        async with self._feeding:
            self._cache.restart()
            await self._live()

    async def _feed(self, batches: int) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        for _ in range(batches):
            due = max(due + 1 / RATE, loop.time() - 0.5)
            await asyncio.sleep(max(0.0, due - loop.time()))
            async with self._feeding:
                payload = self._cache.step(time.time())
                assert payload is not None, "an endless workload ended"
                await self._publish(payload)
        async with self._feeding:
            for payload in self._cache.flush(time.time()):
                await self._publish(payload)

    async def _publish(self, payload: bytes) -> None:
        """Write a batch to the engine's process.

        If the process is dead, the batch is lost. This does no harm, because the next process begins with an empty
        cache.
        """
        line = {"t": 0.0, "topic": "", "seq": self._seq, "payload": base64.b64encode(payload).decode()}
        self._seq += 1
        process = self.child.process
        if process is None or process.stdin is None or process.returncode is not None:
            return
        try:
            process.stdin.write(json.dumps(line).encode() + b"\n")
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError, RuntimeError):  # uvloop raises RuntimeError
            return

    async def idle(self) -> None:
        """Wait until the process has published all batches that were written to the pipe."""
        assert self._feeder is not None
        await self._feeder
        while await self._ask(self.replay) != self._seq - 1:  # noqa: ASYNC110 - told by the process
            await asyncio.sleep(0.02)

    async def truths(self) -> list[Truth]:
        return [truth_of(self._cache.truth())]

    async def close(self) -> None:
        if self._feeder is not None:
            self._feeder.cancel()
            await asyncio.gather(self._feeder, return_exceptions=True)
        await super().close()


ENGINES: Final[dict[str, type[Engine]]] = {"sim": SimProcess, "piped": PipedEngine}
