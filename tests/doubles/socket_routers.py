"""Routers on real sockets, each with a plain set of blocks. They differ in when they ask for a replay."""

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
    """A router with a real SUB for the live stream. It opens a new DEALER for each replay request.

    Args:
        endpoint: endpoint of the live stream.
        replay_endpoint: endpoint of the standard replay.
        context: a ZMQ context with CURVE keys, which :meth:`close` terminates.
    """

    rebuilds: ClassVar = True
    """Whether the router subscribes to `ASKS_REPLAY`.

    It then rebuilds its view by replays, and gets no state on subscription.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, context: Context | None = None) -> None:
        self.context: Context = zmq.Context() if context is None else context
        self.view = PlainSetRouter()
        self.next = 0
        self.went_back = 0
        """Number of live batches whose seq was not above the highest earlier seq."""
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._live: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    def subscribe(self, buffer: int = 0) -> None:
        """Connect to the live stream. ``buffer`` is the size of the receive buffer in bytes; 0 means no limit."""
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
        """Return how many times the live connection has broken since the last call."""
        assert self._monitor is not None
        count = 0
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            count += 1
        return count

    def arrived(self) -> Iterator[tuple[int, bytes]]:
        """Yield seq and payload of each batch that has arrived on the live stream, without waiting."""
        assert self._live is not None
        while self._live.poll(0):
            _, seq, payload = self._live.recv_multipart()
            assert len(seq) == 8
            yield int.from_bytes(seq, "big"), payload

    def request(self, start: int, hwm: int = 1000) -> zmq.Socket[bytes]:
        """Send a standard replay request from the seq ``start``, and return the socket on which the answer arrives."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, hwm)
        dealer.connect(self._replay_endpoint)
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        return dealer

    def close(self) -> None:
        self.unsubscribe()
        self.context.term()


class Deaf(SocketRouter):
    """A router that applies each live batch without looking at its seq, and never asks for a replay.

    Args:
        buffer: size of the receive buffer in bytes; 0 means no limit.
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
    """A router that requests missing batches by the standard replay, and applies every answer without checking it."""

    def __init__(self, endpoint: str, replay_endpoint: str, context: Context | None = None) -> None:
        super().__init__(endpoint, replay_endpoint, context)
        self._highest = -1
        self._held: list[tuple[int, bytes]] = []

    def _take(self, seq: int, payload: bytes) -> None:
        self.view.apply(seq, payload)
        self.next = max(self.next, seq + 1)

    def read(self) -> int:
        """Apply the batches that have arrived on the live stream, and return the next expected seq."""
        for seq, payload in self.arrived():
            self._take(seq, payload)
        return self.next

    async def follow(self) -> None:
        """Apply the batches of the live stream. If batches are missing before a batch, request them first."""
        for seq, payload in self.arrived():
            self.went_back += seq <= self._highest
            self._highest = max(self._highest, seq)
            self._held.append((seq, payload))
        while self._held:
            if self._held[0][0] > self.next:
                await self.replay(self.next)
                if self._held[0][0] > self.next:
                    return  # kvbus is starting and has not published these batches yet
            self._take(*self._held.pop(0))

    async def replay(self, start: int = 0) -> list[int]:
        """Request a replay from the seq ``start``, apply the answer, and return the seqs of the answer."""
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
    """Error of a router whose replay answer did not come in time, or broke the protocol."""


class StrictRouter(SocketRouter):
    """A router with a plain set of blocks that follows the rules of llm-d's subscriber, the strictest known client.

    Live batches wait while the router reads a replay answer. An answer must begin with the requested seq, have no gap,
    and have four frames per message. A message may take at most `idle` seconds (by default 60), and an answer at most
    two minutes. If batches are missing, the router requests a replay from its next seq. After a batch whose seq goes
    back, it drops its blocks and starts again.

    If `resumes` is True, the default is 2 seconds, and the router continues an answer that broke off. It gives up after
    forty attempts that brought no batch, because a kvbus that starts on a busy CPU may be silent for a long time.
    """

    TOTAL: Final = 120.0
    ATTEMPTS: Final = 40

    def __init__(
        self, endpoint: str, replay_endpoint: str, *, hwm: int = 0, idle: float | None = None, resumes: bool = False
    ) -> None:
        super().__init__(endpoint, replay_endpoint)
        self.holes = 0
        """Number of live batches before which at least one batch was missing."""
        self.resumed = 0
        """Number of replay answers that broke off and that the router continued."""
        self.late = 0
        """Number of answers that began after the requested seq, as after a trimmed replay buffer.

        The router then drops its blocks.
        """
        self.newest_ts = 0.0
        """The time ``ts`` in the newest batch that had events."""
        self._newest = -1
        self._held: deque[tuple[int, bytes]] = deque()
        self._hwm = hwm
        self._idle = idle or (2.0 if resumes else 60.0)
        self._resumes = resumes
        # libzmq's default reconnect interval (100 ms) is so long that the router could miss kvbus's first message after
        # a restart
        self.context.setsockopt(zmq.RECONNECT_IVL, 1)
        self._dealer: zmq.Socket[bytes] | None = None
        self._clock = RunningClock(time.monotonic)
        self._asked_at = 0.0
        self._fresh = False
        self.subscribe()

    @property
    def blocks(self) -> set[Key]:
        return set(self.view.blocks)

    def ask(self) -> None:
        """Send the standard request for all batches from the router's next seq."""
        assert self._dealer is None
        self._dealer = self.request(self.next, self._hwm)
        self._asked_at = self._clock.time()
        self._fresh = True

    async def read(self, count: int = -1) -> None:
        """Read ``count`` messages of the replay answer, or by default the complete answer.

        Raises:
            GivenUpError: the answer broke a rule that the docstring of the class lists.
        """
        while (dealer := self._dealer) is not None and count:
            await self._there_is_a_message(dealer)
            if self._dealer is not dealer:
                return  # the router was restarted meanwhile
            count -= 1
            empty, topic, frame, payload = dealer.recv_multipart()
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
        # This clock does not count time in which this process or its machine is suspended.
        waiting_since = self._clock.time()
        await asyncio.sleep(0)
        while not (dealer.closed or dealer.poll(0)):
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
        """Request a replay and read the complete answer. Live batches that arrive in the meantime wait."""
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
        """Apply the live batches that have arrived, and return the next expected seq."""
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
                live = self._live
                await self.rebuild()
                if self._live is not live:
                    return self.next  # the router was restarted meanwhile
                assert seq <= self.next, "what was sent live can be replayed"
            if seq == self.next:
                self._take(payload)
        return self.next

    def restart(self) -> None:
        """Drop all blocks and connect again, like a new router process, which expects seq 0 first."""
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
    """Let a router follow the live stream until a condition holds."""
    end = asyncio.get_running_loop().time() + PATIENCE
    while True:
        await router.follow()
        if condition():
            return
        assert asyncio.get_running_loop().time() < end, f"not within {PATIENCE:g} s: {what}"
        await asyncio.sleep(0.002)


