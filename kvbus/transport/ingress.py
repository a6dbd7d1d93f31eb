"""A source's sockets: the SUB of its live stream, and a DEALER for each question asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import zmq

from kvbus.core.types import Refused
from kvbus.transport.monitor import ConnectionMonitor
from kvbus.transport.pump import Handler, Pump
from kvbus.transport.sockets import PLAIN, Context, PeerPolicy, attach, attach_again, make_socket

LOOK_AGAIN: Final = 0.05
"""Seconds until a question that was cut off is looked at again while parts of its answer still wait to be read."""


def _ignore(_: object) -> None:
    return


@dataclass(frozen=True, slots=True)
class Events:
    """Who is told what a live stream brings.

    Attributes:
        message: called with the frames of each message.
        connection: called with True when a connection stands and False when the last one is gone.
        refused: called for each handshake that failed.
        oversize: called when a frame over the limit (or no ZMTP frame at all) has cost the connection; it is made anew.
        drained: called after the messages that were there.
    """

    message: Handler
    connection: Callable[[bool], None]
    refused: Callable[[Refused], None] = _ignore
    oversize: Callable[[], None] = lambda: None
    drained: Callable[[], None] | None = None


class LiveStream:
    """The subscription to one engine publisher, connecting to it or bound for it to dial in (vLLM with a host name).

    Args:
        context: the process's context.
        endpoint: of this rank.
        bind: True where the engine dials in.
        topic: subscription prefix.
        events: who is told.
        policy: what is taken from the engine.

    Raises:
        BindError: the endpoint cannot be bound.
    """

    def __init__(
        self, context: Context, endpoint: str, *, bind: bool, topic: bytes, events: Events, policy: PeerPolicy = PLAIN
    ) -> None:
        socket = make_socket(context, zmq.SUB)
        self._endpoint = endpoint
        self._events = events
        self._monitor = ConnectionMonitor(
            socket, events.connection, refused=events.refused, abandoned=None if bind else self._revive
        )
        try:
            policy.put_on(socket, bind=bind)
            socket.setsockopt(zmq.SUBSCRIBE, topic)
            attach(socket, endpoint, bind=bind)
        except BaseException:
            self._monitor.close()
            socket.close()
            raise
        self._pump = Pump(socket, events.message, events.drained)

    def _revive(self, stood: bool) -> None:
        """Connect again where libzmq does not."""
        if stood:
            self._events.oversize()
        attach_again(self._pump.socket, self._endpoint)
        self._pump.kick()

    def close(self) -> None:
        """Leave the engine alone."""
        self._monitor.close()
        self._pump.close()


class RequestConnection:
    """One request on a connection of its own, so that answers to an earlier one can never mix in.

    Args:
        context: the process's context.
        endpoint: of a publisher's replay, or of its snapshots.
        request: the frames to send.
        on_message: called with the frames of each message of the answer.
        on_abort: called when a frame over the limit has ended the answer, after everything before it was handed over.
        policy: what is taken from the engine.
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
    ) -> None:
        socket = make_socket(context, zmq.DEALER)
        self._on_abort = on_abort
        self._loop = asyncio.get_running_loop()
        self._later: asyncio.TimerHandle | None = None
        self._monitor = ConnectionMonitor(socket, _ignore, abandoned=self._cut)
        try:
            policy.put_on(socket, bind=False)
            attach(socket, endpoint, bind=False)
            socket.send_multipart(request)
        except BaseException:
            self._monitor.close()
            socket.close()
            raise
        self._pump = Pump(socket, on_message)

    def _cut(self, stood: bool) -> None:
        if not stood:
            return  # refused: the question times out, and the next one tries again
        if self._pump.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[arg-type, operator]
            self._pump.kick()
            self._later = self._loop.call_later(LOOK_AGAIN, self._cut, stood)
            return
        self._on_abort()

    def close(self) -> None:
        """Want no more of the answer."""
        if self._later is not None:
            self._later.cancel()
        self._monitor.close()
        self._pump.close()
