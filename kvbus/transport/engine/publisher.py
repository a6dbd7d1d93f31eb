"""The sockets of a simulated vLLM, SGLang or llm-d engine.

`EnginePublisher` is a PUB socket and, on request, a ROUTER that replays the newest batches. It stands for an engine in
``kvbus sim``, ``kvbus play``, the demo and the tests, so it has the weaknesses of real engines: its messages do not
name the epoch, its replay buffer drops old batches without notice, and it silently drops requests without a delimiter.
"""

from __future__ import annotations

import asyncio
import errno
import time
from typing import TYPE_CHECKING, Final, Self

import zmq

from kvbus.common.errors import BindError
from kvbus.core.wire.frames import ASKS_REPLAY
from kvbus.transport.engine.replay import EngineReplayServer, Framing, ReplayBuffer, answer
from kvbus.transport.sockets import attach_or_refuse, bound_endpoint, check_port, end, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

__all__ = ["EnginePublisher", "Framing", "binds"]

_REBIND_S: Final = 5.0  # seconds to try again, because libzmq frees the address of a closed socket only after a while


def binds(endpoint: str) -> bool:
    """Return whether an engine with this endpoint in its configuration binds it. Otherwise the engine connects to it.

    vLLM binds wildcard addresses, ``ipc://`` and ``inproc://``, and connects to every other host. SGLang has the same
    rule, and also binds ``0.0.0.0`` from version 0.5.13 on.
    """
    return any(sign in endpoint for sign in ("*", "::", "ipc://", "inproc://", "0.0.0.0"))  # noqa: S104


