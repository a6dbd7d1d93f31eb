"""Many simulated engines as one process: each has a cache that is full, and publishes on endpoints of its own.

Started with a JSON :class:`Spec`; says ``ready``, then does what JSON lines on stdin say: ``{"do": "run", "rate": 2}``
publishes so many batches a second of each engine, at random times, until ``{"do": "pause", "truth": PATH}``, which
writes what each engine holds then. ``{"do": "count"}`` answers with a :class:`Sent`.
"""

from __future__ import annotations

import heapq
import random
import select
import sys
import time
from pathlib import Path

import msgspec
import zmq

from kvbus.tools.sim.dialects import DIALECTS
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import synthetic
from kvbus.transport.engine.publisher import EnginePublisher

from .engine import BUFFER_STEPS


class Spec(msgspec.Struct):
    """What to publish where.

    Attributes:
        endpoints: live endpoint and replay endpoint of each engine.
        blocks: of each cache.
        decode: tokens that a running request makes in a step.
    """

    endpoints: list[tuple[str, str]]
    blocks: int
    decode: int


class Sent(msgspec.Struct):
    """What all engines together have published since they began, and when that was (monotonic)."""

    at: float
    batches: int
    bytes: int


class Engines:
    """All of them, in one thread."""

    def __init__(self, spec: Spec) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 8 * len(spec.endpoints) + 64)
        options = EngineOptions(blocks=spec.blocks, decode_tokens=spec.decode)
        longest = min(4096, spec.blocks * options.block_size // 2)
        self._engines = [
            SimEngine(DIALECTS["vllm-0.33"], synthetic(seed, 0, max_tokens=longest), options=options)
            for seed in range(len(spec.endpoints))
        ]
        self._publishers = [
            EnginePublisher(live, replay, bind=True, context=context, buffer_steps=BUFFER_STEPS)
            for live, replay in spec.endpoints
        ]
        self._random = random.Random("kvbus/region")
        self._due: list[tuple[float, int]] = []
        self._rate = 0.0
        self.batches = self.bytes = 0
        for publisher in self._publishers:
            publisher.start()

    def fill(self) -> None:
        """Publish until every cache has been full for a while: leaves get it as a replay."""
        for number, engine in enumerate(self._engines):
            for _ in range(engine.options.blocks // 6):
                self._step(number, engine)

    def run(self, rate: float) -> None:
        """Each engine at this rate from now on; 0: nothing more."""
        self._rate = rate
        now = time.monotonic()
        self._due = [(now + self._random.expovariate(rate), n) for n in range(len(self._engines))] if rate else []
        heapq.heapify(self._due)

    def step(self) -> float:
        """Publish what is due; seconds up to the next one."""
        while self._due and self._due[0][0] <= time.monotonic():
            at, number = heapq.heappop(self._due)
            self._step(number, self._engines[number])
            heapq.heappush(self._due, (at + self._random.expovariate(self._rate), number))
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else 1.0

    def pause(self, truth: Path) -> None:
        """Publish the rest of each step, and write what each engine holds then."""
        self.run(0)
        for number, engine in enumerate(self._engines):
            for payload in engine.flush(time.time()):
                self._publish(number, payload)
        truth.write_bytes(
            msgspec.msgpack.encode([[entry["hash"] for entry in engine.truth()] for engine in self._engines])
        )

    def _step(self, number: int, engine: SimEngine) -> None:
        payload = engine.step(time.time())
        assert payload is not None, "the load has no end"
        self._publish(number, payload)

    def _publish(self, number: int, payload: bytes) -> None:
        self._publishers[number].publish(payload)
        self.batches += 1
        self.bytes += len(payload)


def lines(waiting: float) -> list[dict[str, object]] | None:
    """What was said on stdin within so many seconds; None at its end."""
    if not select.select([sys.stdin], [], [], waiting)[0]:
        return []
    line = sys.stdin.readline()  # whoever asks waits for the answer, so no second line is there
    return [msgspec.json.decode(line)] if line else None


def say(what: object) -> None:
    """One line."""
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve stdin."""
    engines = Engines(msgspec.json.decode(sys.argv[1], type=Spec))
    engines.fill()
    say("ready")
    while (told := lines(engines.step())) is not None:
        for command in told:
            if command["do"] == "run":
                engines.run(float(str(command["rate"])))
                say("runs")
            elif command["do"] == "pause":
                engines.pause(Path(str(command["truth"])))
                say("paused")
            else:
                say(Sent(time.monotonic(), engines.batches, engines.bytes))


if __name__ == "__main__":
    main()
