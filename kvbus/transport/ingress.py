"""A source's sockets: the SUB of its live stream, and a DEALER for each question asked of it."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from kvbus.transport.monitor import ConnectionMonitor
from kvbus.transport.pump import Handler, Pump
from kvbus.transport.sockets import Context, attach, make_socket


class LiveStream:
    """The subscription to one engine publisher, connecting to it or bound for it to dial in (vLLM with a host name).

    Args:
        context: the process's context.
        endpoint: of this rank.
        bind: True where the engine dials in.
        topic: subscription prefix.
        on_message: called with the frames of each message.
        on_connection: called with True when a connection stands and False when the last one is gone.

    Raises:
        BindError: the endpoint cannot be bound.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        bind: bool,
        topic: bytes,
        on_message: Handler,
        on_connection: Callable[[bool], None],
    ) -> None:
        socket = make_socket(context, zmq.SUB)
        self._monitor = ConnectionMonitor(socket, on_connection)
        try:
            socket.setsockopt(zmq.SUBSCRIBE, topic)
            attach(socket, endpoint, bind=bind)
        except BaseException:
            self._monitor.close()
            socket.close()
            raise
        self._pump = Pump(socket, on_message)

    def close(self) -> None:
        """Leave the engine alone."""
        self._monitor.close()
        self._pump.close()


class Question:
    """One request on a connection of its own, so that answers to an earlier one can never mix in.

    Args:
        context: the process's context.
        endpoint: of a publisher's replay, or of its snapshots.
        request: the frames to send.
        on_message: called with the frames of each message of the answer.
    """

    def __init__(self, context: Context, endpoint: str, request: list[bytes], on_message: Handler) -> None:
        socket = make_socket(context, zmq.DEALER)
        try:
            attach(socket, endpoint, bind=False)
            socket.send_multipart(request)
        except BaseException:
            socket.close()
            raise
        self._pump = Pump(socket, on_message)

    def close(self) -> None:
        """Want no more of the answer."""
        self._pump.close()
