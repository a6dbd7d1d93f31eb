"""A reader of an edge-triggered socket: it takes messages as soon as they arrive, and never starves the loop.

libzmq's file descriptor signals once, and again only after somebody has read ``ZMQ_EVENTS`` and nothing was left. So
a pump reads until EAGAIN, then looks at ``ZMQ_EVENTS`` again. Where a cap or an exception ended the reading, it
continues by ``call_soon``. A send on the same socket may consume the signal: call :meth:`Pump.look` after it.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from kvbus.transport.sockets import Socket

CAP: Final = 128
"""Messages read in one go before the loop's other work gets its turn."""

LOOKS: Final = 4
"""Messages of one go after each of which the pump looks whether there is another. Behind them it reads until EAGAIN,
which costs as much as eight looks."""

MAX_KEPT_FRAMES: Final = 64
"""Frames kept of one message. The rest is read and dropped; the core rejects the message for its frame count."""

# numbers: pyzmq takes members of its enumerations at a multiple of the cost
_NOBLOCK: Final = int(zmq.NOBLOCK)
_POLLIN: Final = int(zmq.POLLIN)

Handler = Callable[[list[bytes]], None]


def receive(socket: Socket, most: int = MAX_KEPT_FRAMES) -> list[bytes]:
    """Receive one whole message, and keep ``most`` frames of it.

    Raises:
        zmq.Again: none is waiting.
    """
    take = socket.recv
    frame = take(_NOBLOCK, False)
    frames = [frame.bytes]
    while frame.more:
        frame = take(0, False)
        if len(frames) < most:
            frames.append(frame.bytes)
    return frames


class Pump:
    """Hand every message of a socket to ``handler``, on the running loop, until :meth:`close`.

    Args:
        socket: the pump owns it; :meth:`close` closes it.
        handler: called with the frames of one message; it must not block.
        after: called after each burst of messages.
        max_frames: frames kept of one message.
    """

    def __init__(
        self,
        socket: Socket,
        handler: Handler,
        after: Callable[[], None] | None = None,
        *,
        max_frames: int = MAX_KEPT_FRAMES,
    ) -> None:
        self.socket = socket
        self._handler = handler
        self._after = after
        self._max_frames = max_frames
        self._loop = asyncio.get_running_loop()
        self._fd = socket.FD
        self._polled = [(socket, _POLLIN)]
        self._soon: asyncio.Handle | None = None
        self._behind: deque[tuple[int, Callable[[], None]]] = deque()
        """Calls that wait, each with the most messages that may still be before it."""
        self.closed = False
        self._paused = False
        self._loop.add_reader(self._fd, self._readable)
        self.kick()

    def kick(self) -> None:
        """Read the socket soon. Call this after a send on it, which may have consumed the signal."""
        if self._soon is None and not self.closed:
            self._soon = self._loop.call_soon(self._readable)

    def pause(self) -> None:
        """Read nothing until :meth:`resume`: messages stay with libzmq, up to the socket's high-water mark."""
        self._paused = True

    def resume(self) -> None:
        """Read again."""
        self._paused = False
        self.kick()

    def call_behind(self, call: Callable[[], None]) -> None:
        """Call this behind the messages that wait now, and not before calls made earlier.

        Nobody knows which messages have come since. So it is called when none is left, or as many have been read as
        the socket holds.
        """
        if not self._behind and not self._pending():
            call()
            return
        self._behind.append((int(self.socket.getsockopt(zmq.RCVHWM)) or sys.maxsize, call))
        self.kick()

    def _readable(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if self.closed:
            return
        if self._paused:
            if not self._pending():  # looking rearms the signal, else the loop would spin
                self._call_those_behind(0, pending=False)
            return  # what comes behind that look stays, too
        try:
            more, taken = True, 0
            for taken in range(CAP):
                try:
                    frames = receive(self.socket, self._max_frames)
                except zmq.Again:
                    break
                self._handler(frames)
                if self.closed:
                    return
                if taken < LOOKS and not (more := self._pending()):
                    break  # usually there is one message
            if self._after is not None:
                self._after()
            pending = more and self._pending()
            if self._behind:
                self._call_those_behind(taken + 1, pending=pending)
            if pending:
                self.kick()
        except BaseException:
            if self.socket.closed:  # with its context: there is nothing to read any more
                self.close()
            else:
                self.kick()
            raise

    def _call_those_behind(self, taken: int, *, pending: bool) -> None:
        self._behind = deque((left - taken, call) for left, call in self._behind)
        while self._behind and (not pending or self._behind[0][0] <= 0):
            self._behind.popleft()[1]()

    def _pending(self) -> bool:
        """Whether a message waits. It rearms the descriptor, as ``ZMQ_EVENTS`` would at four times the cost."""
        return bool(zmq.zmq_poll(self._polled, 0))

    def look(self) -> bool:
        """Return whether a message waits. To look, as to send, may consume the signal, so it is read soon."""
        if self.closed or not self._pending():
            return False
        self.kick()
        return True

    def close(self) -> None:
        """Stop. The socket closes one turn of the loop later: its descriptor may be among this turn's events."""
        if self.closed:
            return
        self.closed = True
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._loop.remove_reader(self._fd)
        self._loop.call_soon(self.socket.close)
