"""Routers on real sockets, around a plain set of blocks. They differ in when they ask for a replay."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Final

import msgspec
import zmq

from kvbus.core.wire.frames import ASKS_REPLAY
from kvbus.daemon.runtime import RunningClock
from tests.doubles.bus import PATIENCE, eventually
from tests.doubles.router import PlainSetRouter, events_of
from tests.wire.captures import Key

END: Final = b"\xff" * 8

Context = zmq.Context[zmq.Socket[bytes]]


class SocketRouter:
    """A real SUB, and a DEALER of its own for each request.

    Args:
        endpoint: the live stream.
        replay_endpoint: the standard replay.
        context: one with keys; ended by :meth:`close`.
    """

    rebuilds: ClassVar = True
    """It says that it rebuilds itself by replays, and wants no state by its subscription."""

    def __init__(self, endpoint: str, replay_endpoint: str, context: Context | None = None) -> None:
        self.context: Context = zmq.Context() if context is None else context
        self.view = PlainSetRouter()
        self.next = 0
        self.went_back = 0
        """Live batches numbered no higher than one before."""
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._live: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    def subscribe(self, buffer: int = 0) -> None:
        """Connect to the live stream, with room for everything or for a few bytes."""
        self._live = self.context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, 1 if buffer else 0)
        if buffer:
            self._live.setsockopt(zmq.RCVBUF, buffer)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        if self.rebuilds:
            self._live.setsockopt(zmq.SUBSCRIBE, ASKS_REPLAY)
        self._monitor = self._live.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._live.connect(self._endpoint)

    def unsubscribe(self) -> None:
        if self._live is not None and self._monitor is not None:
            self._live.disable_monitor()
            self._live.close(0)
            self._monitor.close(0)
            self._live = self._monitor = None

    def disconnected(self) -> int:
        """How often the live connection has broken since the last time this was asked."""
        assert self._monitor is not None
        count = 0
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            count += 1
        return count

    def arrived(self) -> Iterator[tuple[int, bytes]]:
        """Seq and payload of whatever the live stream has at this moment."""
        assert self._live is not None
        while self._live.poll(0):
            _, seq, payload = self._live.recv_multipart()
            assert len(seq) == 8
            yield int.from_bytes(seq, "big"), payload

    def request(self, start: int, hwm: int = 1000) -> zmq.Socket[bytes]:
        """Ask the standard replay; the socket its answer comes on."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, hwm)
        dealer.connect(self._replay_endpoint)
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        return dealer

    def close(self) -> None:
        self.unsubscribe()
        self.context.term()


class Deaf(SocketRouter):
    """A router that applies each batch of the live stream, whatever its number, and never asks.

    Args:
        buffer: bytes that its kernel takes in; 0: as many as there are.
    """

    rebuilds = False

    def __init__(self, endpoint: str, *, buffer: int = 0, context: Context | None = None) -> None:
        super().__init__(endpoint, "", context)
        self._shared = context is not None
        self.batches = 0
        self.context.setsockopt(zmq.RECONNECT_IVL, 5)
        self.subscribe(buffer)

    def read(self) -> set[Any]:
        for seq, payload in self.arrived():
            self.view.take(seq, payload)
            self.batches += 1
        return set(self.view.blocks)

    def close(self) -> None:
        self.unsubscribe()
        if not self._shared:
            self.context.term()


class RouterOnASet(SocketRouter):
    """A trusting router: repairs holes by the standard replay, as routers do, and takes whatever it is answered."""

    def __init__(self, endpoint: str, replay_endpoint: str, context: Context | None = None) -> None:
        super().__init__(endpoint, replay_endpoint, context)
        self._highest = -1
        self._held: list[tuple[int, bytes]] = []

    def _take(self, seq: int, payload: bytes) -> None:
        self.view.apply(seq, payload)
        self.next = max(self.next, seq + 1)

    def read(self) -> int:
        """Take in whatever the live stream has; the next seq."""
        for seq, payload in self.arrived():
            self._take(seq, payload)
        return self.next

    async def follow(self) -> None:
        """Take in the live stream; where it has a hole, ask the replay for what is missing first."""
        for seq, payload in self.arrived():
            self.went_back += seq <= self._highest
            self._highest = max(self._highest, seq)
            self._held.append((seq, payload))
        while self._held:
            if self._held[0][0] > self.next:
                await self.replay(self.next)
                if self._held[0][0] > self.next:
                    return  # the bus itself is not that far: it is being started
            self._take(*self._held.pop(0))

    async def replay(self, start: int = 0) -> list[int]:
        """Ask the standard replay and take in the answer; its seqs."""
        seqs: list[int] = []
        dealer = self.request(start)
        try:
            while True:
                await eventually(lambda: dealer.poll(0), "an answer to a replay request")
                frames = dealer.recv_multipart()
                if frames[-2] == END:
                    return seqs
                seqs.append(int.from_bytes(frames[-2], "big"))
                self._take(seqs[-1], frames[-1])
        finally:
            dealer.close(0)


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


