"""Routers that take what comes live and never ask for what they missed: AIBrix, SMG's relay and llm-d without replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import zmq

from tests.doubles.router import PlainSetRouter

if TYPE_CHECKING:
    from collections.abc import Sequence


class NeverAsks:
    """A SUB on each stream, and a plain set for each rank of each. Numbers are not looked at."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._views: dict[tuple[int, int], PlainSetRouter] = {}
        self._sockets = [self._subscribed(endpoint) for endpoint in endpoints]

    def _subscribed(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        return socket

    def _view(self, stream: int, rank: int) -> PlainSetRouter:
        return self._views.setdefault((stream, rank), PlainSetRouter())

    def read(self) -> set[int]:
        """Take in whatever is there; the hashes of all blocks."""
        for stream, socket in enumerate(self._sockets):
            while socket.poll(0):
                _, seq, payload = socket.recv_multipart()
                rank = msgspec.msgpack.decode(payload)[2]
                self._view(stream, rank).take(int.from_bytes(seq, "big"), payload)
        return {block for view in self._views.values() for _, _, block in view.blocks if isinstance(block, int)}

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(0)
        self._context.term()
