"""Functions that encode records of a log with arbitrary fields, for tests."""

import zlib
from typing import Any, Final

import msgspec

from kvbus.parts.log.record import CHECK, SCHEMA, Kind, Record, write
from tests.doubles.payloads import cleared, payload, store

PLAIN: Final[dict[str, Any]] = {
    "payload": b"",
    "origin": 0,
    "block_size": 16,
    "more": False,
    "resync": False,
    "packed": False,
}


def record(kind: Kind, epoch: int, seq: int, **fields: Any) -> bytes:
    return write(Record(SCHEMA, kind, epoch, seq, **(PLAIN | fields)))


def checked(*fields: Any) -> bytes:
    """Encode a record with any fields, followed by its checksum."""
    return summed(msgspec.msgpack.encode([*fields, 2**32 - 1])[:-5])


def summed(data: bytes) -> bytes:
    return data + CHECK + zlib.crc32(data).to_bytes(4, "big")


def batch(epoch: int, seq: int, *blocks: int) -> bytes:
    return record(Kind.BATCH, epoch, seq, payload=payload(*(store([block]) for block in blocks)))


def clear(epoch: int, seq: int, *blocks: int, more: bool = False, resync: bool = False) -> bytes:
    state = payload(cleared(), *(store([block]) for block in blocks))
    return record(Kind.CLEAR, epoch, seq, payload=state, more=more, resync=resync)


def state(epoch: int, seq: int, *blocks: int, more: bool = False) -> bytes:
    return record(Kind.STATE, epoch, seq, payload=payload(*(store([block]) for block in blocks)), more=more)


def lease(epoch: int, seq: int) -> bytes:
    return record(Kind.LEASE, epoch, seq)


def gone(epoch: int, seq: int) -> bytes:
    return record(Kind.GONE, epoch, seq)
