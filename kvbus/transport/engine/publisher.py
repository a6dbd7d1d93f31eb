"""The engine's side of the wire: the sockets of a vLLM, SGLang or simulated engine.

`EnginePublisher` is a PUB socket and, if wanted, a ROUTER that replays the newest batches. It plays an engine in
``kvbus sim``, ``kvbus play``, the demo and the tests, so it has the weaknesses of real engines: its sequence frames
carry no epoch, it trims its replay buffer without notice, and it silently drops requests without a delimiter.
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

_REBIND_S: Final = 5.0  # seconds to retry: libzmq releases the address of a closed listener asynchronously


def binds(endpoint: str) -> bool:
    """Return whether an engine binds this endpoint; otherwise the engine connects to it.

    The rule is vLLM's: vLLM binds wildcards, ``ipc://`` and ``inproc://``, and connects to a concrete host.
    SGLang also binds ``0.0.0.0``, from 0.5.13 on.
    """
    return any(sign in endpoint for sign in ("*", "::", "ipc://", "inproc://", "0.0.0.0"))  # noqa: S104


class EnginePublisher:
    """A PUB socket and a replay ROUTER that behave like an engine's sockets.

    Args:
        endpoint: endpoint of the live stream: ``tcp://*:5557``, ``tcp://127.0.0.1:*``, ``ipc://…``.
        replay_endpoint: endpoint that the ROUTER binds (engines always bind it), or None for no replay.
        topic: first frame of every message.
        framing: layout of replay answers. ``3``: vLLM up to 0.25 and SGLang up to 0.5.21; ``4``: vLLM from
            0.26, SGLang from 0.5.22, Dynamo's mocker; ``sim``: llm-d-inference-sim, today the same as ``4``.
        buffer_steps: batches kept for replay; the buffer drops the oldest without notice.
        bind: True binds, False connects, None follows the engines' own rule (`binds`).
        hwm: send high-water mark of the PUB socket, in messages per subscriber; the socket drops silently beyond it.
        context: a ZeroMQ context to share (``inproc://``); by default the publisher has its own.
        heartbeat_ms: time between two PINGs. A subscriber that does not answer a PING within this time is
            disconnected. 0: no PINGs.

    `start` (or ``async with``) opens the sockets, `close` closes them. Call `publish`, `skip` and `restart` from the
    same thread.
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
        """Turns the messages of each replay answer into the messages to send: a test injects faults here."""
        self.replay_requests = 0
        """Number of well-formed replay requests received so far, in all epochs."""
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
        """The live endpoint; after `start` of a bound publisher, with the real port."""
        return self._endpoint

    @property
    def replay_endpoint(self) -> str | None:
        """The replay endpoint; after `start`, with the real port."""
        return self._replay_endpoint

    @property
    def next_seq(self) -> int:
        """Sequence number of the next batch."""
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
            self._open(self._context, await_address=False)
        except BaseException:
            self.close()
            raise

    def close(self, linger: float = 0.0) -> None:
        """Close the sockets. libzmq keeps sending queued batches for up to `linger` seconds."""
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
        """Publish one encoded batch and keep it for replay.

        Args:
            payload: the msgpack batch.
            seq: sequence number of this batch; None for the next one. The numbering continues after it.
            live: False only buffers the batch; subscribers then see a gap.

        Returns:
            The batch's sequence number.
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
        """Send a buffered batch again on the live stream, as a duplicate or a late batch.

        Raises:
            KeyError: `seq` was never published, or the buffer has dropped it already.
        """
        self.send_frames(self.topic, seq.to_bytes(8, "big"), self._buffer.find(seq))

    def send_frames(self, *frames: bytes) -> None:
        """Send one multipart message on the PUB socket without any check."""
        if self._pub is None:
            raise RuntimeError("the publisher is not started")
        # single sends, because pyzmq's send_multipart costs twice as much
        for frame in frames[:-1]:
            self._pub.send(frame, zmq.SNDMORE)
        self._pub.send(frames[-1])

    def skip(self) -> int:
        """Use a sequence number without sending a batch, and return the number.

        vLLM takes the number before it encodes and sends the batch. An exception in between leaves a gap that no
        replay can fill.
        """
        seq = self._next_seq
        self._next_seq += 1
        return seq

    def restart(self, linger: float = 0.0) -> None:
        """Start a new epoch as a restarted engine does: empty buffer, seq 0, same endpoints, all connections closed.

        The call blocks for the few milliseconds that libzmq needs to release the addresses.
        """
        if self._context is None:
            raise RuntimeError("the publisher is not started")
        self._shut(linger)
        self.renumber()
        self._subscriptions = 0
        self._open(self._context, await_address=True)

    def renumber(self) -> None:
        """Start a new epoch (empty buffer, seq 0) but keep all connections, as a proxy in front of an engine does."""
        self._buffer.clear()
        self._next_seq = 0

    async def wait_for_subscriber(self, timeout: float | None = None, *, count: int = 1) -> None:  # noqa: ASYNC109
        """Wait until `count` subscriptions have arrived in this epoch.

        A subscriber misses the batches published before its subscription arrives.

        Raises:
            TimeoutError: fewer subscriptions arrived within `timeout` seconds.
        """
        async with asyncio.timeout(timeout):
            while self._count_subscriptions() < count:  # noqa: ASYNC110 - the socket sets no asyncio.Event
                await asyncio.sleep(0.002)

    def _asked(self, start: int) -> Iterable[list[bytes]]:
        self.replay_requests += 1
        return self.replay_fault(answer(self._buffer.since(start), self.framing, self.topic))

    def _open(self, context: zmq.Context[zmq.Socket[bytes]], *, await_address: bool) -> None:
        # an XPUB works like a PUB and also reports subscriptions, so a test can wait for one instead of sleeping
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
                # without MANDATORY a ROUTER silently drops messages at its high-water mark, even END
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
    """Bind, and return the real endpoint. With `await_address`, wait until libzmq has released the address."""
    check_port(endpoint)
    # libzmq spells "any port" as a star, not as 0
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
