"""The sockets of one stream's subscriber: a SUB for the live batches and a DEALER for each request.

`StreamSockets.pump` hands received messages to a `Handler`. It never blocks. The ZeroMQ file descriptor is
edge-triggered: it signals once, and again only after somebody has read ZMQ_EVENTS; any send or recv may consume the
edge. So the reader callback reads ZMQ_EVENTS and only sets a flag. `pump` reads until EAGAIN or its cap, and reads
ZMQ_EVENTS again before it reports that nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Literal, Protocol

import zmq

from kvbus.core.outputs.snapshot import REQUEST
from kvbus.core.wire.frames import ASKS_REPLAY, END_SEQ, LONG_SEQ_BYTES, SEQ_BYTES, replay_request
from kvbus.transport.pump import MAX_KEPT_FRAMES, receive, waiting
from kvbus.transport.sockets import (
    PeerPolicy,
    attach_again,
    attach_or_refuse,
    bound_endpoint,
    end,
    make_socket,
    rebuilding_id,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvbus.transport.curve import Curve

    Context = zmq.Context[zmq.Socket[bytes]]

AnswerFraming = Literal["auto", "3", "4", "sim"]

_CAP: Final = 256  # messages a socket may hand over before the loop's other tasks get their turn
_REVIVE_S: Final = 1.0  # libzmq says that it will reconnect within this time, or it never will
_MONITOR_EVENT: Final = struct.Struct("=HI")
_DOWN: Final = zmq.EVENT_DISCONNECTED
_RETRIED: Final = zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECTED
_UP: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED


class End(Enum):
    """The END marker of a replay answer."""

    END = auto()


END: Final = End.END


def split_answer(
    frames: Sequence[bytes], framing: AnswerFraming = "auto"
) -> tuple[bytes, bytes, bytes] | Literal[End.END] | None:
    """Split one message of a replay answer, as a DEALER receives it.

    Framing 3 is ``["", seq, payload]`` (vLLM to 0.25, SGLang to 0.5.21), framing 4 ``["", topic, seq,
    payload]`` (vLLM from 0.26, SGLang from 0.5.22, llm-d, Dynamo's mocker, llm-d-inference-sim). ``auto``
    accepts both, with or without the empty delimiter: the sequence frame is always the last but one.

    Returns:
        (topic, sequence frame, payload), `END` for the END marker, None for a message that is no answer.
    """
    count = len(frames)
    if framing != "auto" and count != (3 if framing == "3" else 4):
        return None
    if not 2 <= count <= 4:
        return None
    seq, payload = frames[-2], frames[-1]
    if seq[:SEQ_BYTES] == END_SEQ:
        return END
    if len(seq) not in (SEQ_BYTES, LONG_SEQ_BYTES):
        return None
    topic = frames[-3] if count == 4 or (count == 3 and frames[0]) else b""
    return topic, seq, payload


class Handler(Protocol):
    """Receives what the sockets bring. Only `StreamSockets.pump` calls it."""

    def on_live(self, frames: list[bytes]) -> None:
        """Take a live message unchecked; a correct one is ``[topic, seq, payload]``."""

    def on_replayed(self, topic: bytes, seq: bytes, payload: bytes) -> None:
        """Take a batch that answers the last request."""

    def on_replay_ended(self) -> None:
        """Take the last request's END."""

    def on_snapshot(self, frames: list[bytes]) -> None:
        """Take the message that answers the last snapshot request."""

    def on_connected(self) -> None:
        """Handle a new live connection."""

    def on_interrupted(self) -> None:
        """Handle the loss of the live connection."""


class StreamSockets:
    """SUB, its monitor, and at most one DEALER.

    Args:
        endpoint: the live stream, or None for replay only.
        replay_endpoint: the replay ROUTER, or None.
        snapshot_endpoint: the snapshot ROUTER, or None.
        topic: subscription prefix.
        bind: True binds the SUB, for publishers that connect to it (vLLM with a concrete host).
        hwm: messages that ZeroMQ queues for each socket, before the peer's queue fills up and it drops.
        max_message_bytes: limit of one frame in bytes. libzmq closes the connection of a peer that sends more and,
            where we connected, never connects again. The monitor notices that, and we connect again.
        framing: layout of replay answers to accept.
        context: a ZeroMQ context to share (``inproc://``); by default the sockets have their own.
        curve: keys for a publisher that wants CURVE; only where the sockets connect.
        wake: called when there may be something to `pump`.
    """

    def __init__(
        self,
        endpoint: str | None,
        replay_endpoint: str | None,
        *,
        wake: Callable[[], None],
        snapshot_endpoint: str | None = None,
        topic: bytes = b"",
        bind: bool = False,
        hwm: int = 100_000,
        max_message_bytes: int = 64 * 1024 * 1024,
        framing: AnswerFraming = "auto",
        context: Context | None = None,
        curve: Curve | None = None,
    ) -> None:
        # The peer.
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._snapshot_endpoint = snapshot_endpoint
        self._topic = topic
        self._framing: AnswerFraming = framing

        # Socket settings.
        self._bind = bind
        self._hwm = hwm
        self._policy = PeerPolicy(max_message_bytes, curve)
        self._own_context = context is None
        self._context = context

        # The open sockets; `_for_snapshot` says which kind of request the DEALER has sent.
        self._sub: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._for_snapshot = False

        # The event loop: file descriptors it watches, sockets to close in its next turn, the next reconnection.
        self._wake = wake
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers: dict[zmq.Socket[bytes], int] = {}
        self._retired: list[zmq.Socket[bytes]] = []
        self._revival: asyncio.TimerHandle | None = None

    @property
    def endpoint(self) -> str | None:
        """The live endpoint; once open, the bound one, with its real port."""
        return self._endpoint

    def open(self) -> None:
        """Open the sockets; needs a running event loop.

        Raises:
            BindError: the endpoint cannot be bound.
            ValueError: an endpoint is malformed.
        """
        self._loop = asyncio.get_running_loop()
        if self._context is None:
            self._context = zmq.Context()
        try:
            for asked in (self._replay_endpoint, self._snapshot_endpoint):
                if asked is not None:
                    # a first DEALER reveals a malformed endpoint now, not at the first gap
                    self._dealer = self._dial(asked)
                    self._drop_dealer()
            if self._endpoint is not None:
                self._open_sub(self._endpoint)
        except BaseException:
            self.abort()
            raise

    def ask(self, start: int) -> None:
        """Ask for a replay from this seq. This aborts the answer to an earlier request."""
        if self._replay_endpoint is None:
            raise RuntimeError("there is no replay endpoint to ask")
        self._request(self._replay_endpoint, replay_request(start), snapshot=False)

    def ask_snapshot(self) -> None:
        """Ask for a snapshot. This aborts the answer to an earlier request."""
        if self._snapshot_endpoint is None:
            raise RuntimeError("there is no snapshot endpoint to ask")
        self._request(self._snapshot_endpoint, [REQUEST], snapshot=True)

    def stop_asking(self) -> None:
        """Abort the current answer."""
        self._drop_dealer()

    def pump(self, handler: Handler) -> bool:
        """Hand over received messages, up to a cap.

        Returns:
            True if more may be waiting: call again after the event loop has had its turn.
        """
        live: list[list[bytes]] = []
        more = self._sub is not None and _drain(self._sub, live.append)
        # We read the monitor second, but handle its events first: the handler must know of a lost connection
        # before it sees messages of the next one.
        if self._monitor is not None:
            more |= _drain(self._monitor, lambda frames: self._monitored(frames, handler))
        for frames in live:
            handler.on_live(frames)
        return self._pump_answers(handler) or more

    async def aclose(self) -> None:
        """Close the sockets at once and drop queued messages."""
        self._unwatch_all()
        # uvloop releases a file descriptor only in its next iteration
        await asyncio.sleep(0)
        self.abort()

    def abort(self) -> None:
        """Close without an event loop, for a loop that is already closed."""
        self._unwatch_all()
        if self._revival is not None:
            self._revival.cancel()
            self._revival = None
        if self._sub is not None and self._monitor is not None:
            self._sub.disable_monitor()
        for socket in (self._monitor, self._sub, self._dealer, *self._retired):
            if socket is not None:
                socket.close(0)
        self._monitor = self._sub = self._dealer = None
        self._retired.clear()
        if self._own_context and self._context is not None:
            end(self._context)
            self._context = None

    def _open_sub(self, endpoint: str) -> None:
        self._sub = sub = self._socket(zmq.SUB)
        sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        if self._replay_endpoint is not None or self._snapshot_endpoint is not None:
            sub.setsockopt(zmq.SUBSCRIBE, ASKS_REPLAY)
        # inproc has no sessions and no monitor events
        if not endpoint.startswith("inproc://"):
            self._monitor = sub.get_monitor_socket(_DOWN | _RETRIED | _UP)
            self._watch(self._monitor)
        attach_or_refuse(sub, endpoint, bind=self._bind)
        if self._bind:
            self._endpoint = bound_endpoint(sub, endpoint)
        self._watch(sub)

    def _request(self, endpoint: str, frames: list[bytes], *, snapshot: bool) -> None:
        self._drop_dealer()
        # a fresh DEALER has a fresh identity: answers to two requests cannot mix
        self._dealer = dealer = self._dial(endpoint)
        self._for_snapshot = snapshot
        with contextlib.suppress(zmq.Again):  # a new pipe has room for two frames; else the request times out
            dealer.send_multipart(frames, zmq.NOBLOCK)
        self._watch(dealer)
        self._wake()

    def _dial(self, endpoint: str) -> zmq.Socket[bytes]:
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, rebuilding_id())
        try:
            attach_or_refuse(dealer, endpoint, bind=False)
        except BaseException:
            dealer.close(0)
            raise
        return dealer

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        if self._context is None:
            raise RuntimeError("the sockets are closed")
        socket = make_socket(self._context, kind, RCVHWM=self._hwm)
        self._policy.put_on(socket, bind=False)
        return socket

    def _pump_answers(self, handler: Handler) -> bool:
        for _ in range(_CAP):
            dealer = self._dealer  # the handler may send a new request between two answers
            if dealer is None:
                return False
            try:
                frames = receive(dealer, sys.maxsize if self._for_snapshot else MAX_KEPT_FRAMES)
            except zmq.Again:
                return False
            if self._for_snapshot:
                self._drop_dealer()
                handler.on_snapshot(frames)
                continue
            answer = split_answer(frames, self._framing)
            if answer is END:
                self._drop_dealer()
                handler.on_replay_ended()
            elif answer is not None:
                handler.on_replayed(*answer)
        return True

    def _monitored(self, frames: list[bytes], handler: Handler) -> None:
        event, _ = _MONITOR_EVENT.unpack(frames[0])
        if event & _DOWN:
            handler.on_interrupted()
            self._await_reconnect()
            return
        if self._revival is not None:
            self._revival.cancel()
            self._revival = None
        if event & _UP:
            handler.on_connected()

    def _await_reconnect(self) -> None:
        if self._bind or self._loop is None or self._revival is not None:
            return
        self._revival = self._loop.call_later(_REVIVE_S, self._revive)

    def _revive(self) -> None:
        """Connect again where libzmq does not: it abandons an endpoint after a message over the limit."""
        self._revival = None
        if self._sub is None or self._endpoint is None:
            return
        attach_again(self._sub, self._endpoint)
        self._wake()

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        if self._loop is not None:
            fd = int(socket.getsockopt(zmq.FD))
            self._readers[socket] = fd
            self._loop.add_reader(fd, self._readable, socket)

    def _readable(self, socket: zmq.Socket[bytes]) -> None:
        # reading ZMQ_EVENTS rearms the edge; else the loop would spin while the caller is busy elsewhere
        if waiting(socket):
            self._wake()

    def _unwatch(self, socket: zmq.Socket[bytes]) -> None:
        fd = self._readers.pop(socket, None)
        if fd is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(fd)

    def _unwatch_all(self) -> None:
        for socket in list(self._readers):
            self._unwatch(socket)

    def _drop_dealer(self) -> None:
        dealer, self._dealer = self._dealer, None
        if dealer is None:
            return
        if dealer not in self._readers:
            dealer.close(0)
            return
        self._unwatch(dealer)
        # `aclose` says why this closes one iteration later
        self._retired.append(dealer)
        if self._loop is not None:
            self._loop.call_soon(self._close_retired)

    def _close_retired(self) -> None:
        for socket in self._retired:
            socket.close(0)
        self._retired.clear()


def _drain(socket: zmq.Socket[bytes], take: Callable[[list[bytes]], object]) -> bool:
    """Receive until EAGAIN or the cap; True if something may be left."""
    for _ in range(_CAP):
        try:
            frames = receive(socket)
        except zmq.Again:
            break
        take(frames)
    return waiting(socket)
