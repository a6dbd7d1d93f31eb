"""The sockets of one stream's subscriber: a live subscription and a request, read only while the client waits."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Final, Literal, Protocol

import zmq

from kvbus.common.errors import BindError
from kvbus.core.outputs.snapshot import REQUEST
from kvbus.core.wire.frames import ASKS_REPLAY, replay_request
from kvbus.transport.ingress import Events, LiveStream, RequestConnection
from kvbus.transport.pump import MAX_KEPT_FRAMES
from kvbus.transport.sockets import PeerPolicy, check_peer, check_port, end, refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvbus.core.types import Refused
    from kvbus.transport.curve import Curve

    Context = zmq.Context[zmq.Socket[bytes]]

AnswerFraming = Literal["auto", "3", "4", "sim"]

_FRAMES: Final = {"3": 3, "4": 4, "sim": 4}
"""Number of frames that a DEALER receives per message of a replay answer, by framing."""


class Handler(Protocol):
    """The callbacks for messages and connection events of the sockets."""

    def on_live(self, frames: list[bytes]) -> None:
        """Handle an unchecked live message; a correct one is ``[topic, seq, payload]``."""

    def on_replayed(self, frames: list[bytes]) -> None:
        """Handle a message of the answer to the last replay request."""

    def on_snapshot(self, frames: list[bytes]) -> None:
        """Handle the message that answers the last snapshot request."""

    def on_connection(self, up: bool) -> None:
        """Handle that the live connection is up (True) or lost (False)."""

    def on_refused(self, reason: Refused) -> None:
        """Handle a failed handshake of a live connection."""


class StreamSockets:
    """A live subscription, and at most one replay or snapshot request at a time.

    Args:
        endpoint: the live stream, or None for replay only.
        replay_endpoint: the replay ROUTER, or None.
        snapshot_endpoint: the snapshot ROUTER, or None.
        handler: the callbacks for messages and connection events.
        topic: subscription prefix.
        bind: True binds the SUB, for publishers that connect to it (vLLM with a concrete host).
        hwm: maximum number of messages that ZeroMQ queues for each socket. When this queue is full, the peer's queue
            fills up, and then the peer drops messages.
        max_message_bytes: maximum bytes of one frame. A larger frame closes the connection, and the socket connects
            again.
        framing: layout of replay answers to accept; messages with another number of frames are ignored.
        context: a ZeroMQ context to share (``inproc://``); by default the sockets have their own.
        curve: keys for a publisher that requires CURVE; used only if the sockets connect.
    """

    def __init__(
        self,
        endpoint: str | None,
        replay_endpoint: str | None,
        *,
        handler: Handler,
        snapshot_endpoint: str | None = None,
        topic: bytes = b"",
        bind: bool = False,
        hwm: int = 100_000,
        max_message_bytes: int = 64 * 1024 * 1024,
        framing: AnswerFraming = "auto",
        context: Context | None = None,
        curve: Curve | None = None,
    ) -> None:
        # The endpoints, and the handler of their messages.
        self.endpoint = endpoint
        """The live endpoint; after `open` of a bound subscription, with the real port."""
        self._replay_endpoint = replay_endpoint
        self._snapshot_endpoint = snapshot_endpoint
        self._frames = _FRAMES.get(framing)
        self._handler: Final = handler

        # Socket settings.
        self._topics = [topic] if replay_endpoint is None and snapshot_endpoint is None else [topic, ASKS_REPLAY]
        self._bind = bind
        self._hwm = hwm
        self._policy = PeerPolicy(max_message_bytes, curve)
        self._own_context = context is None
        self._context = context

        # The open sockets.
        self._live: LiveStream | None = None
        self._request: RequestConnection | None = None
        self._reading = False

    def open(self) -> None:
        """Open the sockets in the running event loop.

        Raises:
            BindError: the endpoint cannot be bound.
            ValueError: an endpoint is malformed.
        """
        if self._context is None:
            self._context = zmq.Context()
        try:
            for asked in (self._replay_endpoint, self._snapshot_endpoint):
                if asked is not None:
                    check_peer(asked)
            if self.endpoint is not None:
                self._open_live(self._context, self.endpoint)
        except BaseException:
            self._end()
            raise

    def ask(self, start: int) -> None:
        """Request a replay from this seq on. It replaces the current request."""
        self._ask(self._replay_endpoint, replay_request(start), self._answer)

    def ask_snapshot(self) -> None:
        """Request a snapshot. It replaces the current request."""
        self._ask(self._snapshot_endpoint, [REQUEST], self._handler.on_snapshot, max_frames=sys.maxsize)

    def stop_asking(self) -> None:
        """Abort the current request and drop the rest of its answer."""
        if self._request is not None:
            self._request.close()
            self._request = None

    @property
    def unread(self) -> bool:
        """Whether more messages of the answer wait to be read."""
        return self._request is not None and self._request.unread

    def read(self, *, on: bool) -> None:
        """Start or stop reading messages; unread messages stay queued in libzmq."""
        self._reading = on
        if self._live is not None:
            self._live.read(on=on)
        if self._request is not None:
            self._request.read(on=on)

    async def aclose(self) -> None:
        """Close the sockets at once and drop queued messages."""
        self.stop_asking()
        if self._live is not None:
            self._live.close()
            self._live = None
        try:
            await asyncio.sleep(0)  # sockets close in the loop's next iteration
        finally:
            self._end()

    def _end(self) -> None:
        if self._own_context and self._context is not None:
            end(self._context)
            self._context = None

    def _open_live(self, context: Context, endpoint: str) -> None:
        events = Events(self._handler.on_live, self._handler.on_connection, refused=self._handler.on_refused)
        check_port(endpoint)
        try:
            self._live = LiveStream(
                context,
                endpoint,
                bind=self._bind,
                topics=self._topics,
                events=events,
                policy=self._policy,
                hwm=self._hwm,
            )
        except BindError as error:
            if isinstance(error.__cause__, zmq.ZMQError):
                raise refused(error.__cause__, endpoint, bind=self._bind) from error
            raise
        self._live.read(on=False)
        if self._bind:
            self.endpoint = self._live.bound

    def _ask(
        self,
        endpoint: str | None,
        request: list[bytes],
        taken: Callable[[list[bytes]], None],
        *,
        max_frames: int = MAX_KEPT_FRAMES,
    ) -> None:
        if endpoint is None or self._context is None:
            raise RuntimeError("there is no endpoint to ask")
        self.stop_asking()
        # for example without a free file descriptor: the request times out, and the client sends it again
        with contextlib.suppress(BindError):
            self._request = RequestConnection(
                self._context,
                endpoint,
                request,
                taken,
                policy=self._policy,
                hwm=self._hwm,
                max_frames=max_frames,
            )
            self._request.read(on=self._reading)

    def _answer(self, frames: list[bytes]) -> None:
        if self._frames in (None, len(frames)):
            self._handler.on_replayed(frames)
