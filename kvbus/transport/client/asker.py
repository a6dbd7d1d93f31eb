"""One request to a ROUTER and its answer, sent as any reader in the field sends it: by a DEALER without a name."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import zmq

from kvbus.transport.client.mailbox import Mailbox
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
        try:
            socket = make_socket(self._context, zmq.DEALER, **(_SMALL if slow else {}))
            PeerPolicy(curve=curve).put_on(socket)
            attach_or_refuse(socket, endpoint, bind=False)
        except BaseException:
            end(self._context)
            raise
        self._mailbox = Mailbox(socket, max_frames=most)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._mailbox.aclose()
        finally:
            end(self._context)

    def ask(self, *frames: bytes) -> None:
        """Send the request; it leaves as soon as there is a connection."""
        self._mailbox.send(frames)

    async def recv(self) -> list[bytes]:
        """Wait for the next message of the answer, and return its frames."""
        return await self._mailbox.recv()
