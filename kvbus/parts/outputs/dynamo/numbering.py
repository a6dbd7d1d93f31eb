"""Messages of the event plane, numbered for each connection by itself.

Dynamo wants the event ids of a source without a hole. A hole makes a router forget the rank and go on from there: so
that is how it hears of a clear, of batches that it did not get, and of a state that begins. AllBlocksCleared of Dynamo
is no choice: newer versions forget every rank of the worker at it. Connections share no ids, but each begins
higher than all before it: a router that has come back takes nothing for old.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final

import msgspec

from kvbus.core.wire.tokens import array_head
from kvbus.parts.outputs.dynamo.events import Batch, RouterEvent, Translator
from kvbus.transport.zmtp.frames import LONG, encode_message

TOPIC: Final = b"kv-events"

LATEST: Final = 2**40
"""Seconds. An engine may send any time, and Dynamo reads milliseconds of 64 bits."""

_CACHED: Final = 64
"""Translated batches that are kept for the next connection."""

_ranked: Final = msgspec.msgpack.Decoder(tuple[float, msgspec.Raw, int]).decode

_MSGPACK: Final = b"\x01"


class Envelope(msgspec.Struct):
    """What a message holds."""

    publisher_id: int
    sequence: int
    published_at: int
    topic: str
    payload: bytes


class Numbering:
    """The ids of one publisher.

    Args:
        publisher: the publisher's id.
        worker: the worker's id in Dynamo.
        rank: the data-parallel rank.
        left_out: see :class:`~kvbus.parts.outputs.dynamo.events.Translator`.
    """

    def __init__(self, publisher: int, worker: int, rank: int, left_out: Callable[[int], None]) -> None:
        self.publisher = publisher
        self.worker = worker
        self.rank = rank
        self.newest = 0
        """The highest event id used on any connection."""
        translator = Translator(worker, rank, left_out)
        self.filler = translator.filler
        self.translate = lru_cache(maxsize=_CACHED)(translator.batch)
        """Connections share the work: all of them get the same batches at about the same time."""

    def connection(self) -> Connection:
        """Number one connection more."""
        return Connection(self)


class Connection:
    """One router's ids, and what it is sent. :meth:`rewrite` gets the live stream as every other router has it."""

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self._id = numbering.newest + 1
        """The newest id. It was never used: a router that knows this source finds a hole before the first event."""
        self._seq: int | None = None
        self._encode = msgspec.msgpack.Encoder().encode

    def rewrite(self, data: bytes) -> bytes:
        """Encoded messages of kvbus, whole ones, as messages of the event plane."""
        out = b"".join([self._message(seq, self._numbering.translate(payload)) for seq, payload in _messages(data)])
        self._numbering.newest = max(self._numbering.newest, self._id)
        return out

    def _message(self, seq: int, batch: Batch) -> bytes:
        """One batch; without events it has no ids, and a router does nothing at it."""
        if self._seq is not None and seq != self._seq + 1:
            self._id += 1
        self._seq = seq
        payload = array_head(len(batch.events)) + b"".join(map(self._with_id, batch.events))
        at = int(batch.ts * 1000) if math.isfinite(batch.ts) and 0 <= batch.ts < LATEST else 0
        publisher = self._numbering.publisher
        envelope = self._encode(Envelope(publisher, seq, at, TOPIC.decode(), payload))
        frame = _MSGPACK + len(envelope).to_bytes(4, "big") + envelope
        return encode_message((TOPIC, publisher.to_bytes(8, "big"), seq.to_bytes(8, "big"), frame))

    def _with_id(self, event: RouterEvent | None) -> bytes:
        if event is None:
            self._id += 1
            event = self._numbering.filler
        self._id += 1
        return event.head + self._id.to_bytes(8, "big") + event.tail


def rank_of(payload: bytes) -> int:
    """The rank that a batch of kvbus says."""
    return _ranked(payload)[2]


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Seq and payload of each message."""
    at = 0
    while at < len(data):
        frames = []
        for _ in range(3):
            head = 9 if data[at] & LONG else 2
            end = at + head + int.from_bytes(data[at + 1 : at + head], "big")
            frames.append(data[at + head : end])
            at = end
        yield int.from_bytes(frames[1], "big"), frames[2]
