"""Who stands on either side of the bus in the long tests: a simulated engine with its own truth, and a strict router."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import zmq

from kvbus.core.types import medium_key
from kvbus.daemon.clock import RunningClock
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import synthetic
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.router import PlainSetRouter
from tests.doubles.socket_router import END, SocketRouter
from tests.system.bus import PATIENCE
from tests.wire.captures import Key


class Engine:
    """A simulated engine rank on a real publisher; its blocks are small, so that a few hundred tokens make many events.

    Why it is not the world's engine: `tests.doubles`. A batch's ``ts`` is how many this engine has published, all its lives counted.
    """

    def __init__(
        self, publisher: EnginePublisher, *, blocks: int = 600, drop: float = 0.0, seed: int = 1, rank: int = 0
    ) -> None:
        jobs = synthetic(seed, turn_tokens=24, output_tokens=24, system_tokens=32, max_tokens=256)
        self.sim = SimEngine(
            "vllm-0.33", jobs, rank=rank, options=EngineOptions(blocks=blocks, block_size=4, max_running=2)
        )
        self.publisher = publisher
        self.published = 0
        self.dropped = 0
        self._drop = drop
        self._rng = random.Random(7)

    async def publish(self, count: int) -> None:
        """Publish batches; each is lost on its way with the probability `drop`."""
        for at in range(count):
            payload = self.sim.step(self.published + 1.0)
            assert payload is not None
            self._send(payload)
            if at % 10 == 0:
                await asyncio.sleep(0)

    def settle(self) -> set[Key]:
        """Publish what is left of the last step; what is cached now is what was published."""
        for payload in self.sim.flush(self.published + 1.0):
            self._send(payload)
        return {(block["group_idx"], str(medium_key(block["medium"])), block["hash"]) for block in self.sim.truth()}

    def restart(self) -> None:
        """Die and come back with nothing."""
        self.publisher.restart()
        self.sim.restart()

    def _send(self, payload: bytes) -> None:
        lost = self._rng.random() < self._drop
        self.dropped += lost
        self.published += 1
        self.publisher.publish(payload, live=not lost)


class GivenUpError(AssertionError):
    """An answer did not come in time, or not as it has to."""


class StrictRouter(SocketRouter):
    """The rules of the strictest client known (llm-d's subscriber), on top of the plainest index there is.

    Live batches wait while it rebuilds. An answer begins with the seq asked for and is contiguous, of four frames each;
    no message takes longer than `idle` to come, and no answer longer than two minutes. After a hole it asks from the
    next seq on, after a batch that goes back it begins again. An answer that breaks off is asked on from where it is, if
    it `resumes`; after forty attempts without a batch it gives up: a bus that starts where others have the CPU is silent.
    """

    TOTAL: Final = 120.0
    ATTEMPTS: Final = 40

    def __init__(
        self, endpoint: str, replay_endpoint: str, *, hwm: int = 0, idle: float = 2.0, resumes: bool = False
    ) -> None:
        super().__init__(endpoint, replay_endpoint)
        self.holes = 0
        """Live batches that did not follow what was known."""
        self.resumed = 0
        """Answers that broke off and were asked on."""
        self.late = 0
        """Answers that began later than asked for: what was known is forgotten, as after a trimmed buffer."""
        self.newest_ts = 0.0
        """``ts`` of the newest batch with events."""
        self._newest = -1
        self._held: deque[tuple[int, bytes]] = deque()
        self._hwm = hwm
        self._idle = idle
        self._resumes = resumes
        self.context.setsockopt(zmq.RECONNECT_IVL, 1)  # whatever a bus says first after a restart is heard
        self._dealer: zmq.Socket[bytes] | None = None
        self._clock = RunningClock(time.monotonic)
        self._asked_at = 0.0
        self._fresh = False
        self.subscribe()

    @property
    def blocks(self) -> set[Key]:
        return set(self.view.blocks)

    def ask(self) -> None:
        """Send the standard request for everything from the next seq on."""
        assert self._dealer is None
        self._dealer = self.request(self.next, self._hwm)
        self._asked_at = self._clock.time()
        self._fresh = True

    async def read(self, count: int = -1) -> None:
        """Read so many messages of the answer (all of it by default).

        Raises:
            GivenUpError: it broke one of the rules above.
        """
        while self._dealer is not None and count:
            await self._there_is_a_message(self._dealer)
            count -= 1
            empty, topic, frame, payload = self._dealer.recv_multipart()
            assert empty == b""
            if frame == END:
                assert (topic, payload) == (b"", b"")
                self._hang_up()
                return
            seq = int.from_bytes(frame, "big")
            if self._fresh and seq > self.next:
                self.late += 1
                self.view, self.next = PlainSetRouter(), seq
            if seq != self.next:
                raise GivenUpError(f"an answer with {seq} where {self.next} is due")
            self._fresh = False
            self._take(payload)

    async def _there_is_a_message(self, dealer: zmq.Socket[bytes]) -> None:
        waiting_since = self._clock.time()  # without the time that this process, or its machine, stands still
        await asyncio.sleep(0)
        while not dealer.poll(0):
            now = self._clock.time()
            if now > waiting_since + self._idle:
                raise GivenUpError(f"no message for {self._idle} s at {self.next}")
            if now > self._asked_at + self.TOTAL:
                raise GivenUpError(f"not whole after {self.TOTAL} s at {self.next}")
            self._hold()
            await asyncio.sleep(0.001)

    def hang_up(self) -> None:
        """Break the answer off, as a connection that is lost does."""
        assert self._dealer is not None
        self._hang_up()

    def _hang_up(self) -> None:
        if self._dealer is not None:
            self._dealer.close(0)
            self._dealer = None

    async def rebuild(self) -> None:
        """Ask and read the whole answer, however the live stream goes on meanwhile."""
        attempts = 0
        while True:
            before = self.next
            self.ask()
            try:
                await self.read()
            except GivenUpError:
                attempts = attempts + 1 if self.next == before else 0
                if not self._resumes or attempts == self.ATTEMPTS:
                    raise
                self._hang_up()
                self.resumed += 1
            else:
                return

    async def follow(self) -> int:
        """Take in the live stream as far as it is there; the next seq."""
        self._hold()
        while self._held:
            seq, payload = self._held.popleft()
            if seq <= self._newest:
                self.went_back += 1
                self.view, self.next = PlainSetRouter(), 0
                await self.rebuild()
            self._newest = seq
            if seq > self.next:
                self.holes += 1
                await self.rebuild()
                assert seq <= self.next, "what was sent live can be replayed"
            if seq == self.next:
                self._take(payload)
        return self.next

    def restart(self) -> None:
        """Begin again with nothing, as a new process does."""
        self._hang_up()
        self.unsubscribe()
        self._held.clear()
        self.view, self.next = PlainSetRouter(), 0
        self.subscribe()

    def _hold(self) -> None:
        self._held.extend(self.arrived())

    def _take(self, payload: bytes) -> None:
        self.view.apply(self.next, payload)
        self.next += 1
        ts, events, _ = msgspec.msgpack.decode(payload)
        if events:
            self.newest_ts = ts

    def close(self) -> None:
        self._hang_up()
        super().close()


async def soon(router: StrictRouter, condition: Callable[..., bool], what: str) -> None:
    """Follow the live stream until the condition holds."""
    end = asyncio.get_running_loop().time() + PATIENCE
    while True:
        await router.follow()
        if condition():
            return
        assert asyncio.get_running_loop().time() < end, f"not within {PATIENCE:g} s: {what}"
        await asyncio.sleep(0.002)
