"""The records of the write-ahead log: the relay's decisions since the last checkpoint, in order.

A record describes a change of indexes, numberings and journals. The relay makes a decision, keeps its record, and has
:mod:`kvbus.core.applying` apply it. After a restart, kvbus loads the checkpoint and applies the log's records
again. The state is then the same, because applying a record is deterministic. The daemon writes a record to the disk
before it sends any batch that the record causes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from kvbus.core.sequencing.fingerprints import fingerprint, length


class Delivered(msgspec.Struct, tag=0, array_like=True, gc=False):
    """The sequencer has delivered the next batch of a source.

    ``payload`` is empty when the record is encoded, because the payloads are written after the records.
    """

    source: int
    seq: int
    topic: bytes
    fingerprint: int
    payload: bytes = b""


class EpochBegun(msgspec.Struct, tag=1, array_like=True, gc=False):
    """The source's publisher has begun a new epoch, so kvbus knows none of the blocks in its cache.

    ``partial`` says that the cache may hold blocks that kvbus cannot learn. ``publisher_id`` is the publisher's new id.
    """

    source: int
    partial: bool
    publisher_id: bytes | None


class BatchesLost(msgspec.Struct, tag=2, array_like=True, gc=False):
    """kvbus has given up ``count`` missing batches of the source."""

    source: int
    count: int


class Expired(msgspec.Struct, tag=3, array_like=True, gc=False):
    """The source's engine was gone for ``source_timeout``.

    Its blocks are cleared at the routers. The index keeps them, in case the engine comes back with the same cache.
    """

    source: int


class Reannounced(msgspec.Struct, tag=4, array_like=True, gc=False):
    """An expired source is connected again, and its engine is in the same epoch. Its blocks are announced again."""

    source: int


class Heartbeat(msgspec.Struct, tag=5, array_like=True, gc=False):
    """kvbus sends an empty batch with this ``ts`` on one stream of an output."""

    output: int
    stream: int
    ts: float


class Begun(msgspec.Struct, tag=6, array_like=True, gc=False):
    """The relay has started without a saved state, at the time of day ``wall``.

    Each stream that continues an earlier numbering begins with AllBlocksCleared. ``slots`` has one number for each
    output: how many sources its merged stream may have had in a previous process; 0 if the output is not merged.
    """

    wall: float
    slots: list[int]


class SnapshotTaken(msgspec.Struct, tag=7, array_like=True, gc=False):
    """A snapshot that the source's publisher has sent replaces the source's known blocks.

    ``seq`` is the last batch that the snapshot includes.
    """

    source: int
    seq: int
    chunks: list[bytes]


class SeqsIncomplete(msgspec.Struct, tag=8, array_like=True, gc=False):
    """A router that has read up to one of the seqs ``[first, end)`` of a stream may hold only a part of a state.

    A replay that begins at one of them begins with the complete state (:mod:`kvbus.core.outputs.stream`).
    """

    output: int
    stream: int
    first: int
    end: int


class PartialSince(msgspec.Struct, tag=9, array_like=True, gc=False):
    """The source has become partial at the time of day ``wall``, or is not partial any more (None).

    The engine of a partial source may hold blocks that kvbus cannot know.
    """

    source: int
    wall: float | None


class PublisherKnown(msgspec.Struct, tag=11, array_like=True, gc=False):
    """The source's publisher has named its id for the current epoch. The id is None if its batches carry no id."""

    source: int
    publisher_id: bytes | None


class CacheEmptied(msgspec.Struct, tag=13, array_like=True, gc=False):
    """The source's engine holds no blocks any more, according to its API. Its stream has not announced this yet."""

    source: int


class BlocksOutlived(msgspec.Struct, tag=14, array_like=True, gc=False):
    """The lifetime of the listed blocks has ended, so kvbus removes them: see :mod:`kvbus.core.lifetimes`.

    Each block is given by its group, medium, locality, owner and hash.
    """

    source: int
    blocks: list[tuple[int | None, str, str | None, str | None, int | bytes]]


class Continued(msgspec.Struct, tag=15, array_like=True, gc=False):
    """The next part of the source's last batch is applied: see :attr:`Normalizer.parts`."""

    source: int


Record = (
    Delivered
    | Continued
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
    """A saved state cannot be used: it is damaged, or it belongs to another version or another configuration."""


class Frame(NamedTuple):
    """The encoded records that are written to the disk together.

    ``payloads`` are the payloads of the batches that the records name, in order.
    """

    body: bytes
    payloads: list[bytes]


class Records:
    """The records for the write-ahead log that were kept since the last write to the disk."""

    __slots__ = ("heads",)

    def __init__(self) -> None:
        self.heads: list[Record] = []

    def take(self) -> Frame:
        """Return the pending records as an encoded frame, and forget them."""
        heads, self.heads = self.heads, []
        payloads = []
        for record in heads:
            if type(record) is Delivered:
                payloads.append(record.payload)
                record.payload = b""
        return Frame(_encode(heads), payloads)


def decode_records(body: bytes, payloads: bytes) -> list[Record] | None:
    """Decode the records of one frame of the write-ahead log, and put the payloads into them.

    Args:
        body: the encoded records.
        payloads: the joined payloads of all batches that the records name.

    Returns:
        The records; None if a payload is damaged.

    Raises:
        StateError: ``body`` does not hold records.
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
