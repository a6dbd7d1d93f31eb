"""A reader of Dynamo's event plane for tests: a SUB that converts the received messages back to batches."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvbus.config import OutputConfig, parse_endpoint
from kvbus.core.stats import OutputStats
from tests.doubles.payloads import cleared, payload, removed, store
from tests.ports import ports_in_a_row
from tests.transport.loops import read_all

TOPIC = b"kv@pod@model"
"""Topic of the batches that the reader returns. No message contains it, because the event plane has only one topic."""


def unwrapped(frames: list[bytes]) -> tuple[int, int, list[dict[str, Any]]]:
    """Return publisher, sequence number and RouterEvents of one message. Check the framing of the message."""
    topic, publisher, sequence, body = frames
    assert (topic, body[:1], int.from_bytes(body[1:5], "big")) == (b"kv-events", b"\x01", len(body) - 5)
    envelope = msgspec.msgpack.decode(body[5:])
    numbers = tuple(int.from_bytes(frame, "big") for frame in (publisher, sequence))
    assert (envelope["publisher_id"], envelope["sequence"], envelope["topic"]) == (*numbers, "kv-events")
    return *numbers, msgspec.msgpack.decode(envelope["payload"])


def as_event(event: dict[str, Any]) -> dict[str, Any]:
    """Convert a RouterEvent back to the event from which kvbus made it, as far as possible.

    A RouterEvent that removes no block stands for AllBlocksCleared or for an empty batch, and becomes AllBlocksCleared.
    """
    data = event["event"]["data"]
    if "stored" in data:
        blocks = [block["block_hash"] for block in data["stored"]["blocks"]]
        return store(blocks, parent=data["stored"]["parent_hash"], tokens=[0] * 16 * len(blocks))
    hashes = data["removed"]["block_hashes"]
    return removed(hashes) if hashes else cleared()


class DynamoReader:
    def __init__(self, endpoint: str, *, slow: bool) -> None:
        self._context = zmq.Context()
        self._live: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.LINGER, 0)
        self._live.setsockopt(zmq.RECONNECT_IVL, 5)
        self._live.setsockopt(zmq.RCVHWM, 1 if slow else 0)
        if slow:
            self._live.setsockopt(zmq.RCVBUF, 4096)
        self._live.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        self._live.connect(endpoint)

    def take(self) -> list[tuple[bytes, int, bytes]]:
        taken = [unwrapped(frames) for frames in read_all(self._live)]
        return [(TOPIC, seq, payload(*map(as_event, events))) for _, seq, events in taken]

    def look(self) -> None:
        """Call libzmq, because after a lost connection a SUB subscribes again only while its application calls
        libzmq.
        """
        self._live.poll(0)

    def ask(self, start: int) -> None:
        raise NotImplementedError

    def answers(self) -> list[Any]:
        raise NotImplementedError

    def close(self) -> None:
        self._context.destroy()


class DynamoKind:
    asks = False
    loses = True
    seen = True
    sends_state = True

    def settings(self, directory: Path) -> dict[str, Any]:
        endpoint = f"tcp://127.0.0.1:{ports_in_a_row(2)}"
        return {"endpoint": endpoint, "dynamo": {"discovery": f"file://{directory}/discovery"}}

    def connect(self, config: OutputConfig, stream: int, *, slow: bool) -> DynamoReader:
        return DynamoReader(*self.places(config, stream), slow=slow)

    def joined(self, stats: OutputStats, readers: list[DynamoReader]) -> bool:
        for reader in readers:
            reader.look()
        return stats.subscribers == len(readers)

    def payload(self, number: int, size: int) -> bytes:
        return payload(removed([number, *range(2**63, 2**63 + size // 9)]))

    def places(self, config: OutputConfig, stream: int) -> list[str]:
        return [config.stream_endpoints(stream).endpoint]

    def occupied(self, place: str) -> socket.socket:
        address = parse_endpoint(place)
        return socket.create_server((address.host, address.port))
