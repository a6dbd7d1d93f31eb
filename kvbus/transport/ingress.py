"""The libzmq sockets of one source: a SUB for the live stream, and a DEALER for each replay or snapshot request."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import zmq

from kvbus.common.errors import BindError
from kvbus.core.types import Refused
from kvbus.transport.monitor import ConnectionMonitor
from kvbus.transport.pump import MAX_KEPT_FRAMES, Handler, Pump
from kvbus.transport.sockets import (
    PLAIN,
    Context,
    PeerPolicy,
    attach,
    attach_again,
    bound_endpoint,
    make_socket,
    rebuilding_id,
)

LOOK_AGAIN: Final = 0.05
"""Seconds between two checks whether kvbus has read all received messages of an answer whose connection broke.

kvbus reads them first, and only then treats the answer as aborted.
"""


def _queue(hwm: int | None) -> dict[str, int]:
    return {} if hwm is None else {"RCVHWM": hwm}


def _ignore(_: object) -> None:
    return


@dataclass(frozen=True, slots=True)
class Events:
    """The callbacks for the messages and connections of an engine's live stream.

    Attributes:
        message: called with the frames of each message.
        connection: called with True when the first connection is made, and with False when the last connection is lost.
        refused: called after each failed handshake, with the reason for the failure.
        oversize: called when the connection was closed because of a frame over the limit or a violation of ZMTP. The
            stream then connects again.
        drained: called after each burst of messages; None for no call.
    """

    message: Handler
    connection: Callable[[bool], None]
    refused: Callable[[Refused], None] = _ignore
    oversize: Callable[[], None] = lambda: None
    drained: Callable[[], None] | None = None


class LiveStream:
    """The subscription to the live stream of one engine.

    libzmq reports batches and connection events on two separate sockets. When an engine dies, its last batches may
    still wait to be read. They belong to the old connection, so kvbus reports the loss of the connection after these
    batches (:meth:`Pump.call_behind`).

    Args:
        context: the process's ZeroMQ context.
        endpoint: the endpoint of the engine's live stream.
        bind: True if the engine connects to kvbus, as vLLM does if its endpoint has a host name.
        topics: prefixes of the topics that kvbus subscribes to.
        events: the callbacks for messages and connections.
        policy: kvbus's keys and the engine's public key, and the largest frame that kvbus accepts.
        hwm: maximum number of messages that libzmq queues; None for the default of ``sockets.OPTIONS``.

    Raises:
        BindError: the endpoint cannot be bound.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        bind: bool,
        topics: Sequence[bytes],
        events: Events,
        policy: PeerPolicy = PLAIN,
        hwm: int | None = None,
    ) -> None:
        socket = make_socket(context, zmq.SUB, **_queue(hwm))
        self._endpoint = endpoint
        self._bind = bind
        self._events = events
        self._monitor = ConnectionMonitor(
            socket, self._changed, refused=events.refused, abandoned=None if bind else self._revive
        )
        try:
            policy.put_on(socket)
            for topic in topics:
                socket.setsockopt(zmq.SUBSCRIBE, topic)
            attach(socket, endpoint, bind=bind)
        except BaseException:
            self._monitor.close()
            socket.close()
            raise
        self._pump = Pump(socket, events.message, events.drained)

    @property
    def bound(self) -> str:
        """The endpoint that kvbus has bound.

        If the configured port was a wildcard, it has the port that the system chose.
        """
        return bound_endpoint(self._pump.socket, self._endpoint)

    @property
    def unread(self) -> bool:
        """Whether batches of the engine wait to be read, in libzmq or in the kernel."""
        # Messages move from the kernel to libzmq. So check the kernel first: a message that moves between two checks in
        # the other order would be missed.
        return self._monitor.unread or self._pump.look()

    @property
    def reached(self) -> str | None:
        """The connected engine's TCP address; None without a connection, or if the engine dials kvbus."""
        peer = None if self._bind else self._monitor.peer
        return None if peer is None else peer[0]

    def read(self, *, on: bool) -> None:
        """Start or stop reading batches. While reading is stopped, batches wait in libzmq's queue."""
        (self._pump.resume if on else self._pump.pause)()

    def _changed(self, up: bool) -> None:
        """Report that the connection was made or lost, after the batches that wait to be read.

        If kvbus reported it earlier, the batches of the old connection would seem to belong to the next connection.
        """
        self._pump.call_behind(lambda: self._events.connection(up))

    def _revive(self, stood: bool) -> None:
        """Connect again after libzmq has abandoned the endpoint.

        Args:
            stood: whether the connection was up before libzmq abandoned the endpoint. If it was, libzmq has closed it
                because of a frame that libzmq does not accept.
        """
        if stood:
            self._events.oversize()
        attach_again(self._pump.socket, self._endpoint)
        self._pump.kick()

    def beside(self, endpoint: str) -> str:
        """Return an engine's endpoint with the connected address in place of its host name.

        By now the host name may resolve to the address of another engine, whose answers do not belong to this live
        stream. The endpoint is returned unchanged if its host is not that of the live stream, or if the live stream has
        no TCP connection.

        Args:
            endpoint: the replay or snapshot endpoint of the engine.
        """
        host, _, port = self._endpoint.rpartition(":")
        other, _, other_port = endpoint.rpartition(":")
        peer = self._monitor.peer
        if peer is None or other != host or not host.startswith("tcp://") or port != str(peer[1]):
            return endpoint
        address = f"[{peer[0]}]" if ":" in peer[0] else peer[0]
        return f"tcp://{address}:{other_port}"

    def close(self) -> None:
        """Close the subscription and its connection."""
        self._monitor.close()
        self._pump.close()


