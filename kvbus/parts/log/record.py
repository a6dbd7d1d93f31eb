"""The format of a log's records, and the keys of streams.

A record holds at most one batch of one stream, and its size is limited. It is a msgpack array; see :class:`Record`.
docs/LOG.md is the specification. This module does no I/O.

Each record is appended under the key of its stream, because a broker keeps only records with the same key in order. If
each record had the hash of a block as its key, a reader could get a block before its parent.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import quote, unquote_to_bytes

import msgspec

from kvbus.core.log_relay import LAST
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.encoding import decode_value, parts

SCHEMA: Final = 2
RANDOM_BITS: Final = 16
"""Number of an epoch's low bits that are random. The bits above them number the turns of the stream's writers."""

TURN_BITS: Final = 37
MAX_EVENTS: Final = 128
MAX_BYTES: Final = 512 * 1024
"""Maximum size of a record's payload in bytes.

A payload with a single block may be larger, because it cannot be divided.
"""

LEAST_PACKED: Final = 256
"""Minimum size in bytes of a state's payload that is compressed.

In a smaller payload the names of fields are hardly repeated, so compression saves nothing.
"""

LEVEL: Final = 1
"""zlib's compression level for the payload of a record.

A higher level takes up to twice the time, and saves little, because most of a payload is hashes.
"""

PREFIX: Final = "kvbus.v1"
EMPTY: Final = "%"
"""The text that stands for an empty name in a stream's key. No other name is encoded as a single percent sign."""

Epoch = Annotated[int, msgspec.Meta(ge=1, lt=1 << TURN_BITS + RANDOM_BITS)]
Seq = Annotated[int, msgspec.Meta(ge=0, lt=LAST)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Kind(IntEnum):
    """The kind of a record in a log."""

    BATCH = 0
    """A batch of the engine's events."""
    CLEAR = 1
    """The first batch of a state. Its first event is AllBlocksCleared.

    A state is the live blocks of the stream. Its other batches follow, each in a record of kind STATE.
    """
    LEASE = 2
    """A record without events, which shows that the writer of an idle stream is running.

    Like every record, a lease has a seq. So an aggregator can send its routers a heartbeat with this seq.
    """
    GONE = 3
    """The end of a stream. The stream has no blocks any more."""
    STATE = 4
    """A further batch of a state (the live blocks of the stream), after the CLEAR with which the state begins."""


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One record of a log, decoded.

    A record is encoded as an array, whose last element is its checksum. No field has a default. Otherwise, if an array
    lacked a field, the checksum could be decoded as the value of that field.

    Attributes:
        schema: the version of the format, :data:`SCHEMA`.
        kind: the kind of the record.
        epoch: the number of the writer's turn, followed by random bits. Epochs ascend in a stream, and none is used
            twice.
        seq: the number of the record in its epoch: 0, 1, 2 and so on.
        payload: a batch ``[ts, events, rank]`` in msgpack; empty for a lease and for the end of a stream.
        origin: the batch's seq on the writer's own stream. If a batch is divided into several records, all of them have
            the batch's seq.
        block_size: number of tokens of a block; 0 if the writer does not know it yet.
        more: in a CLEAR or STATE, whether the state continues with the next record.
        resync: in a CLEAR, whether records are missing before it, so that every reader has to apply the state. If it is
            False, a reader that has all earlier records has this state already, and may skip it.
        packed: whether the payload is compressed by zlib. It is False after :func:`read`, which unpacks the payload.
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
    """A record's checksum does not match its content."""


class SchemaError(ValueError):
    """A record has a version of the format that this kvbus does not read."""


class Stream(NamedTuple):
    """The names that identify a stream in a log: the worker and its rank, with their cluster and model.

    The names may contain any characters.
    """

    cluster: str
    model: str
    worker: str
    rank: int

    @property
    def key(self) -> str:
        """The key of the stream's records.

        It is a NATS subject of six tokens: ``kvbus.v1.CLUSTER.MODEL.WORKER.RANK``.
        """
        return ".".join((PREFIX, *map(_escaped, (self.cluster, self.model, self.worker)), str(self.rank)))

    @classmethod
    def parse(cls, key: str) -> Stream:
        """Return the stream with this key.

        Raises:
            ValueError: no stream can have this key.
        """
        found = _KEY.fullmatch(key)
        if found is None:
            raise ValueError(f"{key!r} is not the key of a stream")
        cluster, model, worker, rank = found.groups()
        stream = cls(_unescaped(cluster), _unescaped(model), _unescaped(worker), int(rank))
        if stream.key != key:
            raise ValueError(f"{key!r} is not the key of a stream; the key must be written as {stream.key!r}")
        return stream


_KEY: Final = re.compile(rf"{re.escape(PREFIX)}\.([^.]+)\.([^.]+)\.([^.]+)\.(0|[1-9][0-9]{{0,9}})", re.ASCII)


def _escaped(name: str) -> str:
    return quote(name, safe="").replace(".", "%2E") or EMPTY


def _unescaped(segment: str) -> str:
    return "" if segment == EMPTY else unquote_to_bytes(segment).decode()


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Record)


