"""The engine as a process: publishes batches made beforehand, as fast as routers take them, or at a rate.

Started with a JSON :class:`Spec`; says ``ready``, then does what it is told on stdin: ``probe`` (or wait until
``subscribed``) until every router is known to listen, ``run`` the load. Nothing is lost on its own sockets: the high-water mark is off, and what is under way
is bounded by a window over the routers' own counters.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import msgspec
import zmq

from kvbus.transport.engine.publisher import EnginePublisher

from .counters import Counters
from .loads import NUMBERED, load_named, monotonic, stamp

PROBE_EVERY: Final = 0.02
BUFFER_STEPS: Final = 10_000
"""What vLLM keeps for replay."""

WINDOW_BYTES: Final = 8 * 2**20
"""Under way at most, each rank: a router that is slow is half as far behind as kvbus lets it be (``send_bytes``)."""


class Spec(msgspec.Struct):
    """What to publish where.

    Attributes:
        endpoints: live endpoint and replay endpoint of each rank.
        load: name of the load.
        batches: how many, each rank.
        rate: batches a second of each rank; 0: as fast as the window lets them.
        window: batches under way at most, each rank; of large ones fewer, see :data:`WINDOW_BYTES`.
        counters: file of the routers' counters; two for each of their sockets: seen, and the next number awaited.
        sockets: which rank each of those sockets listens to.
        prefill: batches of these that leave first, as fast as the window lets them, before the clock starts.
        apart: at a rate the ranks take turns; else each leaves its batch when the others do.
    """

    endpoints: list[tuple[str, str | None]]
    load: str
    batches: int
    counters: str
    sockets: list[int]
    rate: float = 0.0
    window: int = 2000
    prefill: int = 0
    apart: bool = False


class Ran(msgspec.Struct):
    """What became of ``run``: when the first and the last batch left (monotonic), CPU time, and how often it was late."""

    first: float
    last: float
    cpu: float
    late: int


class Engine:
    """All ranks of one engine, in one thread."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._load = load_named(spec.load)
        self._payloads = [self._load.take(spec.batches, rank) for rank in range(len(spec.endpoints))]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, max(1023, 4 * len(spec.endpoints)))
        self._ranks = [
            EnginePublisher(live, replay, bind=True, hwm=0, context=context, buffer_steps=BUFFER_STEPS)
            for live, replay in spec.endpoints
        ]
        for rank in self._ranks:
            rank.start()
        self._counters = Counters(Path(spec.counters)).values
        self._slots = [
            [2 * at + 1 for at, listens in enumerate(spec.sockets) if listens == rank]
            for rank in range(len(spec.endpoints))
        ]
        self._at = 0
        self._clock: float | None = None

    def probe(self) -> int:
        """Send probes until every router has seen one of each rank; how many it took."""
        number = 0
        seen = [slot - 1 for slots in self._slots for slot in slots]
        until = time.monotonic() + 60
        while not all(self._counters[slot] for slot in seen):
            if time.monotonic() > until:
                raise TimeoutError("a router has seen no probe within 60 s")
            number += 1
            for rank, publisher in enumerate(self._ranks):
                publisher.publish(self._load.probe(number, rank))
            time.sleep(PROBE_EVERY)
        return number

    def subscribed(self) -> None:
        """Wait until every rank has a subscriber: for readers that keep no counters."""
        for publisher in self._ranks:
            asyncio.run(publisher.wait_for_subscriber(60))

    def fill(self) -> None:
        """Send what is to be there before the clock starts, and wait until the routers have it."""
        self._at_full_speed(self.spec.prefill)
        for rank in range(len(self._ranks)):
            self._wait(rank, self.spec.prefill - 1, 0)

    def run(self) -> Ran:
        """Send the rest of the load, and the end."""
        first, cpu, late = time.monotonic(), time.process_time(), 0
        if self.spec.rate:
            late = self._at_rate()
        else:
            self._at_full_speed(self.spec.batches)
        for rank, publisher in enumerate(self._ranks):
            publisher.publish(self._load.end(rank))
        return Ran(first, time.monotonic(), time.process_time() - cpu, late)

    def _at_full_speed(self, until: int) -> None:
        ranks = list(enumerate(zip(self._ranks, self._payloads, strict=True)))
        windows = [window_of(self.spec.window, payloads) for payloads in self._payloads]
        open_until = [self._at] * len(ranks)
        for at in range(self._at, until):
            for rank, (publisher, payloads) in ranks:
                if at >= open_until[rank]:
                    open_until[rank] = self._wait(rank, at, windows[rank])
                publisher.publish(stamp(payloads[at], NUMBERED + at))
        self._at = until

    def _wait(self, rank: int, at: int, window: int) -> int:
        """Wait until less than a window is under way; the number that may be reached then.

        A relay may leave a batch out of which nothing is left. So numbers that do not come hold up nobody for ever.
        """
        until = time.monotonic() + 5
        while True:
            least = min((self._counters[slot] for slot in self._slots[rank]), default=at)
            if at < least + max(window, 1) or time.monotonic() > until:
                return max(least + window, at + 1)
            time.sleep(0.0001)

    def _at_rate(self) -> int:
        spec = self.spec
        late = 0
        begin = time.monotonic()
        for after, at, ranks in schedule(range(self._at, spec.batches), len(self._ranks), spec.rate, apart=spec.apart):
            delay = begin + after - time.monotonic()
            if delay > 0:
                time.sleep(delay)
            else:
                late += delay < -1 / spec.rate
            for rank in ranks:
                self._ranks[rank].publish(stamp(self._payloads[rank][at], monotonic()))
        return late


def schedule(batches: range, ranks: int, rate: float, *, apart: bool) -> Iterator[tuple[float, int, range]]:
    """After so many seconds this batch leaves these ranks."""
    turns = [range(rank, rank + 1) for rank in range(ranks)] if apart else [range(ranks)]
    for turn, (at, leaving) in enumerate(product(batches, turns)):
        yield turn / (rate * len(turns)), at, leaving


def window_of(batches: int, payloads: Sequence[bytes]) -> int:
    """So many batches may be under way, or fewer that have :data:`WINDOW_BYTES`; one at least."""
    mean = sum(map(len, payloads)) / max(len(payloads), 1)
    return max(1, min(batches, int(WINDOW_BYTES / max(mean, 1))))


def main() -> None:
    """Serve stdin."""
    engine = Engine(msgspec.json.decode(sys.argv[1], type=Spec))
    _say("ready")
    for line in sys.stdin:
        command = line.strip()
        if command == "probe":
            _say(engine.probe())
        elif command == "subscribed":
            engine.subscribed()
            _say("subscribed")
        elif command == "fill":
            engine.fill()
            _say("filled")
        elif command == "run":
            _say(engine.run())


def _say(what: object) -> None:
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
