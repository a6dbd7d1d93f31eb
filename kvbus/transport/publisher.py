"""The engine's side of the wire: what a vLLM, SGLang or simulated engine binds.

`EnginePublisher` is a PUB socket plus, if asked for, the ROUTER that replays the last batches. It stands in
for an engine in ``kvbus sim``, ``kvbus play``, the demo and the tests, so it repeats the engines' habits,
good and bad: a sequence number without an epoch, a trimmed buffer that says nothing, requests without a
delimiter dropped in silence.

The replay server runs in a thread of its own, as far away from the caller's event loop as an engine's
publisher thread is: it answers while the loop is busy, and works the same under asyncio, uvloop and no loop
at all.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import itertools
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Literal, Self

import zmq

from kvbus.errors import BindError
from kvbus.transport.rawsub import refused

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

Framing = Literal["3", "4", "sim"]

END_SEQ: Final = b"\xff" * 8
_BURST: Final = 64  # answers to one requester before the next one has its turn
_RETRY_MS: Final = 2  # how soon to try again when every requester is at its high-water mark
_REBIND_S: Final = 5.0  # libzmq gives a closed listener's address back asynchronously


class ReplayFault(enum.Enum):
    """How a replay server misbehaves, for tests of its clients."""

    NONE = "none"
    SILENT = "silent"
    """No answer at all."""
    EMPTY = "empty"
    """END at once, whatever is buffered."""
    NO_END = "no-end"
    """Every batch, and never the END marker (an engine that lost it at the ROUTER's high-water mark)."""
    ENDLESS = "endless"
    """The same batches over and over, and never the END marker."""
    DUPLICATE = "duplicate"
    """Every batch twice."""
    INTERLEAVE = "interleave"
    """Two whole answers frame by frame, each with its END, as when two requests were outstanding."""


def binds(endpoint: str) -> bool:
    """Tell whether an engine binds this endpoint or dials out to it.

    vLLM's rule: wildcards, ``ipc://`` and ``inproc://`` are bound, a concrete host is connected to.
    SGLang adds ``0.0.0.0`` from 0.5.13 on.
    """
    return any(mark in endpoint for mark in ("*", "::", "ipc://", "inproc://", "0.0.0.0"))  # noqa: S104


class _Buffer:
    """The last `steps` batches, written by the publisher and read by the replay thread."""

    def __init__(self, steps: int) -> None:
        self._lock = threading.Lock()
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=steps)

    def append(self, seq: int, payload: bytes) -> None:
        with self._lock:
            self._batches.append((seq, payload))

    def since(self, start: int) -> list[tuple[int, bytes]]:
        with self._lock:
            return [batch for batch in self._batches if batch[0] >= start]

    def find(self, seq: int) -> bytes:
        with self._lock:
            for known, payload in reversed(self._batches):
                if known == seq:
                    return payload
        raise KeyError(f"seq {seq} is not in the replay buffer")

    def clear(self) -> None:
        with self._lock:
            self._batches.clear()

    def __len__(self) -> int:
        return len(self._batches)