class NeverAsks:
    """A router with a SUB for each stream, and a plain set of blocks for each rank of each stream. It ignores seqs."""

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
        """Apply the batches that have arrived. Return the hashes of all blocks, without hashes that are bytes."""
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
    """A router that ignores ranks: it has one set of blocks for all streams, which a clear of one rank empties."""

    def _view(self, stream: int, rank: int) -> PlainSetRouter:
        return self._views.setdefault((0, 0), PlainSetRouter())


class TopicRouter:
    """A router that never requests a replay, because it gets the state when it subscribes.

    It records every batch that breaks the rules of such a stream as a violation.

    Args:
        endpoint: endpoint of the live streams.
        topics: topic prefixes that the router subscribes to.
        bind: whether the router listens, and kvbus connects to it.
        context: a ZMQ context with CURVE keys, which :meth:`close` terminates.
    """

    def __init__(
        self, endpoint: str, *topics: bytes, bind: bool = False, context: zmq.Context[zmq.Socket[bytes]] | None = None
    ) -> None:
        self.views: dict[bytes, PlainSetRouter] = {}
        self.next: dict[bytes, int] = {}
        self.violations: list[str] = []
        self.states: dict[bytes, int] = {}
        """Number of AllBlocksCleared events that the router got under each topic. Each begins a state."""
        self._endpoint = endpoint
        self._topics: Final = topics or (b"",)
        self._bind = bind
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context() if context is None else context
        self._socket: zmq.Socket[bytes] | None = None
        self.connect()

    def connect(self) -> None:
        """Connect and subscribe. The router keeps the blocks that it knows."""
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        for topic in self._topics:
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        if self._bind:
            self._socket.bind(self._endpoint)
        else:
            self._socket.connect(self._endpoint)

    def listen_again(self) -> bool:
        """Bind the socket again. Return False if the address is still in use."""
        try:
            self.connect()
        except zmq.ZMQError:
            self.disconnect()
            return False
        return True

    def disconnect(self) -> None:
        """Close the connection. Messages that the router has not read are lost."""
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def close(self) -> None:
        self.disconnect()
        self._context.term()

    def blocks(self, topic: bytes) -> set[int | bytes]:
        """Apply the batches that have arrived, and return the hashes of one worker's blocks."""
        return self.held.get(topic, set())

    @property
    def held(self) -> dict[bytes, set[int | bytes]]:
        """Block hashes for each topic, without the workers that have no block."""
        self.read()
        return {topic: {block for _, _, block in view.blocks} for topic, view in self.views.items() if view.blocks}

    def read(self) -> None:
        """Apply the batches of all topics that have arrived."""
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
