"""The live subscription of the client library: a SUB of libzmq."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq

from kvbus.core.types import Refused
from kvbus.transport.monitor import ConnectionMonitor
from kvbus.transport.pump import Handler, Pump
from kvbus.transport.sockets import (
    Context,
    PeerPolicy,
    attach_again,
    attach_or_refuse,
    bound_endpoint,
    make_socket,
)


class LiveStream:
    """The subscription to one live stream.

    libzmq reports messages and connection events on two separate sockets. When a publisher dies, its last messages may
    still wait to be read. They belong to the old connection, so the loss of the connection is reported after these
    messages (:meth:`Pump.call_behind`).

    Args:
        context: the ZeroMQ context.
        endpoint: the endpoint of the publisher, or the endpoint to bind.
        bind: True if the publisher connects to the subscriber, as vLLM does if its endpoint has a host name.
        topics: prefixes of the topics to subscribe to.
        message: called with the frames of each message.
        connection: called with True when the first connection is made, and with False when the last connection is lost.
        refused: called after each failed handshake, with the reason for the failure.
        policy: the keys, and the largest frame that the subscriber accepts.
        hwm: maximum number of messages that libzmq queues.

    Raises:
        BindError: the endpoint cannot be bound.
        ValueError: the endpoint is malformed.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        *,
        bind: bool,
        topics: Sequence[bytes],
        message: Handler,
        connection: Callable[[bool], None],
        refused: Callable[[Refused], None],
        policy: PeerPolicy,
        hwm: int,
    ) -> None:
        socket = make_socket(context, zmq.SUB, RCVHWM=hwm)
        self._endpoint = endpoint
        self._connection = connection
        self._monitor = ConnectionMonitor(
            socket, self._changed, refused=refused, abandoned=None if bind else self._revive
        )
        try:
            policy.put_on(socket)
            for topic in topics:
                socket.setsockopt(zmq.SUBSCRIBE, topic)
            attach_or_refuse(socket, endpoint, bind=bind)
        except BaseException:
            self._monitor.close()
            socket.close()
            raise
        self._pump = Pump(socket, message)

    @property
    def bound(self) -> str:
        """The endpoint that the subscriber has bound.

        If the configured port was a wildcard, it has the port that the system chose.
        """
        return bound_endpoint(self._pump.socket, self._endpoint)

    def read(self, *, on: bool) -> None:
        """Start or stop reading messages. While reading is stopped, messages wait in libzmq's queue."""
        (self._pump.resume if on else self._pump.pause)()

    def _changed(self, up: bool) -> None:
        """Report that the connection was made or lost, after the messages that wait to be read.

        Otherwise the messages of the old connection would seem to belong to the next connection.
        """
        self._pump.call_behind(lambda: self._connection(up))

    def _revive(self, _stood: bool) -> None:
        """Connect again after libzmq has abandoned the endpoint, for example because of a frame over the limit."""
        attach_again(self._pump.socket, self._endpoint)
        self._pump.kick()

    def close(self) -> None:
        """Close the subscription and its connection."""
        self._monitor.close()
        self._pump.close()
