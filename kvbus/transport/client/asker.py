"""One request to a ROUTER and its answer, sent as any reader in the field sends it: by a DEALER without a name."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import zmq

from kvbus.transport.pump import Pump
from kvbus.transport.sockets import PeerPolicy, attach_or_refuse, end, make_socket

if TYPE_CHECKING:
    from kvbus.transport.curve import Curve

_SMALL: Final = {"RCVHWM": 1, "RCVBUF": 4096}


class Asker:
    """Send one request, and read the messages of its answer.

    Args:
        endpoint: the ROUTER's.
        curve: keys for a ROUTER that wants CURVE.
        slow: hold as little as can be of what comes, until it is read.
        most: frames that are kept of one message.
    """

    def __init__(self, endpoint: str, *, curve: Curve | None = None, slow: bool = False, most: int = 64) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._messages: Final[deque[list[bytes]]] = deque()
        self._arrived: Final = asyncio.Event()
        try:
            socket = make_socket(self._context, zmq.DEALER, **(_SMALL if slow else {}))
            PeerPolicy(curve=curve).put_on(socket, bind=False)
            attach_or_refuse(socket, endpoint, bind=False)
        except BaseException:
            end(self._context)
            raise
        self._pump = Pump(socket, self._messages.append, self._arrived.set, max_frames=most)
        self._pump.pause()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pump.close()
        await asyncio.sleep(0)  # the socket closes in the loop's next turn
        end(self._context)

    def ask(self, *frames: bytes) -> None:
        """Send the request; it leaves as soon as there is a connection."""
        self._pump.socket.send_multipart(frames)
        self._pump.sent()

    async def recv(self) -> list[bytes]:
        """Wait for the next message of the answer, and return its frames."""
        while not self._messages:
            self._arrived.clear()
            self._pump.resume()
            try:
                await self._arrived.wait()
            finally:
                self._pump.pause()
        return self._messages.popleft()
