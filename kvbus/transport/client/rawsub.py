"""A minimal subscriber: an asynchronous iterator over raw multipart messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import zmq

from kvbus.transport.client.mailbox import Mailbox
from kvbus.transport.sockets import PeerPolicy, attach_or_refuse, bound_endpoint, end, make_socket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from kvbus.transport.curve import Curve


class RawSubscriber:
    """Subscribe to a stream and iterate over its messages, each a list of frames. Only a waiting `recv` reads them.

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
        self._mailbox: Mailbox | None = None

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
        """Close the socket."""
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
