"""The sockets of one stream's subscriber: a live subscription, and a connection for a replay or snapshot request.

Messages are read from libzmq only while the client waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Final, Literal, Protocol

import zmq

from kvbus.common.errors import BindError
from kvbus.core.outputs.snapshot import REQUEST
from kvbus.core.wire.frames import ASKS_REPLAY, replay_request
from kvbus.transport.client.live import LiveStream
from kvbus.transport.pump import MAX_KEPT_FRAMES
from kvbus.transport.request import RequestConnection
from kvbus.transport.sockets import PeerPolicy, check_peer, end

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvbus.core.types import Refused
    from kvbus.transport.curve import Curve

    Context = zmq.Context[zmq.Socket[bytes]]

AnswerFraming = Literal["auto", "3", "4", "sim"]

_FRAMES: Final = {"3": 3, "4": 4, "sim": 4}
"""Number of frames that a DEALER receives in each message of a replay answer, by the framing of the answer."""


class Handler(Protocol):
    """The callbacks for the messages and connections of a stream's sockets."""

    def on_live(self, frames: list[bytes]) -> None:
        """Handle a message of the live stream. It is not checked; a correct message is ``[topic, seq, payload]``."""

    def on_replayed(self, frames: list[bytes]) -> None:
        """Handle a message of the answer to the newest replay request."""

    def on_snapshot(self, frames: list[bytes]) -> None:
        """Handle the message that answers the newest snapshot request."""

    def on_connection(self, up: bool) -> None:
        """Handle that the live connection was made (True) or lost (False)."""

    def on_refused(self, reason: Refused) -> None:
        """Handle a failed handshake of the live connection, with the reason for the failure."""


class StreamSockets:
    """The sockets of one stream: a live subscription, and at most one replay or snapshot request at a time.

    Args:
        endpoint: the endpoint of the live stream; None to read only replays or snapshots.
        replay_endpoint: the endpoint of the replay ROUTER; None without replay.
        snapshot_endpoint: the endpoint of the snapshot ROUTER; None without snapshots.
        handler: the callbacks for messages and connections.
        topic: prefix of the topics to subscribe to.
        bind: True if the SUB binds ``endpoint``, for publishers that connect to it, as vLLM does if its endpoint has a
            host name.
        hwm: maximum number of messages that ZeroMQ queues for each socket. When this queue is full, the peer's queue
            fills up, and then the peer drops messages.
        max_message_bytes: maximum bytes of one frame. A larger frame closes the connection, and the socket connects
            again.
        framing: layout of the replay answers that the sockets accept. Messages with another number of frames are
            ignored.
        context: a ZeroMQ context to share, which ``inproc://`` needs; None if this object creates its own context.
        curve: keys for a publisher that requires CURVE. They are used only if the sockets connect.
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
        # The endpoints, and the callbacks for their messages.
        self.endpoint = endpoint
        """The endpoint of the live stream. After `open` of a subscription that binds, it has the real port."""
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
        """Open the live subscription in the running event loop, and check the endpoints for requests.

        Raises:
            BindError: the live endpoint cannot be bound.
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
        """Request a replay from the seq ``start`` on. This aborts the current request."""
        self._ask(self._replay_endpoint, replay_request(start), self._answer)

    def ask_snapshot(self) -> None:
        """Request a snapshot. This aborts the current request."""
        self._ask(self._snapshot_endpoint, [REQUEST], self._handler.on_snapshot, max_frames=sys.maxsize)

    def stop_asking(self) -> None:
        """Abort the current request, and drop the rest of its answer."""
        if self._request is not None:
            self._request.close()
            self._request = None

    @property
    def unread(self) -> bool:
        """Whether more messages of the answer to the current request wait to be read."""
        return self._request is not None and self._request.unread

    def read(self, *, on: bool) -> None:
        """Start or stop reading messages. While reading is stopped, messages wait in libzmq's queues."""
        self._reading = on
        if self._live is not None:
            self._live.read(on=on)
        if self._request is not None:
            self._request.read(on=on)

    async def aclose(self) -> None:
        """Close the sockets without waiting for unread messages, which are dropped."""
        self.stop_asking()
        if self._live is not None:
            self._live.close()
            self._live = None
        try:
            await asyncio.sleep(0)  # wait for the next iteration of the loop, in which the pumps close their sockets
        finally:
            self._end()

    def _end(self) -> None:
        if self._own_context and self._context is not None:
            end(self._context)
            self._context = None

    def _open_live(self, context: Context, endpoint: str) -> None:
        self._live = LiveStream(
            context,
            endpoint,
            bind=self._bind,
            topics=self._topics,
            message=self._handler.on_live,
            connection=self._handler.on_connection,
            refused=self._handler.on_refused,
            policy=self._policy,
            hwm=self._hwm,
        )
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
            raise RuntimeError("the request needs an endpoint that was not given, or the sockets are not open")
        self.stop_asking()
        # Ignore the error, which occurs for example if the process has no free file descriptor. The request then times
        # out, and the client sends it again.
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
