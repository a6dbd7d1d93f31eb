"""A router that reads many workers on one connection, and keeps one numbering and one set of blocks for each topic."""

from __future__ import annotations

from typing import Final

import msgspec
import zmq

from tests.doubles.router import PlainSetRouter, events_of


class TopicRouter:
    """It asks nothing: the state comes with the subscription. It writes down whatever would mislead it.

    Args:
        endpoint: of the live streams.
        topics: prefixes that it subscribes to.
        bind: it listens, and the bus dials.
        context: one with keys; ended by :meth:`close`.
    """

    def __init__(
        self, endpoint: str, *topics: bytes, bind: bool = False, context: zmq.Context[zmq.Socket[bytes]] | None = None
    ) -> None:
        self.views: dict[bytes, PlainSetRouter] = {}
        self.next: dict[bytes, int] = {}
        self.violations: list[str] = []
        self.states: dict[bytes, int] = {}
        """Clears by topic."""
        self._endpoint = endpoint
        self._topics: Final = topics or (b"",)
        self._bind = bind
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context() if context is None else context
        self._socket: zmq.Socket[bytes] | None = None
        self.connect()

    def connect(self) -> None:
        """Subscribe; what is known stays known."""
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        for topic in self._topics:
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        if self._bind:
            self._socket.bind(self._endpoint)
        else:
            self._socket.connect(self._endpoint)

    def listen_again(self) -> bool:
        """Bind once more; False while the address is not free yet."""
        try:
            self.connect()
        except zmq.ZMQError:
            self.disconnect()
            return False
        return True

    def disconnect(self) -> None:
        """Lose the connection, and whatever was on its way."""
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def close(self) -> None:
        """End."""
        self.disconnect()
        self._context.term()

    def blocks(self, topic: bytes) -> set[int | bytes]:
        """The hashes of the blocks that it believes are with this worker, after whatever has arrived."""
        return self.held.get(topic, set())

    @property
    def held(self) -> dict[bytes, set[int | bytes]]:
        """What it believes of every worker that has any block."""
        self.read()
        return {topic: {block for _, _, block in view.blocks} for topic, view in self.views.items() if view.blocks}

    def read(self) -> None:
        """Take in whatever has arrived."""
        while self._socket is not None and self._socket.poll(0):
            topic, seq, payload = self._socket.recv_multipart()
            if not topic.startswith(tuple(self._topics)):
                self.violations.append(f"{topic!r} was not subscribed to")
            self._take(topic, int.from_bytes(seq, "big"), payload)

    def _take(self, topic: bytes, seq: int, payload: bytes) -> None:
        view = self.views.setdefault(topic, PlainSetRouter())
        expected = self.next.get(topic)
        events = events_of(payload)
        clears = bool(events) and events[0]["type"] == "AllBlocksCleared"
        self.states[topic] = self.states.get(topic, 0) + clears
        if expected is not None and seq < expected:
            self.violations.append(f"{topic!r}: {seq} after {expected - 1}")
        if seq != expected and not clears and (expected is not None or events):
            self.violations.append(f"{topic!r}: {seq} instead of {expected}, and no state")
        self.next[topic] = seq + 1
        view.take(seq, payload)
        ranks = {msgspec.msgpack.decode(payload)[2]}
        if len(view.ranks | ranks) > 1:
            self.violations.append(f"{topic!r}: ranks {view.ranks | ranks}")