class LlmdWithReplay(StrictRouter):
    """Asks from 0 at the beginning, and from the next seq on after a hole or a lost connection."""

    rebuilds = False

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        super().__init__(endpoint, replay_endpoint, resumes=True)
        self.refused = 0
        """Answers that were not what was asked for: what was known is forgotten."""
        self._late = 0
        self._begun = False
        self._anywhere = False

    async def read_on(self) -> set[int]:
        """Ask if there is a reason to, and take in the live stream; the hashes of all blocks."""
        try:
            if not self._begun or self.disconnected():
                self._begun = True
                await self.rebuild()
            await self.follow()
        except AssertionError:  # it gave up, or a hole was not filled
            self._refuse()
        return {block for _, _, block in self.view.blocks if isinstance(block, int)}

    async def rebuild(self) -> None:
        start, self._anywhere = self.next, False
        await super().rebuild()
        self._anywhere = start == self.next == 0
        if self.late > self._late:
            self._late = self.late
            raise AssertionError(f"an answer that begins later than {start}")

    def _hold(self) -> None:
        super()._hold()
        if self._anywhere and self._held:
            self._anywhere = False
            self.next = self._held[0][0]

    def _refuse(self) -> None:
        self._hang_up()
        self.refused += 1
        self.view, self.next = PlainSetRouter(), 0
        self._begun = False


class NeverAsks:
    """A SUB on each stream, and a plain set for each rank of each. Numbers are not looked at."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._views: dict[tuple[int, int], PlainSetRouter] = {}
        self._sockets = [self._subscribed(endpoint) for endpoint in endpoints]

    def _subscribed(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        return socket

    def _view(self, stream: int, rank: int) -> PlainSetRouter:
        return self._views.setdefault((stream, rank), PlainSetRouter())

    def read(self) -> set[int]:
        """Take in whatever is there; the hashes of all blocks."""
        for stream, socket in enumerate(self._sockets):
            while socket.poll(0):
                _, seq, payload = socket.recv_multipart()
                rank = msgspec.msgpack.decode(payload)[2]
                self._view(stream, rank).take(int.from_bytes(seq, "big"), payload)
        return {block for view in self._views.values() for _, _, block in view.blocks if isinstance(block, int)}

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(0)
        self._context.term()


class ClearsByPod(NeverAsks):
    """One set for all ranks of all streams."""

    def _view(self, stream: int, rank: int) -> PlainSetRouter:
        return self._views.setdefault((0, 0), PlainSetRouter())


class TopicRouter:
    """It asks nothing: the state comes with the subscription. It writes down whatever would mislead it.

    Args:
        endpoint: of the live streams.
        topics: prefixes that it subscribes to.
        bind: it listens, and the bus dials.
        context: one with keys; ended by :meth:`close`.
    """

    def __init__(
        self, endpoint: str, *topics: bytes, bind: bool = False, context: zmq.Context[zmq.Socket[bytes]] | None = None
    ) -> None:
        self.views: dict[bytes, PlainSetRouter] = {}
        self.next: dict[bytes, int] = {}
        self.violations: list[str] = []
        self.states: dict[bytes, int] = {}
        """Clears by topic."""
        self._endpoint = endpoint
        self._topics: Final = topics or (b"",)
        self._bind = bind
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context() if context is None else context
        self._socket: zmq.Socket[bytes] | None = None
        self.connect()

    def connect(self) -> None:
        """Subscribe; what is known stays known."""
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        for topic in self._topics:
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        if self._bind:
            self._socket.bind(self._endpoint)
        else:
            self._socket.connect(self._endpoint)

    def listen_again(self) -> bool:
        """Bind once more; False while the address is not free yet."""
        try:
            self.connect()
        except zmq.ZMQError:
            self.disconnect()
            return False
        return True

    def disconnect(self) -> None:
        """Lose the connection, and whatever was on its way."""
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def close(self) -> None:
        """End."""
        self.disconnect()
        self._context.term()

    def blocks(self, topic: bytes) -> set[int | bytes]:
        """The hashes of the blocks that it believes are with this worker, after whatever has arrived."""
        return self.held.get(topic, set())

    @property
    def held(self) -> dict[bytes, set[int | bytes]]:
        """What it believes of every worker that has any block."""
        self.read()
        return {topic: {block for _, _, block in view.blocks} for topic, view in self.views.items() if view.blocks}

    def read(self) -> None:
        """Take in whatever has arrived."""
        while self._socket is not None and self._socket.poll(0):
            topic, seq, payload = self._socket.recv_multipart()
            if not topic.startswith(tuple(self._topics)):
                self.violations.append(f"{topic!r} was not subscribed to")
            self._take(topic, int.from_bytes(seq, "big"), payload)

    def _take(self, topic: bytes, seq: int, payload: bytes) -> None:
        view = self.views.setdefault(topic, PlainSetRouter())
        expected = self.next.get(topic)
        events = events_of(payload)
        clears = bool(events) and events[0]["type"] == "AllBlocksCleared"
        self.states[topic] = self.states.get(topic, 0) + clears
        if expected is not None and seq < expected:
            self.violations.append(f"{topic!r}: {seq} after {expected - 1}")
        if seq != expected and not clears and (expected is not None or events):
            self.violations.append(f"{topic!r}: {seq} instead of {expected}, and no state")
        self.next[topic] = seq + 1
        view.take(seq, payload)
        ranks = {msgspec.msgpack.decode(payload)[2]}
        if len(view.ranks | ranks) > 1:
            self.violations.append(f"{topic!r}: ranks {view.ranks | ranks}")
