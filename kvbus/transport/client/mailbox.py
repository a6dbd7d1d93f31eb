"""What a socket receives, read from libzmq only while somebody waits for it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from kvbus.transport.pump import MAX_KEPT_FRAMES, Pump

if TYPE_CHECKING:
    from kvbus.transport.sockets import Socket


class Mailbox:
    """The messages of one socket, each a list of frames.

    Args:
        socket: the mailbox owns it; :meth:`aclose` closes it.
        max_frames: frames kept of one message.
    """

    def __init__(self, socket: Socket, *, max_frames: int = MAX_KEPT_FRAMES) -> None:
        self._messages: Final[deque[list[bytes]]] = deque()
        self._arrived: Final = asyncio.Event()
        self._pump = Pump(socket, self._take, max_frames=max_frames)
        self._pump.pause()

    def _take(self, frames: list[bytes]) -> None:
        self._messages.append(frames)
        self._arrived.set()

    def send(self, frames: tuple[bytes, ...]) -> None:
        """Send a message; it leaves as soon as there is a connection."""
        self._pump.socket.send_multipart(frames)
        self._pump.look()

    async def recv(self) -> list[bytes]:
        """Wait for the next message and return its frames."""
        while not self._messages:
            self._arrived.clear()
            self._pump.resume()
            try:
                await self._arrived.wait()
            finally:
                self._pump.pause()
        return self._messages.popleft()

    async def aclose(self) -> None:
        """Close the socket."""
        self._pump.close()
        await asyncio.sleep(0)  # the socket closes in the loop's next turn
