"""The records of a log, which hold at most one batch of one stream and are bounded, and the keys of streams.

The module does no I/O. A record is a msgpack array, see :class:`Record`. docs/LOG.md is its specification. A record's
key is the key of its stream, so a broker that orders records by key keeps their order. A block's hash is never a key: a
parent that is stored again could then come after its child.
"""

from __future__ import annotations

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
"""Number of low bits of an epoch that are random. The turn is in the bits above them."""

TURN_BITS: Final = 37
MAX_EVENTS: Final = 128
MAX_BYTES: Final = 512 * 1024
"""Maximum bytes of a record's payload. A single block may be larger, because it cannot be divided."""

LEAST_PACKED: Final = 256
"""Minimum bytes of a state's payload that is packed. In a smaller payload the names of fields do not repeat."""

LEVEL: Final = 1
"""zlib's compression level. A higher level takes up to twice the time, and does not make hashes smaller."""

PREFIX: Final = "kvbus.v1"
EMPTY: Final = "%"
"""The encoding of an empty segment. No other segment is encoded as a single percent sign."""

Epoch = Annotated[int, msgspec.Meta(ge=1, lt=1 << TURN_BITS + RANDOM_BITS)]
Seq = Annotated[int, msgspec.Meta(ge=0, lt=LAST)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Kind(IntEnum):
    """The kind of a record."""

    BATCH = 0
    """A batch of the engine's events."""
    CLEAR = 1
    """The first batch of a state. It begins with AllBlocksCleared. The state's other batches follow, each as a
    STATE."""
    LEASE = 2
    """The writer is alive. A lease has a seq as every record does, so a relay can send a heartbeat for it."""
    GONE = 3
    """The stream is over, and has no blocks left."""
    STATE = 4
    """A further batch of a state."""


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One record.

    No field has a default. Otherwise the checksum of a record with fewer fields would be read as a field.

    Attributes:
        schema: :data:`SCHEMA`.
        kind: one of :class:`Kind`.
        epoch: the writer's turn, followed by random bits. Epochs ascend in a log, and none is used twice.
        seq: a number from 0, dense in an epoch.
        payload: a batch ``[ts, events, rank]`` in msgpack; empty for a lease and for the end of a stream.
        origin: the batch's seq on the writer's own stream. The parts of a divided batch share it.
        block_size: tokens of a block; 0 if the writer does not know it yet.
        more: for a CLEAR or STATE: whether the state continues with the next record.
        resync: for a CLEAR: whether records are missing before it, so that every reader has to apply the state.
            Otherwise a reader that has all records before it has this state already, and may skip it.
        packed: whether the payload is in zlib's format. :func:`read` has unpacked it.
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
    """A record has a schema that this version does not read."""


class Stream(NamedTuple):
    """The worker and the rank whose batches a stream has.

    The names may contain any characters.
    """

    cluster: str
    model: str
    worker: str
    rank: int

    @property
    def key(self) -> str:
        """The key of its records, which is a NATS subject of six tokens: ``kvbus.v1.CLUSTER.MODEL.WORKER.RANK``."""
        return ".".join((PREFIX, *map(_escaped, (self.cluster, self.model, self.worker)), str(self.rank)))

    @classmethod
    def parse(cls, key: str) -> Stream:
        """Return the stream with this key.

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
    """The schema of a record, which is its first field in every version.

    The second element is required, so that a checksum that is the only element is not read as the schema.
    """

    schema: int
    behind: msgspec.Raw


_schema: Final = msgspec.msgpack.Decoder(_Schema)


def write(record: Record) -> bytes:
    """Encode a record for the log.

    A state's payload is packed if that makes it smaller. The last element is the CRC-32 of all bytes before it. So it
    also covers fields that a later version adds.
    """
    if record.kind in (Kind.CLEAR, Kind.STATE) and LEAST_PACKED <= len(record.payload) <= MAX_BYTES:
        packed = zlib.compress(record.payload, LEVEL)
        if len(packed) < len(record.payload):
            record = msgspec.structs.replace(record, payload=packed, packed=True)
    data = bytearray()
    _encoder.encode_into(record, data)
    data[0] += 1  # the checksum is another element of the array
    return bytes(data + CHECK + zlib.crc32(data).to_bytes(4, "big"))


CHECK: Final = b"\xce"
"""The byte before the last four bytes of a record: msgpack's marker of a 32-bit number."""


def read(data: bytes) -> Record:
    """Decode a record of the log.

    Raises:
        DamagedError: the checksum does not match the content.
        SchemaError: the record has another schema.
        ValueError: the data is not a record.
    """
    if data[-5:-4] != CHECK:
        raise ValueError("no record: it ends without a checksum")
    if zlib.crc32(memoryview(data)[:-5]) != int.from_bytes(data[-4:], "big"):
        raise DamagedError("a record whose checksum is not that of its content")
    try:
        schema = _schema.decode(data).schema
        if schema != SCHEMA:  # its fields may be others
            raise SchemaError(f"a record of schema {schema}, and this version reads {SCHEMA}")
        record = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no record: {error}") from None
    return msgspec.structs.replace(record, payload=_unpacked(record.payload), packed=False) if record.packed else record


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
    """A batch whose events are not decoded."""

    ts: float
    events: list[msgspec.Raw]
    rank: int | None = None


_batch: Final = msgspec.msgpack.Decoder(_Batch)
_fields: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
READ: Final = ("type", "block_hashes", "block_size")
"""Fields of an event that a division decodes. It passes on all other fields without decoding them."""


def divided(payload: bytes, events: int) -> list[bytes]:
    """Divide a batch into payloads of records.

    Args:
        payload: the batch as the relay has written it, with events that are maps.
        events: the number of events in the batch, or a larger number.
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
    """Return the number of tokens of a block in a batch's first store; 0 if the batch has none."""
    return next((event.block_size for event in _sized.decode(payload).events if event.block_size > 0), 0)