class EnginePublisher:
    """A PUB socket and a replay ROUTER that behave like the sockets of an engine.

    Args:
        endpoint: endpoint of the live stream, such as ``tcp://*:5557``, ``tcp://127.0.0.1:*`` or ``ipc://…``.
        replay_endpoint: endpoint that the ROUTER binds, as engines do; None for no replay.
        topic: first frame of every message.
        framing: layout of replay answers. ``3``: vLLM up to 0.25 and SGLang up to 0.5.21; ``4``: vLLM from 0.26, SGLang
            from 0.5.22, Dynamo's mocker; ``sim``: llm-d-inference-sim, today the same as ``4``.
        buffer_steps: maximum number of batches kept for replays. A full buffer drops its oldest batch without notice.
        bind: True if the PUB socket binds ``endpoint``, False if it connects; None for the rule of engines (`binds`).
        hwm: high-water mark of the PUB socket, in messages for each subscriber. Above it the socket silently drops
            messages.
        context: a ZeroMQ context to share, which ``inproc://`` needs; None if the publisher creates its own context.
        heartbeat_ms: milliseconds between two ZMTP PINGs. A subscriber that does not answer a PING within this time is
            disconnected. 0 for no PINGs.

    `start` (or ``async with``) opens the sockets, and `close` closes them. Call `publish`, `skip` and `restart` from
    the same thread.
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
        heartbeat_ms: int = 0,
    ) -> None:
        self.topic: Final = topic
        self.framing: Final = framing
        self.bind: Final = binds(endpoint) if bind is None else bind
        self.replay_fault: Callable[[list[list[bytes]]], Iterable[list[bytes]]] = list
        """Called with the messages of each replay answer. It returns the messages to send, so a test can inject
        faults.
        """
        self.replay_requests = 0
        """Number of well-formed replay requests received since this object was created, in all epochs."""
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._hwm = hwm
        self._heartbeat_ms = heartbeat_ms
        self._own_context = context is None
        self._context = context
        self._buffer = ReplayBuffer(buffer_steps)
        self._next_seq = 0
        self._subscriptions = 0
        self._pub: zmq.Socket[bytes] | None = None
        self._server: EngineReplayServer | None = None

    @property
    def endpoint(self) -> str:
        """The endpoint of the live stream. After `start` of a publisher that binds, it has the real port."""
        return self._endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """The endpoint of the replay ROUTER, after `start` with the real port; None without replay."""
        return self._replay_endpoint

    @property
    def next_seq(self) -> int:
        """Seq of the batch that is published next."""
        return self._next_seq

    @property
    def subscriptions(self) -> int:
        """Number of subscriptions that have arrived in this epoch."""
        return self._count_subscriptions()

    @property
    def buffered(self) -> int:
        """Number of batches in the replay buffer."""
        return len(self._buffer)

    def start(self) -> None:
        """Open the PUB socket and the replay ROUTER.

        Raises:
            BindError: an endpoint cannot be bound.
            ValueError: an endpoint is malformed.
        """
        if self._pub is not None:
            return
        if self._context is None:
            self._context = zmq.Context()
        try:
            self._open(self._context, await_address=False)
        except BaseException:
            self.close()
            raise

    def close(self, linger: float = 0.0) -> None:
        """Close the sockets. libzmq continues to send queued batches for up to ``linger`` seconds."""
        self._shut(linger)
        if self._own_context and self._context is not None:
            end(self._context)
            self._context = None

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def publish(self, payload: bytes, *, seq: int | None = None, live: bool = True) -> int:
        """Publish one encoded batch, and keep it for replays.

        Args:
            payload: the msgpack batch.
            seq: the batch's seq; None for the next one. The seqs of later batches follow it.
            live: whether to send the batch on the live stream. With False the batch is only kept for replays, so
                subscribers see a gap.

        Returns:
            The batch's seq.
        """
        if self._pub is None:
            raise RuntimeError("the publisher is not started")
        if seq is None:
            seq = self._next_seq
        self._next_seq = seq + 1
        self._buffer.append(seq, payload)
        if live:
            self.send_frames(self.topic, seq.to_bytes(8, "big"), payload)
        return seq

    def send_again(self, seq: int) -> None:
        """Send a buffered batch again on the live stream, so that subscribers get it twice or late.

        Raises:
            KeyError: the batch was never published, or the replay buffer has dropped it already.
        """
        self.send_frames(self.topic, seq.to_bytes(8, "big"), self._buffer.find(seq))

    def send_frames(self, *frames: bytes) -> None:
        """Send one multipart message on the PUB socket, without checking its frames."""
        if self._pub is None:
            raise RuntimeError("the publisher is not started")
        # one send for each frame, because pyzmq's send_multipart costs twice as much
        for frame in frames[:-1]:
            self._pub.send(frame, zmq.SNDMORE)
        self._pub.send(frames[-1])

    def skip(self) -> int:
        """Use a seq without sending a batch, and return this seq.

        vLLM assigns the seq before it encodes and sends the batch. If an exception is raised between these steps, the
        seq is missing for ever, also in replays.
        """
        seq = self._next_seq
        self._next_seq += 1
        return seq

    def restart(self, linger: float = 0.0) -> None:
        """Start a new epoch as a restarted engine does: empty buffer, seq 0, same endpoints, all connections closed.

        The call blocks for the few milliseconds that libzmq needs to free the addresses.

        Args:
            linger: maximum seconds for which libzmq continues to send queued batches.
        """
        if self._context is None:
            raise RuntimeError("the publisher is not started")
        self._shut(linger)
        self.renumber()
        self._subscriptions = 0
        self._open(self._context, await_address=True)

    def renumber(self) -> None:
        """Start a new epoch (empty buffer, seq 0) without closing a connection.

        A subscriber sees this if a proxy stands between it and a restarted engine.
        """
        self._buffer.clear()
        self._next_seq = 0

    async def wait_for_subscriber(self, timeout: float | None = None, *, count: int = 1) -> None:  # noqa: ASYNC109
        """Wait until ``count`` subscriptions have arrived in this epoch.

        A subscriber does not get the batches that are published before its subscription arrives.

        Raises:
            TimeoutError: fewer subscriptions arrived within ``timeout`` seconds.
        """
        async with asyncio.timeout(timeout):
            while self._count_subscriptions() < count:  # noqa: ASYNC110 - the socket sets no asyncio.Event
                await asyncio.sleep(0.002)

    def _asked(self, start: int) -> Iterable[list[bytes]]:
        self.replay_requests += 1
        return self.replay_fault(answer(self._buffer.since(start), self.framing, self.topic))

    def _open(self, context: zmq.Context[zmq.Socket[bytes]], *, await_address: bool) -> None:
        # an XPUB works like a PUB and also reports subscriptions, so that a test can wait for a subscription without
        # sleeping
        self._pub = context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.SNDHWM, self._hwm)
        self._pub.setsockopt(zmq.IPV6, 1)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._pub.setsockopt(zmq.HEARTBEAT_IVL, self._heartbeat_ms)
        if self.bind:
            self._endpoint = _bind(self._pub, self._endpoint, await_address=await_address)
        else:
            attach_or_refuse(self._pub, self._endpoint, bind=False)
        if self._replay_endpoint is not None:
            router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
            try:
                # without MANDATORY, a ROUTER whose queue is full silently drops messages, even END
                router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                router.setsockopt(zmq.IPV6, 1)
                self._replay_endpoint = _bind(router, self._replay_endpoint, await_address=await_address)
            except (BindError, ValueError):
                router.close(0)
                raise
            self._server = EngineReplayServer(router, context, self._asked)

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
            if message[1:] == ASKS_REPLAY:
                continue
            if message[:1] == b"\x01":
                self._subscriptions += 1
        return self._subscriptions


def _bind(socket: zmq.Socket[bytes], endpoint: str, *, await_address: bool = False) -> str:
    """Bind a socket, and return the endpoint with the real port.

    Args:
        socket: the socket to bind.
        endpoint: the endpoint; port 0 or ``*`` means any free port.
        await_address: whether to try again for up to ``_REBIND_S`` seconds while the address is in use. libzmq frees
            the address of a closed socket only after a while.
    """
    check_port(endpoint)
    # libzmq expects a star for any free port, not 0
    wanted = f"{endpoint[:-1]}*" if endpoint.startswith("tcp://") and endpoint.endswith(":0") else endpoint
    deadline = time.monotonic() + (_REBIND_S if await_address else 0.0)
    while True:
        try:
            socket.bind(wanted)
            break
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise refused(error, endpoint, bind=True) from error
            time.sleep(0.002)
    return bound_endpoint(socket, endpoint)
