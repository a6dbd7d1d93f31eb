"""kvbus as another version may write to a log: ``python -m tests.log.later additive run -c kvbus.yaml``.

``former``: records are of the former schema, whose epochs were counted from 1. ``additive``: records and pointers have further fields. ``breaking``: records are of the next schema, with other fields,
and this version reads both. Nothing of it is released; it is this tree with its writing and reading replaced.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import msgspec

from kvbus.parts.log import contract, record
from tests.log.records import checked

_write, _read = record.write, record.read
NEXT: Final = record.SCHEMA + 1


def with_more_fields(written: record.Record) -> bytes:
    """A record of this schema, with more in it than this version reads."""
    return checked(*msgspec.msgpack.decode(_write(written))[:-1], "later", {"more": [1]})


def pointer_with_more_fields(pointer: contract.Pointer) -> bytes:
    """A pointer, with more in it than this version reads."""
    return msgspec.msgpack.encode([*msgspec.structs.astuple(pointer), "later"])


def of_the_former_schema(written: record.Record) -> bytes:
    """A record as it was before."""
    return checked(record.SCHEMA - 1, *msgspec.msgpack.decode(_write(written))[1:-1])


def next_in_count(last: int) -> int:
    """An epoch as it was before."""
    return last + 1


def of_the_next_schema(written: record.Record) -> bytes:
    """A record whose fields this version does not know."""
    _, kind, epoch, seq, *others, _ = msgspec.msgpack.decode(_write(written))
    return checked(NEXT, {"kind": kind, "number": [epoch, seq]}, others)


def of_either_schema(data: bytes) -> record.Record:
    """Read a record of this schema or the next."""
    fields: list[Any] = msgspec.msgpack.decode(data)
    if fields[0] != NEXT:
        return _read(data)
    _, named, others, _ = fields
    return _read(checked(record.SCHEMA, named["kind"], *named["number"], *others))


def main() -> None:
    """Replace what differs, and only then import whoever uses it."""
    kind = sys.argv.pop(1)
    replaced: dict[str, dict[str, Any]] = {
        "former": {"write": of_the_former_schema, "next_epoch": next_in_count},
        "additive": {"write": with_more_fields, "write_pointer": pointer_with_more_fields},
        "breaking": {"write": of_the_next_schema, "read": of_either_schema},
    }
    for name, function in replaced[kind].items():
        setattr(contract if hasattr(contract, name) else record, name, function)
    from kvbus.cli import main as kvbus  # noqa: PLC0415

    kvbus()


if __name__ == "__main__":
    main()
