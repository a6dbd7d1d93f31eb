"""The write-ahead log's records: what the relay has decided since the last checkpoint, in the order of the decisions.

A record says what happens to indexes, numberings and journals; :mod:`kvbus.core.applying` does it. The relay decides,
keeps the record and has it applied. After a restart the records of the log are applied again, on top of a checkpoint:
that gives the same state, because applying is deterministic. A record is on its way to the disk before anything that
follows from it is sent.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from kvbus.core.sequencing.fingerprints import fingerprint, length


class Delivered(msgspec.Struct, tag=0, array_like=True, gc=False):
    """A batch is the next one of its source. On disk ``payload`` is empty: payloads are written as they came."""

    source: int
    seq: int
    topic: bytes
    fingerprint: int
    payload: bytes = b""


class EpochBegun(msgspec.Struct, tag=1, array_like=True, gc=False):
    """The source's publisher begins anew, under this id: nothing is known of its cache.

    ``partial``: not all of it can be had.
    """

    source: int
    partial: bool
    publisher_id: bytes | None


class BatchesLost(msgspec.Struct, tag=2, array_like=True, gc=False):
    """``count`` batches of the source will never come."""

    source: int
    count: int


class Expired(msgspec.Struct, tag=3, array_like=True, gc=False):
    """The engine was gone for too long: its blocks are cleared downstream, and kept in case it comes back."""

    source: int


class Reannounced(msgspec.Struct, tag=4, array_like=True, gc=False):
    """An engine that had expired is back in the same epoch: its blocks are announced again."""

    source: int


class Heartbeat(msgspec.Struct, tag=5, array_like=True, gc=False):
    """An empty batch on one stream, ``wall`` its time of day."""

    output: int
    stream: int
    wall: float


class Begun(msgspec.Struct, tag=6, array_like=True, gc=False):
    """The relay began at the time of day ``wall``: a numbering that goes on opens with AllBlocksCleared.

    ``slots`` says for each output how many slots it may have had in a former process, where it is merged.
    """

    wall: float
    slots: list[int]


class SnapshotTaken(msgspec.Struct, tag=7, array_like=True, gc=False):
    """The publisher's snapshot as of batch ``seq`` takes the place of what was known of its cache."""

    source: int
    seq: int
    chunks: list[bytes]


class SeqsIncomplete(msgspec.Struct, tag=8, array_like=True, gc=False):
    """The seqs from ``first`` to ``end`` of a stream are no cursor: see :mod:`kvbus.core.outputs.stream`."""

    output: int
    stream: int
    first: int
    end: int


class PartialSince(msgspec.Struct, tag=9, array_like=True, gc=False):
    """The source is partial since this time of day; None: it is not."""

    source: int
    wall: float | None


class PublisherKnown(msgspec.Struct, tag=11, array_like=True, gc=False):
    """The id of the source's publisher, in the epoch it is in; None: its batches carry none."""

    source: int
    publisher_id: bytes | None


class CacheEmptied(msgspec.Struct, tag=13, array_like=True, gc=False):
    """The source's engine holds no block any more, and its stream does not say so yet."""

    source: int


class BlocksOutlived(msgspec.Struct, tag=14, array_like=True, gc=False):
    """These blocks, by group, medium and hash, have expired: :mod:`kvbus.core.lifetimes`."""

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
    """Records that are not a state of this relay: another version's, or another configuration's."""


class Frame(NamedTuple):
    """What is written at a time; whoever reads it again has the payloads joined."""

    body: bytes
    payloads: list[bytes]


class Records:
    """What has happened since the last frame."""

    __slots__ = ("heads",)

    def __init__(self) -> None:
        self.heads: list[Record] = []

    def take(self) -> Frame:
        """All of them, as they are written; from now on there are none."""
        heads, self.heads = self.heads, []
        payloads = []
        for record in heads:
            if type(record) is Delivered:
                payloads.append(record.payload)
                record.payload = b""
        return Frame(_encode(heads), payloads)


def decode_records(body: bytes, payloads: bytes) -> list[Record] | None:
    """The records a frame was made of; None if a payload is not what it was.

    Raises:
        StateError: they are no records.
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
