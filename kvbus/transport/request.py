"""One request to an engine, for a replay or a snapshot, on a DEALER of libzmq of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Final

import zmq

from kvbus.common.errors import BindError
from kvbus.transport.monitor import ConnectionMonitor
from kvbus.transport.pump import MAX_KEPT_FRAMES, Handler, Pump
from kvbus.transport.sockets import PLAIN, Context, PeerPolicy, attach, make_socket, rebuilding_id

LOOK_AGAIN: Final = 0.05
"""Seconds between two checks whether kvbus has read all received messages of an answer whose connection broke.

kvbus reads them first, and only then treats the answer as aborted.
"""


def _ignore(_: object) -> None:
    return


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
                socket = make_socket(context, zmq.DEALER, **({} if hwm is None else {"RCVHWM": hwm}))
                opened.callback(socket.close)
                socket.setsockopt(zmq.ROUTING_ID, rebuilding_id())
                self._monitor = ConnectionMonitor(socket, _ignore, abandoned=self._check_aborted)
                opened.callback(self._monitor.close)
                policy.put_on(socket)
                attach(socket, endpoint)
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
