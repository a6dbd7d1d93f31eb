"""The write-ahead log's records: the relay's decisions since the last checkpoint, in order.

A record describes a change of indexes, numberings and journals. :mod:`kvbus.core.applying` carries it out. The relay
decides, keeps the record and has it applied. After a restart the records of the log are applied again, on top of a
checkpoint. This gives the same state, because applying is deterministic. A record is handed to the disk before any of
its consequences is sent.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from kvbus.core.sequencing.fingerprints import fingerprint, length


class Delivered(msgspec.Struct, tag=0, array_like=True, gc=False):
    """A batch is the next one of its source.

    On disk, ``payload`` is empty: payloads are written separately, unencoded.
    """

    source: int
    seq: int
    topic: bytes
    fingerprint: int
    payload: bytes = b""


class EpochBegun(msgspec.Struct, tag=1, array_like=True, gc=False):
    """The source's publisher begins a new epoch, under this id: nothing is known about its cache.

    ``partial`` says that a part of the cache cannot be known.
    """

    source: int
    partial: bool
    publisher_id: bytes | None


class BatchesLost(msgspec.Struct, tag=2, array_like=True, gc=False):
    """``count`` batches of the source will never come."""

    source: int
    count: int


class Expired(msgspec.Struct, tag=3, array_like=True, gc=False):
    """The engine was gone for too long. Its blocks are cleared downstream, and kept in case it comes back."""

    source: int


class Reannounced(msgspec.Struct, tag=4, array_like=True, gc=False):
    """An expired engine is back in the same epoch. Its blocks are announced again."""

    source: int


class Heartbeat(msgspec.Struct, tag=5, array_like=True, gc=False):
    """An empty batch is sent on one stream. ``wall`` is its time of day."""

    output: int
    stream: int
    wall: float


class Begun(msgspec.Struct, tag=6, array_like=True, gc=False):
    """The relay started at the time of day ``wall``. A numbering that continues begins with AllBlocksCleared.

    ``slots`` has the number of slots that each output may have had in a previous process, if the output is merged.
    """

    wall: float
    slots: list[int]


class SnapshotTaken(msgspec.Struct, tag=7, array_like=True, gc=False):
    """The publisher's snapshot as of batch ``seq`` replaces the known state of its cache."""

    source: int
    seq: int
    chunks: list[bytes]


class SeqsIncomplete(msgspec.Struct, tag=8, array_like=True, gc=False):
    """The seqs from ``first`` to ``end`` of a stream are not cursors: see :mod:`kvbus.core.outputs.stream`."""

    output: int
    stream: int
    first: int
    end: int


class PartialSince(msgspec.Struct, tag=9, array_like=True, gc=False):
    """The source is partial since this time of day; None: it is not partial."""

    source: int
    wall: float | None


class PublisherKnown(msgspec.Struct, tag=11, array_like=True, gc=False):
    """The id of the source's publisher in its current epoch; None: its batches carry no id."""

    source: int
    publisher_id: bytes | None


class CacheEmptied(msgspec.Struct, tag=13, array_like=True, gc=False):
    """The source's engine holds no blocks any more, but its stream does not say so yet."""

    source: int


class BlocksOutlived(msgspec.Struct, tag=14, array_like=True, gc=False):
    """These blocks (group, medium, hash) have expired, see :mod:`kvbus.core.lifetimes`."""

    source: int
    blocks: list[tuple[int | None, str, int | bytes]]


Record = (
    Delivered
    | EpochBegun
    | BatchesLost
    | Expired
    | Reannounced
    | Heartbeat
    | Begun
    | SnapshotTaken
    | SeqsIncomplete
    | PartialSince
    | PublisherKnown
    | CacheEmptied
    | BlocksOutlived
)

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[Record]).decode


class StateError(ValueError):
    """The records are not a state of this relay, but of another version or another configuration."""


class Frame(NamedTuple):
    """The records of one write. A reader joins the payloads."""

    body: bytes
    payloads: list[bytes]


class Records:
    """The records since the last frame."""

    __slots__ = ("heads",)

    def __init__(self) -> None:
        self.heads: list[Record] = []

    def take(self) -> Frame:
        """Encode and clear the pending records."""
        heads, self.heads = self.heads, []
        payloads = []
        for record in heads:
            if type(record) is Delivered:
                payloads.append(record.payload)
                record.payload = b""
        return Frame(_encode(heads), payloads)


def decode_records(body: bytes, payloads: bytes) -> list[Record] | None:
    """Return the records of a frame; None if a payload is damaged.

    Raises:
        StateError: the body does not hold records.
    """
    try:
        records = _decode(body)
    except msgspec.DecodeError as error:
        raise StateError(f"no records: {error}") from error
    at = 0
    for record in records:
        if type(record) is Delivered:
            end = at + length(record.fingerprint)
            record.payload, at = payloads[at:end], end
            if fingerprint(record.payload) != record.fingerprint:
                return None
    return records if at == len(payloads) else None
