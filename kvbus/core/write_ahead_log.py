"""The write-ahead log's records: what has happened to the relay since the last checkpoint, in the order it happened.

Batches delivered, new epochs, losses, withdrawals, heartbeats, since when a source is partial. Handling the log again
on top of a checkpoint gives the same index, the same numbering and the same journal, because the relay is
deterministic. A record is on its way to the disk before anything that follows from it is sent.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from kvbus.core.sequencing.fingerprints import fingerprint, length

DELIVERED: Final = 0
NEW_EPOCH: Final = 1
LOST: Final = 2
EXPIRED: Final = 3
REANNOUNCED: Final = 4
HEARTBEAT: Final = 5
BEGUN: Final = 6
SNAPSHOT: Final = 7
INCOMPLETE: Final = 8
PARTIAL: Final = 9
CLEARS_EVERY_TIER: Final = 10

Record = tuple[Any, ...]

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[Any]).decode


class StateError(ValueError):
    """Records that are not a state of this relay: another version's, or another configuration's."""


class Frame(NamedTuple):
    """What is written at a time; whoever reads it again has the payloads joined."""

    body: bytes
    payloads: list[bytes]


class Records:
    """What has happened since the last frame. Payloads are kept apart: they are written as they came."""

    __slots__ = ("heads", "payloads")

    def __init__(self) -> None:
        self.heads: list[Record] = []
        self.payloads: list[bytes] = []

    def delivered(self, i: int, seq: int, topic: bytes, payload: bytes, known: int) -> None:
        """A batch of source ``i``; ``known`` is its payload's fingerprint."""
        self.heads.append((DELIVERED, i, seq, topic, known))
        self.payloads.append(payload)

    def take(self) -> Frame:
        """All of them, as they are written; from now on there are none."""
        frame = Frame(_encode(self.heads), self.payloads)
        self.heads, self.payloads = [], []
        return frame


def decode_records(body: bytes, payloads: bytes) -> list[list[Any]] | None:
    """The records a frame was made of, payloads in place of their fingerprints; None if one is not what it was.

    Raises:
        StateError: they are no records.
    """
    records = decoded(body)
    at = 0
    for record in records:
        if not isinstance(record, list) or not record:
            raise StateError(f"no record: {record!r}")
        if record[0] == DELIVERED:
            known = record[-1]
            end = at + length(known)
            record[-1], at = payloads[at:end], end
            if fingerprint(record[-1]) != known:
                return None
    return records if at == len(payloads) else None


def decoded(body: bytes) -> list[Any]:
    """One MessagePack array.

    Raises:
        StateError: it is none.
    """
    try:
        return _decode(body)
    except msgspec.DecodeError as error:
        raise StateError(str(error)) from error
