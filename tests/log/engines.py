"""Simulate several engines in one process, for tests with logs. Each has a full cache and its own endpoints.

The process reads commands as lines of JSON from stdin. ``{"do": "run", "rate": 2}`` lets each engine publish two
batches a second, at random times. ``{"do": "pause", "truth": PATH}`` stops them, and writes the blocks that each engine
holds.
"""

from __future__ import annotations

import heapq
import random
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvbus.tools.sim.dialects import DIALECTS
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import synthetic
from kvbus.transport.engine.publisher import EnginePublisher


class Spec(msgspec.Struct):
    """The endpoints and the caches of the simulated engines.

    Attributes:
        endpoints: live endpoint and replay endpoint of each engine.
        blocks: number of blocks of each cache.
        decode: number of tokens that a running request generates in a step.
    """

    endpoints: list[tuple[str, str]]
    blocks: int
    decode: int


class EnginesProcess:
    """A handle of the process with the simulated engines. When it has been created, their caches are full."""

    def __init__(self, spec: Spec, log: Path) -> None:
        command = [sys.executable, "-m", "tests.log.engines", msgspec.json.encode(spec).decode()]
        self._log = log
        with log.open("wb") as said:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said)
        self._answered()

    def run(self, rate: float) -> None:
        """Let each engine publish ``rate`` batches a second."""
        self._told({"do": "run", "rate": rate})

    def pause(self, truth: Path) -> list[set[int]]:
        """Stop publishing, and return the blocks that each engine holds.

        The process writes them to the file ``truth``.
        """
        self._told({"do": "pause", "truth": str(truth)})
        return [set(blocks) for blocks in msgspec.msgpack.decode(truth.read_bytes())]

    def close(self) -> None:
        """Kill the process with the simulated engines."""
        self._process.kill()
        self._process.communicate()

    def _told(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")
        self._process.stdin.flush()
        self._answered()

    def _answered(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"done\n", self._log.read_text()


class Engines:
    """All simulated engines of this process, which run in one thread."""

    def __init__(self, spec: Spec) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        options = EngineOptions(blocks=spec.blocks, decode_tokens=spec.decode)
        longest = min(4096, spec.blocks * options.block_size // 2)
        self._engines = [
            SimEngine(DIALECTS["vllm-0.33"], synthetic(seed, 0, max_tokens=longest), options=options)
            for seed in range(len(spec.endpoints))
        ]
        self._publishers = [
            EnginePublisher(live, replay, bind=True, context=context) for live, replay in spec.endpoints
        ]
        self._random = random.Random("kvbus/region")
        self._due: list[tuple[float, int]] = []
        self._rate = 0.0
        for publisher in self._publishers:
            publisher.start()

    def fill(self) -> None:
        """Publish until every cache has been full for some time. kvbus reads these batches by a replay, not live."""
        for number, engine in enumerate(self._engines):
            for _ in range(engine.options.blocks // 6):
                self._step(number, engine)

    def run(self, rate: float) -> None:
        """Let each engine publish ``rate`` batches a second from now on. If it is 0, they stop publishing."""
        self._rate = rate
        now = time.monotonic()
        self._due = [(now + self._random.expovariate(rate), n) for n in range(len(self._engines))] if rate else []
        heapq.heapify(self._due)

    def step(self) -> float:
        """Publish the batches that are due, and return the seconds until the next batch."""
        while self._due and self._due[0][0] <= time.monotonic():
            at, number = heapq.heappop(self._due)
            self._step(number, self._engines[number])
            heapq.heappush(self._due, (at + self._random.expovariate(self._rate), number))
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else 1.0

    def pause(self, truth: Path) -> None:
        """Publish the remaining batches of each engine's last step, and write the blocks that each engine then
        holds.
        """
        self.run(0)
        for number, engine in enumerate(self._engines):
            for payload in engine.flush(time.time()):
                self._publishers[number].publish(payload)
        truth.write_bytes(
            msgspec.msgpack.encode([[entry["hash"] for entry in engine.truth()] for engine in self._engines])
        )

    def _step(self, number: int, engine: SimEngine) -> None:
        payload = engine.step(time.time())
        assert payload is not None, "the load has no end"
        self._publishers[number].publish(payload)


def main() -> None:
    """Execute the commands on stdin until stdin ends.

    `select` does not see a line that Python has already read into its buffer. There is no such line, because the parent
    process sends a command only after the answer to the previous one.
    """
    engines = Engines(msgspec.json.decode(sys.argv[1], type=Spec))
    engines.fill()
    command: dict[str, Any] = {"do": "run", "rate": 0.0}
    while True:
        if command["do"] == "run":
            engines.run(command["rate"])
        else:
            engines.pause(Path(command["truth"]))
        sys.stdout.write("done\n")
        sys.stdout.flush()
        while not select.select([sys.stdin], [], [], engines.step())[0]:
            pass
        line = sys.stdin.readline()
        if not line:
            return
        command = msgspec.json.decode(line)


if __name__ == "__main__":
    main()