class RequestConnection:
    """One request to an engine and its answer, on a new connection.

    An answer to an earlier request cannot arrive on a new connection.

    Args:
        context: the process's ZeroMQ context.
        endpoint: the replay or snapshot endpoint of an engine.
        request: the frames of the request.
        on_message: called with the frames of each message of the answer.
        on_abort: called if libzmq has ended the answer because of a frame over the limit. `on_message` is called first
            for all earlier messages.
        policy: kvbus's keys and the engine's public key, and the largest frame that kvbus accepts.
        hwm: maximum number of messages that libzmq queues; None for the default of ``sockets.OPTIONS``.
        max_frames: maximum number of frames kept of each message. A snapshot is one message with any number of frames.

    Raises:
        BindError: the request could not be sent, for example because the process has no free file descriptor.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        request: list[bytes],
        on_message: Handler,
        *,
        on_abort: Callable[[], None] = lambda: None,
        policy: PeerPolicy = PLAIN,
        hwm: int | None = None,
        max_frames: int = MAX_KEPT_FRAMES,
    ) -> None:
        self._on_abort = on_abort
        self._loop = asyncio.get_running_loop()
        self._later: asyncio.TimerHandle | None = None
        with contextlib.ExitStack() as opened:
            try:
                socket = make_socket(context, zmq.DEALER, **_queue(hwm))
                opened.callback(socket.close)
                socket.setsockopt(zmq.ROUTING_ID, rebuilding_id())
                self._monitor = ConnectionMonitor(socket, _ignore, abandoned=self._check_aborted)
                opened.callback(self._monitor.close)
                policy.put_on(socket)
                attach(socket, endpoint, bind=False)
                # Check that a file descriptor is free. libzmq's thread needs one, and reports no error if there is
                # none.
                os.close(os.open(os.devnull, os.O_RDONLY))
                socket.send_multipart(request)
            except (OSError, zmq.ZMQError) as error:
                raise BindError(endpoint, error.strerror or str(error), verb="ask") from error
            opened.pop_all()
        self._pump = Pump(socket, on_message, max_frames=max_frames)

    @property
    def unread(self) -> bool:
        """Whether messages of the answer wait to be read, in libzmq or in the kernel."""
        # Messages move from the kernel to libzmq. So check the kernel first: a message that moves between two checks in
        # the other order would be missed.
        return self._monitor.unread or self._pump.look()

    def read(self, *, on: bool) -> None:
        """Start or stop reading the answer. While reading is stopped, its messages wait in libzmq's queue."""
        (self._pump.resume if on else self._pump.pause)()

    def _check_aborted(self, stood: bool) -> None:
        if not stood:
            return  # the handshake failed, so this request gets no answer; after a timeout kvbus sends another one
        if self._pump.look():
            self._later = self._loop.call_later(LOOK_AGAIN, self._check_aborted, stood)
            return
        self._on_abort()

    def close(self) -> None:
        """Close the connection, and drop the messages of the answer that are not read yet."""
        if self._later is not None:
            self._later.cancel()
        self._monitor.close()
        self._pump.close()
