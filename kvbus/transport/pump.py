"""Read a libzmq socket from the event loop: each message as soon as it arrives, without blocking other work.

libzmq's file descriptor signals only once that messages wait. It signals again only after the reader has checked
``ZMQ_EVENTS`` and no message was waiting. So a pump reads until no message waits, and then checks ``ZMQ_EVENTS``. If
the pump stops earlier, at its limit of messages or because of an exception, it continues in the next iteration of the
event loop. A send on the same socket may consume the signal, so call :meth:`Pump.kick` after each send.
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
"""Maximum number of messages that a pump reads in one iteration of the event loop."""

LOOKS: Final = 4
"""Number of messages, in one iteration of the event loop, after which a pump no longer checks for a further message.

At first the pump checks after each message whether another one waits, because usually only one or a few messages wait.
A check costs an eighth of a read for which no message waits (EAGAIN). After this number of messages, more are probably
waiting, so the pump reads without a check until EAGAIN.
"""

MAX_KEPT_FRAMES: Final = 64
"""Maximum number of frames that kvbus keeps of each message.

Further frames are read and dropped. The core then rejects the message because of its number of frames.
"""

# plain integers, because a member of one of pyzmq's enumerations costs several times as much in each call
_NOBLOCK: Final = int(zmq.NOBLOCK)
_POLLIN: Final = int(zmq.POLLIN)

Handler = Callable[[list[bytes]], None]


def receive(socket: Socket, most: int = MAX_KEPT_FRAMES) -> list[bytes]:
    """Receive one complete message, and return its first ``most`` frames.

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
    """A reader of one libzmq socket, which passes every message to ``handler`` until :meth:`close`.

    It runs on the event loop in which it is created.

    Args:
        socket: the socket. The pump owns it, and :meth:`close` closes it.
        handler: called with the frames of each message. It must not block.
        max_frames: maximum number of frames kept of each message.
    """

    def __init__(
        self,
        socket: Socket,
        handler: Handler,
        *,
        max_frames: int = MAX_KEPT_FRAMES,
    ) -> None:
        self.socket = socket
        self._handler = handler
        self._max_frames = max_frames
        self._loop = asyncio.get_running_loop()
        self._fd = socket.FD
        self._polled = [(socket, _POLLIN)]
        self._soon: asyncio.Handle | None = None
        self._behind: deque[tuple[int, Callable[[], None]]] = deque()
        """Deferred calls, each with the maximum number of messages that may still be read before the call."""
        self.closed = False
        self._paused = False
        self._loop.add_reader(self._fd, self._readable)
        self.kick()

    def kick(self) -> None:
        """Read the socket in the next iteration of the event loop.

        Call this after a send on the socket, because the send may have consumed libzmq's signal that messages wait.
        """
        if self._soon is None and not self.closed:
            self._soon = self._loop.call_soon(self._readable)

    def pause(self) -> None:
        """Stop reading until :meth:`resume`. Meanwhile libzmq queues messages, up to the socket's high-water mark."""
        self._paused = True

    def resume(self) -> None:
        """Start reading messages again after :meth:`pause`."""
        self._paused = False
        self.kick()

    def call_behind(self, call: Callable[[], None]) -> None:
        """Call a function after the messages that wait now, and after all functions that were passed here earlier.

        The pump cannot distinguish the messages that wait now from later messages. So it calls the function when no
        message waits, or after it has read as many messages as the socket's queue can hold.
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
            # This check consumes the descriptor's signal. Otherwise the descriptor would stay readable, and the event
            # loop would call this method all the time.
            if not self._pending():
                self._call_those_behind(0, pending=False)
            return  # messages that arrive later wait in libzmq until the pump resumes
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
                    break  # no further message waits, as usual when only one has arrived
            pending = more and self._pending()
            if self._behind:
                self._call_those_behind(taken + 1, pending=pending)
            if pending:
                self.kick()
        except BaseException:
            if self.socket.closed:  # the ZeroMQ context has closed its sockets, so no message can follow
                self.close()
            else:
                self.kick()
            raise

    def _call_those_behind(self, taken: int, *, pending: bool) -> None:
        self._behind = deque((left - taken, call) for left, call in self._behind)
        while self._behind and (not pending or self._behind[0][0] <= 0):
            self._behind.popleft()[1]()

    def _pending(self) -> bool:
        """Return whether a message waits to be read.

        After a signal, ZeroMQ's descriptor signals the next message only if the socket was checked in between. This
        check is enough for that. It takes a quarter of the time of a read of ``ZMQ_EVENTS``.
        """
        return bool(zmq.zmq_poll(self._polled, 0))

    def look(self) -> bool:
        """Return whether a message waits, and if so, read it in the next iteration of the event loop.

        The pump itself must read the message, because this check may consume the descriptor's signal.
        """
        if self.closed or not self._pending():
            return False
        self.kick()
        return True

    def close(self) -> None:
        """Stop reading now, and close the socket in the next iteration of the event loop.

        The socket is not closed earlier, because the current iteration may still have an event for its descriptor.
        """
        if self.closed:
            return
        self.closed = True
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._loop.remove_reader(self._fd)
        self._loop.call_soon(self.socket.close)