class _Schema(msgspec.Struct, array_like=True):
    """The first two elements of an encoded record, with which the version of its format is read.

    The schema is the first field in every version of the format, and the checksum is the last element. The second
    element must exist: if a record has one element only, that element is the checksum and must not be read as the
    schema.
    """

    schema: int
    behind: msgspec.Raw


_schema: Final = msgspec.msgpack.Decoder(_Schema)


def write(record: Record) -> bytes:
    """Encode a record for the log, and append its checksum.

    The payload of a state is compressed if that makes it smaller. The checksum is the last element: the CRC-32 of all
    bytes before it. So it also covers fields that a later version of the format adds.
    """
    if record.kind in (Kind.CLEAR, Kind.STATE) and LEAST_PACKED <= len(record.payload) <= MAX_BYTES:
        packed = zlib.compress(record.payload, LEVEL)
        if len(packed) < len(record.payload):
            record = msgspec.structs.replace(record, payload=packed, packed=True)
    data = bytearray()
    _encoder.encode_into(record, data)
    data[0] += 1  # raise msgpack's array length by one, because the checksum is an element of the array, too
    return bytes(data + CHECK + zlib.crc32(data).to_bytes(4, "big"))


CHECK: Final = b"\xce"
"""The byte before a record's checksum: msgpack's marker of a 32-bit number. The checksum is the last four bytes."""


def read(data: bytes) -> Record:
    """Decode a record of the log, and unpack its payload.

    Raises:
        DamagedError: the checksum does not match the content.
        SchemaError: the record has another schema than :data:`SCHEMA`.
        ValueError: the data is not a record.
    """
    if data[-5:-4] != CHECK:
        raise ValueError("not a record: it ends without a checksum")
    if zlib.crc32(memoryview(data)[:-5]) != int.from_bytes(data[-4:], "big"):
        raise DamagedError("the record's checksum does not match its content")
    try:
        schema = _schema.decode(data).schema
        if schema != SCHEMA:  # in another schema, the next fields may have other meanings
            raise SchemaError(f"the record has schema {schema}, and this version reads schema {SCHEMA}")
        record = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a record: {error}") from None
    return msgspec.structs.replace(record, payload=_unpacked(record.payload), packed=False) if record.packed else record


def _unpacked(payload: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        unpacked = unpacking.decompress(payload, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"not a record: {error}") from None
    if not unpacking.eof or unpacking.unused_data:
        raise ValueError(f"not a record: its payload is incomplete, or has more than {MAX_BYTES} bytes")
    return unpacked


class _Batch(msgspec.Struct, array_like=True):
    """A batch whose events are not decoded."""

    ts: float
    events: list[msgspec.Raw]
    rank: int | None = None


_batch: Final = msgspec.msgpack.Decoder(_Batch)
_fields: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
READ: Final = ("type", "block_hashes", "block_size")
"""Fields of an event that :func:`divided` decodes, because it needs their values.

It copies all other fields undecoded.
"""


def divided(payload: bytes, events: int) -> list[bytes]:
    """Divide a batch into smaller payloads, each of which fits into a record.

    :data:`MAX_EVENTS` and :data:`MAX_BYTES` limit a record.

    Args:
        payload: the batch as the relay has encoded it. Its events are maps.
        events: an upper limit of the number of events in the batch.
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
    """Return the number of tokens of a block, from the first store in a batch; 0 if the batch has no store."""
    return next((event.block_size for event in _sized.decode(payload).events if event.block_size > 0), 0)
