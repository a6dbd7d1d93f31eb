"""libzmq sockets that return messages without decoding them: a subscriber, and a DEALER for one request and its answer.

A message is read from libzmq only while a caller waits in ``recv``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Self

import zmq

from kvbus.transport.pump import MAX_KEPT_FRAMES, Pump
from kvbus.transport.sockets import PeerPolicy, attach_or_refuse, bound_endpoint, end, make_socket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from kvbus.transport.curve import Curve
    from kvbus.transport.sockets import Socket

_SMALL: Final = {"RCVHWM": 1, "RCVBUF": 4096}


class Mailbox:
    """A libzmq socket from which a caller awaits one message at a time, each a list of frames.

    Args:
        socket: the socket. The mailbox owns it, and :meth:`aclose` closes it.
        max_frames: maximum number of frames kept of each message. Further frames are dropped.
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
        """Send a message. libzmq queues it until the socket is connected."""
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
        await asyncio.sleep(0)  # wait for the loop's next iteration, in which the pump closes the socket


class RawSubscriber:
    """A subscriber of one stream. Iterate over it to get the messages, each a list of frames.

    Messages are read from libzmq only inside `recv`.

    Args:
        endpoint: the publisher's endpoint, or the endpoint to bind.
        topic: prefix of the topics to subscribe to.
        bind: True for publishers that connect to the subscriber, as vLLM does if its endpoint has a host name.
        hwm: maximum number of messages that ZeroMQ queues here. When this queue is full, the publisher's queue fills
            up, and then the publisher drops messages.
        context: a ZeroMQ context to share, which ``inproc://`` needs; None if the subscriber creates its own context.
        curve: keys for a publisher that requires CURVE. They are used only if the subscriber connects.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        topic: bytes = b"",
        bind: bool = False,
        hwm: int = 100_000,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        curve: Curve | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._topic = topic
        self._bind = bind
        self._hwm = hwm
        self._own_context = context is None
        self._context = context
        self._curve = curve
        self._mailbox: Mailbox | None = None

    @property
    def endpoint(self) -> str:
        """The endpoint of the socket. After `start` of a subscriber that binds, it has the real port."""
        return self._endpoint

    def start(self) -> None:
        """Open the socket in the running event loop.

        Raises:
            BindError: the endpoint cannot be bound.
            ValueError: the endpoint is malformed.
        """
        if self._context is None:
            self._context = zmq.Context()
        socket = make_socket(self._context, zmq.SUB, RCVHWM=self._hwm)
        try:
            PeerPolicy(curve=self._curve).put_on(socket)
            socket.setsockopt(zmq.SUBSCRIBE, self._topic)
            attach_or_refuse(socket, self._endpoint, bind=self._bind)
        except BaseException:
            socket.close(0)
            self._end_context()
            raise
        if self._bind:
            self._endpoint = bound_endpoint(socket, self._endpoint)
        self._mailbox = Mailbox(socket)

    async def close(self) -> None:
        """Close the socket, and the ZeroMQ context if the subscriber has created it."""
        try:
            if self._mailbox is not None:
                mailbox, self._mailbox = self._mailbox, None
                await mailbox.aclose()
        finally:
            self._end_context()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[list[bytes]]:
        while True:
            yield await self.recv()

    async def recv(self) -> list[bytes]:
        """Wait for the next message and return its frames."""
        if self._mailbox is None:
            raise RuntimeError("the subscriber is not started")
        return await self._mailbox.recv()

    def _end_context(self) -> None:
        if self._own_context and self._context is not None:
            end(self._context)
            self._context = None


class Asker:
    """A DEALER that sends a request to a ROUTER, and reads the messages of the answer.

    The DEALER sets no routing id. A kvbus at the other end recognizes another kvbus by its routing id, so it answers
    this DEALER as it answers a router.

    Args:
        endpoint: the ROUTER's endpoint.
        curve: keys for a ROUTER that requires CURVE.
        slow: whether to queue as few messages of the answer as possible here, so that the ROUTER has a slow reader.
        most: maximum number of frames kept of each message. Further frames are dropped.
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
        """Send the request with these frames. libzmq queues it until the socket is connected."""
        self._mailbox.send(frames)

    async def recv(self) -> list[bytes]:
        """Wait for the next message of the answer, and return its frames."""
        return await self._mailbox.recv()
