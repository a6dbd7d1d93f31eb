"""A minimal subscriber: an asynchronous iterator over raw multipart messages.

The ZeroMQ file descriptor is edge-triggered: it signals once, and again only after somebody has read ZMQ_EVENTS. So
the reader callback reads ZMQ_EVENTS, and `recv` reads it again after the last message, before it waits.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

import zmq

from kvbus.transport.pump import waiting
from kvbus.transport.sockets import PeerPolicy, attach_or_refuse, bound_endpoint, end, make_socket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from kvbus.transport.curve import Curve

_YIELD_EVERY: Final = 256  # messages taken in one go before the loop's other tasks get their turn


class RawSubscriber:
    """Subscribe to a stream and iterate over its messages, each a list of frames.

    Args:
        endpoint: the publisher's endpoint, or the endpoint to bind.
        topic: subscription prefix.
        bind: True for publishers that connect to the subscriber (vLLM with a concrete host).
        hwm: messages that ZeroMQ queues before the publisher drops.
        context: a ZeroMQ context to share (``inproc://``); by default the subscriber has its own.
        curve: keys for a publisher that wants CURVE; only where the subscriber connects.
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
        self._socket: zmq.Socket[bytes] | None = None
        self._readable = asyncio.Event()
        self._fd = -1
        self._taken = 0

    @property
    def endpoint(self) -> str:
        """The endpoint; after `start` the bound one, with its real port."""
        return self._endpoint

    def start(self) -> None:
        """Open the socket; needs a running event loop.

        Raises:
            BindError: the endpoint cannot be bound.
            ValueError: the endpoint is malformed.
        """
        if self._context is None:
            self._context = zmq.Context()
        socket = make_socket(self._context, zmq.SUB, RCVHWM=self._hwm)
        try:
            PeerPolicy(curve=self._curve).put_on(socket, bind=False)
            socket.setsockopt(zmq.SUBSCRIBE, self._topic)
            attach_or_refuse(socket, self._endpoint, bind=self._bind)
        except BaseException:
            socket.close(0)
            self._end_context()
            raise
        if self._bind:
            self._endpoint = bound_endpoint(socket, self._endpoint)
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        asyncio.get_running_loop().add_reader(self._fd, self._wake)

    async def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            await asyncio.sleep(0)  # uvloop releases the descriptor in its next turn
            self._socket.close(0)
            self._socket = None
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
        self._taken += 1
        if self._taken % _YIELD_EVERY == 0:
            await asyncio.sleep(0)
        while True:
            socket = self._socket
            if socket is None:
                raise RuntimeError("the subscriber is not started")
            self._readable.clear()
            try:
                return socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                # what arrived since the failed receive will not signal again
                if not waiting(socket):
                    await self._readable.wait()

    def _wake(self) -> None:
        if self._socket is not None and waiting(self._socket):
            self._readable.set()

    def _end_context(self) -> None:
        if self._own_context and self._context is not None:
            end(self._context)
            self._context = None
