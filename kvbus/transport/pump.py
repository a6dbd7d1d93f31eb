"""An edge-triggered drain: everything a socket has, as soon as it has it, without starving the loop.

libzmq's file descriptor signals once, and again only after ``ZMQ_EVENTS`` was read and nothing was left. So a pump
reads until EAGAIN, looks at ``ZMQ_EVENTS`` again, comes back by ``call_soon`` where a cap ended the reading or the
handler raised, and has to be kicked after anyone sends on the same socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

from kvbus.transport.sockets import Socket

CAP: Final = 128
"""Messages taken in one go before the loop's other work gets its turn."""

MAX_KEPT_FRAMES: Final = 64
"""Frames of one message that are kept; the rest is read and let go, the count is what the core refuses it by."""

Handler = Callable[[list[bytes]], None]


def receive(socket: Socket) -> list[bytes]:
    """One whole message.

    Raises:
        zmq.Again: there is none.
    """
    frame = socket.recv(zmq.NOBLOCK, copy=False)
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        if len(frames) < MAX_KEPT_FRAMES:
            frames.append(frame.bytes)
    return frames


class Pump:
    """Hand every message of a socket to ``handler``, on the running loop, until :meth:`close`.

    Args:
        socket: owned by the pump from now on; :meth:`close` closes it.
        handler: called with the frames of one message; must not block.
        after: called when everything there was, or as much as one go takes, has been handed over.
    """

    def __init__(self, socket: Socket, handler: Handler, after: Callable[[], None] | None = None) -> None:
        self.socket = socket
        self._handler = handler
        self._after = after
        self._loop = asyncio.get_running_loop()
        self._fd = socket.FD
        self._soon: asyncio.Handle | None = None
        self.closed = False
        self._loop.add_reader(self._fd, self._readable)
        self.kick()

    def kick(self) -> None:
        """Look at the socket soon: after a send on it, which may have eaten the edge."""
        if self._soon is None and not self.closed:
            self._soon = self._loop.call_soon(self._readable)

    def _readable(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self.closed:
            return
        try:
            more = True
            for taken in range(CAP):
                try:
                    frames = receive(self.socket)
                except zmq.Again:
                    break
                self._handler(frames)
                if self.closed:
                    return
                if not taken and not (more := self._pending()):
                    break  # one message alone, the usual thing: cheaper to look than to be refused
            if self._after is not None:
                self._after()
            if more and self._pending():
                self.kick()
        except BaseException:
            self.kick()
            raise

    def _pending(self) -> bool:
        return bool(self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)  # type: ignore[arg-type, operator]

    def sent(self) -> None:
        """Something was sent on the socket, which may have eaten the edge: look at once, kick if there is anything."""
        if not self.closed and self._pending():
            self.kick()

    def close(self) -> None:
        """Stop, and close the socket one turn of the loop later: its descriptor may still be in this turn's events."""
        if self.closed:
            return
        self.closed = True
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._loop.remove_reader(self._fd)
        self._loop.call_soon(self.socket.close)
