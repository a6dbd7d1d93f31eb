"""Run kvbus so that it writes to a log as another version would: ``python -m tests.log.later additive run -c
kvbus.yaml``.

- ``former``: records have the former schema, in which epochs were counted from 1.
- ``additive``: records and pointers have additional fields.
- ``breaking``: records have the next schema, with other fields. This version also reads the present schema.

No such version is released. Each is this code with replaced functions for writing and reading.
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
    """Encode a record of the present schema with additional fields, as a later version might.

    This version ignores them.
    """
    return checked(*msgspec.msgpack.decode(_write(written))[:-1], "later", {"more": [1]})


def pointer_with_more_fields(pointer: contract.Pointer) -> bytes:
    """Encode a pointer with an additional field, as a later version might. This version ignores it."""
    return msgspec.msgpack.encode([*msgspec.structs.astuple(pointer), "later"])


def of_the_former_schema(written: record.Record) -> bytes:
    """Encode a record in the schema before the present one, which the previous version of kvbus wrote."""
    return checked(record.SCHEMA - 1, *msgspec.msgpack.decode(_write(written))[1:-1])


def next_in_count(last: int) -> int:
    """Return the epoch after ``last`` in the former record schema, whose epochs are consecutive numbers."""
    return last + 1


def of_the_next_schema(written: record.Record) -> bytes:
    """Encode a record in an invented next schema, which this version cannot read."""
    _, kind, epoch, seq, *others, _ = msgspec.msgpack.decode(_write(written))
    return checked(NEXT, {"kind": kind, "number": [epoch, seq]}, others)


def of_either_schema(data: bytes) -> record.Record:
    """Decode a record of the present schema or of the next schema."""
    fields: list[Any] = msgspec.msgpack.decode(data)
    if fields[0] != NEXT:
        return _read(data)
    _, named, others, _ = fields
    return _read(checked(record.SCHEMA, named["kind"], *named["number"], *others))


def main() -> None:
    """Run kvbus so that it writes and reads a log as another version would. The first argument names the version.

    ``former`` writes the previous schema, ``additive`` writes more fields, and ``breaking`` writes an invented next
    schema. The functions are replaced before the modules that use them are imported.
    """
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
