"""A source's sockets: the SUB of its live stream, and a DEALER for each request."""

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
"""Seconds between two looks at an aborted request, while parts of its answer still wait to be read."""


def _queue(hwm: int | None) -> dict[str, int]:
    return {} if hwm is None else {"RCVHWM": hwm}


def _ignore(_: object) -> None:
    return


@dataclass(frozen=True, slots=True)
class Events:
    """A live stream's callbacks.

    Attributes:
        message: called with the frames of each message.
        connection: called with True when the first connection is up, and with False when the last one is gone.
        refused: called with the reason of each failed handshake.
        oversize: called when a frame over the limit, or bytes that are no ZMTP, have closed the connection. The stream
            connects again.
        drained: called after each burst of messages.
    """

    message: Handler
    connection: Callable[[bool], None]
    refused: Callable[[Refused], None] = _ignore
    oversize: Callable[[], None] = lambda: None
    drained: Callable[[], None] | None = None


class LiveStream:
    """The subscription to one engine publisher.

    Batches and connections come from libzmq on two sockets. When an engine dies, its last batches may still wait to be
    read. They are of the old connection, so its loss is reported after them (:meth:`Pump.call_behind`).

    Args:
        context: the process's ZeroMQ context.
        endpoint: the publisher's live endpoint.
        bind: True where the engine connects to us (vLLM with a host name).
        topic: subscription prefix.
        events: the callbacks.
        policy: keys, and the largest frame to accept.
        hwm: messages that libzmq queues; None for those of the table.

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
        """The endpoint it is bound to, with its real port."""
        return bound_endpoint(self._pump.socket, self._endpoint)

    @property
    def unread(self) -> bool:
        """Whether batches wait to be read, with libzmq or in the kernel."""
        return self._monitor.unread or self._pump.look()  # in the order in which messages pass both

    @property
    def reached(self) -> str | None:
        """The address that kvbus has dialled and is connected to, over TCP; None if it is not, or the engine dials."""
        peer = None if self._bind else self._monitor.peer
        return None if peer is None else peer[0]

    def read(self, *, on: bool) -> None:
        """Read batches, or leave them with libzmq."""
        (self._pump.resume if on else self._pump.pause)()

    def _changed(self, up: bool) -> None:
        """Report it behind what the connection has brought: behind its end that would pass for the next one's."""
        self._pump.call_behind(lambda: self._events.connection(up))

    def _revive(self, stood: bool) -> None:
        """Connect again where libzmq has abandoned the endpoint."""
        if stood:
            self._events.oversize()
        attach_again(self._pump.socket, self._endpoint)
        self._pump.kick()

    def beside(self, endpoint: str) -> str:
        """Return an endpoint at the address that this subscription has reached, if both have the same host name.

        The name may have moved to another engine since, whose answers do not belong to this stream.
        """
        host, _, port = self._endpoint.rpartition(":")
        other, _, other_port = endpoint.rpartition(":")
        peer = self._monitor.peer
        if peer is None or other != host or not host.startswith("tcp://") or port != str(peer[1]):
            return endpoint
        address = f"[{peer[0]}]" if ":" in peer[0] else peer[0]
        return f"tcp://{address}:{other_port}"

    def close(self) -> None:
        """Close the subscription."""
        self._monitor.close()
        self._pump.close()


class RequestConnection:
    """One request on its own connection, so that it never receives the answer to an earlier request.

    Args:
        context: the process's ZeroMQ context.
        endpoint: a publisher's replay or snapshot endpoint.
        request: the frames to send.
        on_message: called with the frames of each message of the answer.
        on_abort: called when a frame over the limit has ended the answer, after `on_message` for all before it.
        policy: keys, and the largest frame to accept.
        hwm: messages that libzmq queues; None for those of the table.
        max_frames: frames kept of one message: a snapshot is one of any number.

    Raises:
        BindError: the request could not be sent, for example because no file descriptor is left.
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
                os.close(os.open(os.devnull, os.O_RDONLY))  # libzmq's thread needs one, and says nothing without it
                socket.send_multipart(request)
            except (OSError, zmq.ZMQError) as error:
                raise BindError(endpoint, error.strerror or str(error), verb="ask") from error
            opened.pop_all()
        self._pump = Pump(socket, on_message, max_frames=max_frames)

    @property
    def unread(self) -> bool:
        """Whether more of the answer waits to be read, with libzmq or in the kernel."""
        return self._monitor.unread or self._pump.look()  # in the order in which messages pass both

    def read(self, *, on: bool) -> None:
        """Read the answer, or leave it with libzmq."""
        (self._pump.resume if on else self._pump.pause)()

    def _check_aborted(self, stood: bool) -> None:
        if not stood:
            return  # the handshake failed: the request times out, and the next one tries again
        if self._pump.look():
            self._later = self._loop.call_later(LOOK_AGAIN, self._check_aborted, stood)
            return
        self._on_abort()

    def close(self) -> None:
        """Close the connection and drop the rest of the answer."""
        if self._later is not None:
            self._later.cancel()
        self._monitor.close()
        self._pump.close()
