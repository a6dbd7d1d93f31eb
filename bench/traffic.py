"""Simulated engines and routers that send batches through a relay. All of them run in this process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import msgspec
import zmq

from kvbus.core.wire.frames import ASKS_REPLAY, END_SEQ, replay_request
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.router import events_of

from .loads import is_empty, probe, stamp, stamped
from .process import Kind, Relay, relay

PATIENCE: Final = 60.0
"""Seconds without progress after which a run has failed."""

WINDOW_BYTES: Final = 4 * 2**20
WINDOW: Final = 1000
"""The maximum of bytes (WINDOW_BYTES) and batches (WINDOW) that the slowest router has not received yet.

They limit the engines while they publish at the maximum rate.
"""


@dataclass
class Result:
    """The measurements of a run in which every batch arrived at every router."""

    seconds: float
    batches: int
    """Number of batches that the engines sent, of all ranks together."""
    cpu_seconds: float
    """CPU seconds of the relay's process during the run."""
    latencies: list[float]
    """Sorted seconds from the engine's send to the router's receive; empty unless batches were sent at a fixed rate."""

    @property
    def cpu_us(self) -> float:
        """CPU time of the relay per batch, in microseconds."""
        return self.cpu_seconds / self.batches * 1e6

    @property
    def cpu_share(self) -> float:
        """CPU time of the relay, in percent of one core."""
        return self.cpu_seconds / self.seconds * 100

    def percentile(self, share: float) -> float:
        """Return the latency in microseconds that this share of the batches does not exceed."""
        return self.latencies[min(int(share * len(self.latencies)), len(self.latencies) - 1)] * 1e6


class Router:
    """A SUB socket connected to the streams of all ranks. It counts batches and measures latencies."""

    def __init__(self, context: zmq.Context[Any], endpoints: Sequence[str]) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.setsockopt(zmq.SUBSCRIBE, ASKS_REPLAY)  # with this topic, kvbus sends no state on subscription
        for endpoint in endpoints:
            self.socket.connect(endpoint)
        self.probed: set[int] = set()
        """Ranks of which a probe, a batch that tests the connection, has arrived."""
        self.received = 0
        """Number of received batches of the load."""
        self.latencies: list[float] = []

    def drain(self) -> None:
        """Read all messages that have arrived."""
        receive = self.socket.recv
        while True:
            try:
                receive(zmq.NOBLOCK)
            except zmq.Again:
                return
            receive(zmq.NOBLOCK)
            payload = receive(zmq.NOBLOCK)
            if is_empty(payload):
                continue
            ts = stamped(payload)
            if ts < 0:
                self.probed.add(msgspec.msgpack.decode(payload)[2])
                continue
            self.received += 1
            if ts > 0:
                self.latencies.append(time.monotonic() - ts)