class _ReplayServer:
    """One ROUTER and the thread that serves it."""

    def __init__(
        self, owner: EnginePublisher, router: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self._owner = owner
        self._router = router
        name = f"inproc://kvbus-replay-stop-{id(self)}"
        self._stop_in: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._stop_in.bind(name)
        self._stop_out: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._stop_out.connect(name)
        self._jobs: dict[bytes, deque[Iterator[list[bytes]]]] = {}
        self._unsent: dict[bytes, list[bytes]] = {}
        self._thread = threading.Thread(target=self._serve, name="kvbus-engine-replay", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving, drop the answers under way, close the ROUTER."""
        self._stop_out.send(b"")
        self._thread.join()
        self._stop_out.close(0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stop_in, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        moved = True
        try:
            while True:
                wait_ms = None if not self._jobs else 0 if moved else _RETRY_MS
                ready = dict(poller.poll(wait_ms))
                if self._stop_in in ready:
                    return
                if self._router in ready:
                    self._take_requests()
                moved = self._send_some()
        finally:
            self._router.close(0)
            self._stop_in.close(0)

    def _take_requests(self) -> None:
        while True:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # [identity, "", start]; engines drop anything else without a word
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                continue
            client, _, start = frames
            self._owner.replay_requests += 1
            answer = self._owner.answer(int.from_bytes(start, "big"))
            self._jobs.setdefault(client, deque()).append(answer)

    def _send_some(self) -> bool:
        """Give every requester a burst; False when none of them could take a frame."""
        moved = False
        for client in list(self._jobs):
            for _ in range(_BURST):
                frames = self._unsent.pop(client, None) or self._next(client)
                if frames is None:
                    break
                try:
                    self._router.send_multipart([client, *frames], zmq.NOBLOCK)
                except zmq.Again:
                    self._unsent[client] = frames
                    break
                except zmq.ZMQError as error:
                    if error.errno != zmq.EHOSTUNREACH:
                        raise
                    del self._jobs[client]
                    break
                moved = True
        return moved

    def _next(self, client: bytes) -> list[bytes] | None:
        queue = self._jobs[client]
        while queue:
            frames = next(queue[0], None)
            if frames is not None:
                return frames
            queue.popleft()
        del self._jobs[client]
        return None


class EnginePublisher:
    """A PUB socket and a replay ROUTER that behave as an engine's do.

    Args:
        endpoint: where the live stream goes: ``tcp://*:5557``, ``tcp://127.0.0.1:*``, ``ipc://…``.
        replay_endpoint: where the ROUTER binds (engines always bind it), or None for no replay.
        topic: first frame of every message.
        framing: layout of replay answers. ``3``: vLLM up to 0.25 and SGLang up to 0.5.21; ``4``: vLLM from
            0.26, SGLang from 0.5.22, Dynamo's mocker; ``sim``: llm-d-inference-sim, today the same as ``4``.
        buffer_steps: batches kept for replay; the oldest are trimmed without notice.
        bind: True binds, False dials out, None follows the engines' own rule (`binds`).
        hwm: send high-water mark of the PUB socket, messages a subscriber; what is beyond is dropped
            silently.
        context: a ZeroMQ context to share (``inproc://``); by default the publisher has its own.

    Sockets open in `start` (or ``async with``) and close in `close`. `publish`, `skip` and `restart`
    belong to one thread.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        topic: bytes = b"",
        framing: Framing = "4",
        buffer_steps: int = 10_000,
        bind: bool | None = None,
        hwm: int = 100_000,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.topic: Final = topic
        self.framing: Final = framing
        self.bind: Final = binds(endpoint) if bind is None else bind
        self.replay_fault = ReplayFault.NONE
        self.replay_requests = 0
        """Well-formed replay requests received so far, over all lives."""
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._hwm = hwm
        self._own_context = context is None
        self._context = context
        self._buffer = _Buffer(buffer_steps)
        self._next_seq = 0
        self._subscriptions = 0
        self._pub: zmq.Socket[bytes] | None = None
        self._server: _ReplayServer | None = None

    @property
    def endpoint(self) -> str:
        """The live endpoint; after `start` the one really bound, port included."""
        return self._endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """The replay endpoint; after `start` the one really bound, port included."""
        return self._replay_endpoint

    @property
    def next_seq(self) -> int:
        """The sequence number that the next batch gets."""
        return self._next_seq

    @property
    def buffered(self) -> int:
        """Batches that a replay from 0 would answer with."""
        return len(self._buffer)

    def start(self) -> None:
        """Open the sockets.

        Raises:
            BindError: an endpoint cannot be bound.
            ValueError: an endpoint is malformed.
        """
        if self._pub is not None:
            return
        if self._context is None:
            self._context = zmq.Context()
        try:
            self._open(self._context, patient=False)
        except BaseException:
            self.close()
            raise

    def close(self, linger: float = 0.0) -> None:
        """Close the sockets; batches not yet on the wire have `linger` seconds to leave."""
        self._shut(linger)
        if self._own_context and self._context is not None:
            self._context.term()
            self._context = None

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def publish(self, payload: bytes, *, seq: int | None = None, live: bool = True) -> int:
        """Publish one encoded batch and keep it for replay.

        Args:
            payload: the msgpack batch.
            seq: sequence number to use instead of the next one; numbering goes on from it.
            live: False buffers the batch but keeps it off the PUB socket: a batch lost on its way.

        Returns:
            The batch's sequence number.
        """
        if seq is None:
            seq = self._next_seq
        self._next_seq = seq + 1
        self._buffer.append(seq, payload)
        if live:
            self.send_frames(self.topic, seq.to_bytes(8, "big"), payload)
        return seq

    def send_again(self, seq: int) -> None:
        """Send a buffered batch live once more: a duplicate, or the late half of a reordering.

        Raises:
            KeyError: `seq` was never published or is trimmed already.
        """
        self.send_frames(self.topic, seq.to_bytes(8, "big"), self._buffer.find(seq))

    def send_frames(self, *frames: bytes) -> None:
        """Send one multipart message on the PUB socket as it is, malformed or not."""
        if self._pub is None:
            raise RuntimeError("the publisher is not started")
        # plain sends: pyzmq's send_multipart costs twice as much
        for frame in frames[:-1]:
            self._pub.send(frame, zmq.SNDMORE)
        self._pub.send(frames[-1])

    def skip(self) -> int:
        """Use up a sequence number with nothing behind it and return it.

        vLLM takes the number before it encodes and sends: an exception there leaves a hole
        that no replay fills.
        """
        seq = self._next_seq
        self._next_seq += 1
        return seq

    def restart(self, linger: float = 0.0) -> None:
        """Die and come back: empty buffer, seq from 0, same endpoints, every connection dropped.

        Blocks for the few milliseconds that the operating system needs to give the addresses back.
        """
        if self._context is None:
            raise RuntimeError("the publisher is not started")
        self._shut(linger)
        self._buffer.clear()
        self._next_seq = 0
        self._subscriptions = 0
        self._open(self._context, patient=True)

    async def wait_for_subscriber(self, timeout: float | None = None, *, count: int = 1) -> None:  # noqa: ASYNC109
        """Wait until `count` subscriptions have arrived in this life.

        What is published before is lost to the subscriber.

        Raises:
            TimeoutError: they did not arrive within `timeout` seconds.
        """
        async with asyncio.timeout(timeout):
            while self._count_subscriptions() < count:  # noqa: ASYNC110 - the socket sets no asyncio.Event
                await asyncio.sleep(0.002)

    def answer(self, start: int) -> Iterator[list[bytes]]:
        """Yield the frames that answer a replay from `start`, as a DEALER receives them, END included."""
        fault = self.replay_fault
        if fault is ReplayFault.SILENT:
            return
        batches = [] if fault is ReplayFault.EMPTY else self._buffer.since(start)
        answer = [self._frames(seq.to_bytes(8, "big"), payload) for seq, payload in batches]
        # the END marker has an empty topic even where the stream has one
        end = self._frames(END_SEQ, b"", topic=b"")
        match fault:
            case ReplayFault.NO_END:
                yield from answer
            case ReplayFault.ENDLESS:
                yield from itertools.cycle(answer)
            case ReplayFault.DUPLICATE:
                yield from (frames for frames in answer for _ in range(2))
                yield end
            case ReplayFault.INTERLEAVE:
                yield from (frames for frames in [*answer, end] for _ in range(2))
            case _:
                yield from answer
                yield end

    def _frames(self, seq: bytes, payload: bytes, topic: bytes | None = None) -> list[bytes]:
        if self.framing == "3":
            return [b"", seq, payload]
        return [b"", self.topic if topic is None else topic, seq, payload]

    def _open(self, context: zmq.Context[zmq.Socket[bytes]], *, patient: bool) -> None:
        # XPUB is PUB to its subscribers, and lets a test wait for one instead of sleeping
        self._pub = context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.SNDHWM, self._hwm)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        if self.bind:
            self._endpoint = _bind(self._pub, self._endpoint, patient=patient)
        else:
            _dial(self._pub, self._endpoint)
        if self._replay_endpoint is not None:
            router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
            try:
                # without MANDATORY a ROUTER drops at its high-water mark in silence, and END with it
                router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._replay_endpoint = _bind(router, self._replay_endpoint, patient=patient)
            except (BindError, ValueError):
                router.close(0)
                raise
            self._server = _ReplayServer(self, router, context)

    def _shut(self, linger: float) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._pub is not None:
            self._pub.close(int(linger * 1000))
            self._pub = None

    def _count_subscriptions(self) -> int:
        while self._pub is not None:
            try:
                message = self._pub.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if message[:1] == b"\x01":
                self._subscriptions += 1
        return self._subscriptions


def _bind(socket: zmq.Socket[bytes], endpoint: str, *, patient: bool = False) -> str:
    """Bind and return the real endpoint; `patient` waits for an address that we have just left ourselves."""
    # libzmq spells "any port" as a star
    wanted = f"{endpoint[:-1]}*" if endpoint.startswith("tcp://") and endpoint.endswith(":0") else endpoint
    deadline = time.monotonic() + (_REBIND_S if patient else 0.0)
    while True:
        try:
            socket.bind(wanted)
            break
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise refused(error, endpoint, bind=True) from error
            time.sleep(0.002)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") or endpoint


def _dial(socket: zmq.Socket[bytes], endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise refused(error, endpoint, bind=False) from error
