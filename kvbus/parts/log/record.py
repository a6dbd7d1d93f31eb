"""The records of a log: one batch of one stream each, bounded, and the name of the stream. Pure.

A record is a msgpack array, see :class:`Record`; docs/LOG.md is its specification. Its key is the stream's, so a broker
that orders by key keeps the order. A block's hash is never a key: a parent that is stored again would land behind its
child.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import quote, unquote_to_bytes

import msgspec

from kvbus.core.numbered import LAST
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.encoding import decode_value, parts

SCHEMA: Final = 2
RANDOM_BITS: Final = 16
"""Low bits of an epoch. They are random, and its turn stands above them."""

TURN_BITS: Final = 37
MAX_EVENTS: Final = 128
MAX_BYTES: Final = 512 * 1024
"""Of a record's payload. A single block may be larger; it cannot be divided."""

LEAST_PACKED: Final = 256
"""Bytes of a state's payload from which on it is packed: below, names of fields do not repeat."""

LEVEL: Final = 1
"""Of zlib. A higher one takes up to twice the time, and makes hashes no smaller."""

PREFIX: Final = "kvbus.v1"
EMPTY: Final = "%"
"""An empty segment. Alone, a percent sign is no other segment's encoding."""

Epoch = Annotated[int, msgspec.Meta(ge=1, lt=1 << TURN_BITS + RANDOM_BITS)]
Seq = Annotated[int, msgspec.Meta(ge=0, lt=LAST)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Kind(IntEnum):
    """What a record is."""

    BATCH = 0
    """A batch of the engine's events."""
    CLEAR = 1
    """The first batch of a state, which begins with AllBlocksCleared; the others follow, each a STATE."""
    LEASE = 2
    """The writer is alive. It takes a number as every record does: whoever hands on the stream has a beat for it."""
    GONE = 3
    """The stream is over, and none of its blocks is left."""
    STATE = 4
    """A further batch of a state."""


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One record.

    No field has a default: of a record with fewer, the checksum would be read as one of them.

    Attributes:
        schema: :data:`SCHEMA`.
        kind: one of :class:`Kind`.
        epoch: the writer's turn, and random bits behind it. Epochs ascend in a log, and none comes twice.
        seq: dense in an epoch, from 0.
        payload: a batch ``[ts, events, rank]`` in msgpack; empty for a lease and an end.
        origin: the batch's seq on the writer's own stream; the parts of a divided batch share it.
        block_size: tokens of a block, 0 where the writer does not know it yet.
        more: of a CLEAR or STATE: the state goes on with the next record.
        resync: of a CLEAR: records are missing before it, so that every reader has to begin anew. Without it, who has
            all records before it has this state already, and may leave it out.
        packed: the payload is in zlib's format; :func:`read` has unpacked it.
    """

    schema: int
    kind: Kind
    epoch: Epoch
    seq: Seq
    payload: bytes
    origin: Number
    block_size: Number
    more: bool
    resync: bool
    packed: bool


class DamagedError(ValueError):
    """A record is not what was written."""


class SchemaError(ValueError):
    """A record of a schema that this version does not read."""


class Stream(NamedTuple):
    """Whose batches: one rank of one worker.

    The names may hold any text.
    """

    cluster: str
    model: str
    worker: str
    rank: int

    @property
    def key(self) -> str:
        """The key of its records, a subject of six tokens for NATS: ``kvbus.v1.CLUSTER.MODEL.WORKER.RANK``."""
        return ".".join((PREFIX, *map(_escaped, (self.cluster, self.model, self.worker)), str(self.rank)))

    @classmethod
    def parse(cls, key: str) -> Stream:
        """The stream of a key.

        Raises:
            ValueError: no stream has this key.
        """
        found = _KEY.fullmatch(key)
        if found is None:
            raise ValueError(f"{key!r} is no key of a stream")
        cluster, model, worker, rank = found.groups()
        stream = cls(_unescaped(cluster), _unescaped(model), _unescaped(worker), int(rank))
        if stream.key != key:
            raise ValueError(f"{key!r} is no key of a stream: {stream.key!r} is")
        return stream


_KEY: Final = re.compile(rf"{re.escape(PREFIX)}\.([^.]+)\.([^.]+)\.([^.]+)\.(0|[1-9][0-9]{{0,9}})", re.ASCII)


def _escaped(name: str) -> str:
    return quote(name, safe="").replace(".", "%2E") or EMPTY


def _unescaped(segment: str) -> str:
    return "" if segment == EMPTY else unquote_to_bytes(segment).decode()


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Record)


class _Schema(msgspec.Struct, array_like=True):
    """What the first field says, in every version; the checksum is none, so there is another one behind it."""

    schema: int
    behind: msgspec.Raw


_schema: Final = msgspec.msgpack.Decoder(_Schema)


def write(record: Record) -> bytes:
    """A record as it stands in the log.

    A state's payload is packed where that makes it smaller. The last element is the CRC-32 of all bytes before it, so
    that fields which a later version has are covered, too.
    """
    if record.kind in (Kind.CLEAR, Kind.STATE) and LEAST_PACKED <= len(record.payload) <= MAX_BYTES:
        packed = zlib.compress(record.payload, LEVEL)
        if len(packed) < len(record.payload):
            record = msgspec.structs.replace(record, payload=packed, packed=True)
    data = bytearray()
    _encoder.encode_into(record, data)
    data[0] += 1  # the array has an element more
    return bytes(data + CHECK + zlib.crc32(data).to_bytes(4, "big"))


CHECK: Final = b"\xce"
"""What is before the last four bytes of a record: msgpack's sign for a number of 32 bits."""


def read(data: bytes) -> Record:
    """A record of the log.

    Raises:
        DamagedError: its checksum is another one.
        SchemaError: it is of another schema.
        ValueError: it is none.
    """
    if data[-5:-4] != CHECK:
        raise ValueError("no record: it ends without a checksum")
    if zlib.crc32(memoryview(data)[:-5]) != int.from_bytes(data[-4:], "big"):
        raise DamagedError("a record whose checksum is not that of its content")
    try:
        record = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        _check(_schema_of(data))  # another one may have other fields
        raise ValueError(f"no record: {error}") from None
    _check(record.schema)
    return msgspec.structs.replace(record, payload=_unpacked(record.payload), packed=False) if record.packed else record


def _schema_of(data: bytes) -> int:
    """What the first field says; of what has none, that it is of this schema."""
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        return _schema.decode(data).schema
    return SCHEMA


def _check(schema: int) -> None:
    if schema != SCHEMA:
        raise SchemaError(f"a record of schema {schema}, and this version reads {SCHEMA}")


def _unpacked(payload: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        whole = unpacking.decompress(payload, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"no record: {error}") from None
    if not unpacking.eof or unpacking.unused_data:
        raise ValueError(f"no record: its payload is no whole one of at most {MAX_BYTES} bytes")
    return whole


class _Batch(msgspec.Struct, array_like=True):
    """A batch whose events nobody looks at."""

    ts: float
    events: list[msgspec.Raw]
    rank: int | None = None


_batch: Final = msgspec.msgpack.Decoder(_Batch)
_fields: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
READ: Final = ("type", "block_hashes", "block_size")
"""The fields of an event that a division reads; it hands on all others as they are."""


def divided(payload: bytes, events: int) -> list[bytes]:
    """A batch as payloads of records.

    Args:
        payload: as the relay has written it, with events that are maps.
        events: how many it carries, or more.
    """
    if events <= MAX_EVENTS and len(payload) <= MAX_BYTES:
        return [payload]
    return list(_pieces(payload, _batch.decode(payload)))


def _pieces(payload: bytes, batch: _Batch) -> Iterator[bytes]:
    events: Sequence[Any] = batch.events
    if len(events) <= MAX_EVENTS and len(payload) <= MAX_BYTES:
        yield payload
        return
    if len(events) == 1:
        fields: dict[str, Any] = _fields.decode(events[0])
        fields.update({name: decode_value(fields[name]) for name in READ if name in fields})
        halves = [[each] for each in _halves(fields)]
    else:
        middle = len(events) // 2
        halves = [list(events[:middle]), list(events[middle:])]
    if len(halves) == 1:
        yield payload
        return
    for half in halves:
        piece = _encoder.encode([batch.ts, half, batch.rank])
        yield from _pieces(piece, _batch.decode(piece))


def _halves(event: dict[str, Any]) -> list[AnyEvent]:
    count = len(event.get("block_hashes", ()))
    return parts(event, [(0, count // 2), (count // 2, count)]) if count > 1 else [event]


class _Sized(msgspec.Struct):
    block_size: int = 0


class _SizedBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Sized]


_sized: Final = msgspec.msgpack.Decoder(_SizedBatch)


def block_size_of(payload: bytes) -> int:
    """Tokens of a block of the first store in a batch; 0 if there is none."""
    return next((event.block_size for event in _sized.decode(payload).events if event.block_size > 0), 0)
