"""A router's sockets around a plain set: what is live, and the standard replay. How it repairs is its subclass's affair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Final

import zmq

from kvbus.core.wire.frames import ASKS_REPLAY
from tests.doubles.router import PlainSetRouter

END: Final = b"\xff" * 8

Context = zmq.Context[zmq.Socket[bytes]]


class SocketRouter:
    """A real SUB, and a DEALER of its own for each request.

    Args:
        endpoint: the live stream.
        replay_endpoint: the standard replay.
        context: one with keys; ended by :meth:`close`.
    """

    rebuilds: ClassVar = True
    """It says that it rebuilds itself by replays, and wants no state by its subscription."""

    def __init__(self, endpoint: str, replay_endpoint: str, context: Context | None = None) -> None:
        self.context: Context = zmq.Context() if context is None else context
        self.view = PlainSetRouter()
        self.next = 0
        self.went_back = 0
        """Live batches numbered no higher than one before."""
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._live: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    def subscribe(self, buffer: int = 0) -> None:
        """Connect to the live stream, with room for everything or for a few bytes."""
        self._live = self.context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, 1 if buffer else 0)
        if buffer:
            self._live.setsockopt(zmq.RCVBUF, buffer)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        if self.rebuilds:
            self._live.setsockopt(zmq.SUBSCRIBE, ASKS_REPLAY)
        self._monitor = self._live.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._live.connect(self._endpoint)

    def unsubscribe(self) -> None:
        if self._live is not None and self._monitor is not None:
            self._live.disable_monitor()
            self._live.close(0)
            self._monitor.close(0)
            self._live = self._monitor = None

    def disconnected(self) -> int:
        """How often the live connection has broken since the last time this was asked."""
        assert self._monitor is not None
        count = 0
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            count += 1
        return count

    def arrived(self) -> Iterator[tuple[int, bytes]]:
        """Seq and payload of whatever the live stream has at this moment."""
        assert self._live is not None
        while self._live.poll(0):
            _, seq, payload = self._live.recv_multipart()
            assert len(seq) == 8
            yield int.from_bytes(seq, "big"), payload

    def request(self, start: int, hwm: int = 1000) -> zmq.Socket[bytes]:
        """Ask the standard replay; the socket its answer comes on."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, hwm)
        dealer.connect(self._replay_endpoint)
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        return dealer

    def close(self) -> None:
        self.unsubscribe()
        self.context.term()


class Deaf(SocketRouter):
    """A router that applies each batch of the live stream, whatever its number, and never asks.

    Args:
        buffer: bytes that its kernel takes in; 0: as many as there are.
    """

    rebuilds = False

    def __init__(self, endpoint: str, *, buffer: int = 0, context: Context | None = None) -> None:
        super().__init__(endpoint, "", context)
        self._shared = context is not None
        self.batches = 0
        self.context.setsockopt(zmq.RECONNECT_IVL, 5)
        self.subscribe(buffer)

    def read(self) -> set[Any]:
        for seq, payload in self.arrived():
            self.view.take(seq, payload)
            self.batches += 1
        return set(self.view.blocks)

    def close(self) -> None:
        self.unsubscribe()
        if not self._shared:
            self.context.term()
