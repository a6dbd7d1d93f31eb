"""Records for tests."""

from typing import Any

from kvbus.log.record import SCHEMA, Kind, Record, write
from tests.doubles.payloads import cleared, payload, store


def record(kind: Kind, epoch: int, seq: int, **fields: Any) -> bytes:
    return write(Record(SCHEMA, kind, epoch, seq, **fields))


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
