"""A reader of an edge-triggered socket: it reads messages as soon as they arrive, and never starves the event loop.

libzmq's file descriptor signals once. It signals again only after a read of ``ZMQ_EVENTS`` found no message. So a pump
reads until EAGAIN, and then checks ``ZMQ_EVENTS`` again. If a cap or an exception ended the reading, the pump continues
by ``call_soon``. A send on the same socket may consume the signal: call :meth:`Pump.look` after it.
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
"""Maximum number of messages read in one iteration of the event loop."""

LOOKS: Final = 4
"""Number of messages in an iteration after which the pump checks for another message. Then it reads until EAGAIN, which
costs as much as eight checks."""

MAX_KEPT_FRAMES: Final = 64
"""Maximum number of frames kept per message. Further frames are read and dropped, and the core rejects the message for
its number of frames."""

# plain integers: pyzmq accepts the members of its enumerations too, but at a multiple of the cost
_NOBLOCK: Final = int(zmq.NOBLOCK)
_POLLIN: Final = int(zmq.POLLIN)

Handler = Callable[[list[bytes]], None]


def receive(socket: Socket, most: int = MAX_KEPT_FRAMES) -> list[bytes]:
    """Receive one complete message, and return up to ``most`` frames of it.

    Raises:
        zmq.Again: no message is waiting.
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
        max_frames: maximum number of frames kept per message.
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
        """Deferred calls, each with the maximum number of messages that may still come before it."""
        self.closed = False
        self._paused = False
        self._loop.add_reader(self._fd, self._readable)
        self.kick()

    def kick(self) -> None:
        """Read the socket in the loop's next iteration. Call this after a send, which may have consumed the signal."""
        if self._soon is None and not self.closed:
            self._soon = self._loop.call_soon(self._readable)

    def pause(self) -> None:
        """Read nothing until :meth:`resume`. libzmq queues messages up to the socket's high-water mark."""
        self._paused = True

    def resume(self) -> None:
        """Start reading again."""
        self._paused = False
        self.kick()

    def call_behind(self, call: Callable[[], None]) -> None:
        """Make a call after the messages that wait now, and after all earlier deferred calls.

        The pump cannot tell these messages from later ones. So it makes the call when no message waits, or after it has
        read as many messages as the socket can queue.
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
            if not self._pending():  # the check rearms the signal; without it the loop would spin
                self._call_those_behind(0, pending=False)
            return  # messages that arrive after the check also stay in libzmq
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
                    break  # usually only one message is waiting
            if self._after is not None:
                self._after()
            pending = more and self._pending()
            if self._behind:
                self._call_those_behind(taken + 1, pending=pending)
            if pending:
                self.kick()
        except BaseException:
            if self.socket.closed:  # it was closed with its context, so no message can follow
                self.close()
            else:
                self.kick()
            raise

    def _call_those_behind(self, taken: int, *, pending: bool) -> None:
        self._behind = deque((left - taken, call) for left, call in self._behind)
        while self._behind and (not pending or self._behind[0][0] <= 0):
            self._behind.popleft()[1]()

    def _pending(self) -> bool:
        """Return whether a message waits. It rearms the descriptor like ``ZMQ_EVENTS``, at a quarter of the cost."""
        return bool(zmq.zmq_poll(self._polled, 0))

    def look(self) -> bool:
        """Return whether a message waits. The check may consume the signal, so a waiting message is read soon."""
        if self.closed or not self._pending():
            return False
        self.kick()
        return True

    def close(self) -> None:
        """Stop reading, and close the socket in the loop's next iteration: this one may still have an event for it."""
        if self.closed:
            return
        self.closed = True
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._loop.remove_reader(self._fd)
        self._loop.call_soon(self.socket.close)