class Traffic:
    """Simulated engines and routers, connected to a relay.

    Args:
        through: the running relay.
        routers: number of routers, each connected to every rank's stream.
        probing: returns a batch that tests the connection, from a number and a rank.
    """

    def __init__(
        self,
        through: Relay,
        routers: int = 1,
        probing: Callable[[int, int], bytes] = probe,
    ) -> None:
        self.relay = through
        self._probing = probing
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * through.ranks + routers + 64)
        self._engines = [
            EnginePublisher(live, replay, bind=True, hwm=0, context=self._context)
            for live, replay in zip(through.live, through.replay, strict=True)
        ]
        for engine in self._engines:
            engine.start()
        self._routers_context: zmq.Context[Any] = zmq.Context()
        self._routers = [Router(self._routers_context, through.out) for _ in range(routers)]
        self._poller = zmq.Poller()
        for router in self._routers:
            self._poller.register(router.socket, zmq.POLLIN)

    def close(self) -> None:
        """Close every socket."""
        for engine in self._engines:
            engine.close()
        self._context.destroy(0)
        self._routers_context.destroy(0)

    def connect(self) -> None:
        """Publish probes, which test the connections, until every router has one of each rank and no more arrive."""
        until = time.monotonic() + PATIENCE
        number = 0
        while missing := [
            rank for rank in range(len(self._engines)) if any(rank not in router.probed for router in self._routers)
        ]:
            if time.monotonic() > until:
                raise TimeoutError(f"no probe of ranks {missing[:9]} has arrived at every router")
            number += 1
            for rank in missing:
                self._engines[rank].publish(self._probing(number << 16 | rank, rank))
            self._read(0.05)
        while self._read(0.2):
            pass

    def saturate(self, *loads: Iterable[bytes], batches: int, copies: int = 1) -> Result:
        """Publish batches of each rank as fast as the routers read them.

        Args:
            loads: a load for each rank.
            batches: number of batches of each rank.
            copies: number of batches of which only one arrives, because they announce the same blocks.
        """
        mean = 0.0
        with self._measured(batches, copies) as found:
            published = 0
            for payloads in zip(*(islice(load, batches) for load in loads), strict=True):
                for engine, payload in zip(self._engines, payloads, strict=True):
                    engine.publish(payload)
                    mean += (len(payload) - mean) / 64
                published += len(payloads)
                window = min(WINDOW, int(WINDOW_BYTES / mean) + 1)
                if published % 16 == 0:
                    self._read_until((published - window) // copies)
            self._read_until(published // copies)
        return found

    def pace(self, *loads: Sequence[bytes], rate: float) -> Result:
        """Publish each rank's batches at ``rate`` per second, with the ranks evenly interleaved."""
        batches = len(loads[0])
        turns = [(batch, rank) for batch in range(batches) for rank in range(len(loads))]

        def publish() -> None:
            began = time.monotonic()
            for turn, (batch, rank) in enumerate(turns):
                delay = began + turn / (rate * len(loads)) - time.monotonic()
                if delay > 0:
                    time.sleep(delay)
                self._engines[rank].publish(stamp(loads[rank][batch], time.monotonic()))

        for router in self._routers:
            router.latencies.clear()
        with self._measured(batches) as found:
            publishing = threading.Thread(target=publish, daemon=True)
            publishing.start()
            self._read_until(len(turns))
            publishing.join()
        found.latencies = sorted(latency for router in self._routers for latency in router.latencies)
        return found

    @contextlib.contextmanager
    def _measured(self, batches: int, copies: int = 1) -> Iterator[Result]:
        for router in self._routers:
            router.received = 0
        found = Result(0.0, batches * len(self._engines), 0.0, [])
        cpu, began = self.relay.cpu_seconds(), time.monotonic()
        yield found
        found.seconds = time.monotonic() - began
        found.cpu_seconds = self.relay.cpu_seconds() - cpu
        if any(router.received != found.batches // copies for router in self._routers):
            raise RuntimeError(f"more batches arrived than the {found.batches} that were sent")

    def _read_until(self, batches: int) -> None:
        """Read until every router has received ``batches`` batches of the load."""
        until = time.monotonic() + PATIENCE
        while min(router.received for router in self._routers) < batches:
            if self._read(0.1):
                until = time.monotonic() + PATIENCE
            elif time.monotonic() > until:
                raise TimeoutError(f"of {batches} batches the routers got {[r.received for r in self._routers]}")

    def _read(self, seconds: float) -> bool:
        """Read the messages that arrive within ``seconds``. Return whether any arrived."""
        ready = dict(self._poller.poll(int(seconds * 1000)))
        for router in self._routers:
            if router.socket in ready:
                router.drain()
        return bool(ready)


@contextlib.contextmanager
def traffic(
    kind: Kind,
    ranks: int = 1,
    routers: int = 1,
    probing: Callable[[int, int], bytes] = probe,
    **settings: Any,
) -> Iterator[Traffic]:
    """Run a relay between engines and routers until the block ends.

    :class:`Traffic` and :func:`bench.process.relay` explain the arguments.

    Raises:
        RuntimeError: kvbus has lost, rejected or dropped batches or events.
    """
    with relay(kind, ranks, **settings) as through:
        found = Traffic(through, routers, probing)
        try:
            found.connect()
            yield found
            through.check()
        finally:
            found.close()


@dataclass
class Late:
    """The measurements of the replay that a router gets if it joins late."""

    seconds: float
    """Seconds from the request until END arrived."""
    cpu_seconds: float
    """CPU seconds that the relay used for the answer."""
    bytes: int
    blocks: int


def ask_from_zero(through: Relay) -> Late:
    """Request a replay of rank 0 from seq 0, as a late router does. The answer is decoded after the measurement."""
    context: zmq.Context[Any] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 0)
    dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
    dealer.connect(through.out_replay[0])
    payloads: list[bytes] = []
    seqs: list[bytes] = []
    cpu, began = through.cpu_seconds(), time.monotonic()
    dealer.send_multipart(replay_request(0))
    while (frames := dealer.recv_multipart())[-2] != END_SEQ:
        seqs.append(frames[-2][:8])
        payloads.append(frames[-1])
    seconds, cpu = time.monotonic() - began, through.cpu_seconds() - cpu
    context.destroy(0)
    numbers = [int.from_bytes(seq, "big") for seq in seqs]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise RuntimeError("the numbers of the answer are not contiguous")
    return Late(seconds, cpu, sum(map(len, payloads)), len(blocks_of(payloads)))


def blocks_of(payloads: Iterable[bytes]) -> set[Any]:
    """Return the blocks that are live after these batches."""
    live: set[Any] = set()
    for payload in payloads:
        for event in events_of(payload):
            if event["type"] == "BlockStored":
                live.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                live.difference_update(event["block_hashes"])
            else:
                live.clear()
    return live
