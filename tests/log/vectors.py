"""Write the test vectors of docs/spec/log: ``python -m tests.log.vectors``.

A vector has the records of a stream, and the blocks that a reader holds after each record. The blocks are stated here;
they are not computed by a reader.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kvbus.parts.log.record import MAX_BYTES, MAX_EVENTS, SCHEMA, Kind, Stream
from tests.doubles.payloads import cleared, payload, removed, store
from tests.log.records import batch, checked, clear, gone, lease, record, state

DIRECTORY: Final = Path(__file__).parents[2] / "docs" / "spec" / "log"
LARGEST: Final = 2**63 - 1
LAST_EPOCH: Final = 2**53 - 1
LAST_SEQ: Final = 2**26 - 2
FIELDS: Final = ("kind", "epoch", "seq", "payload", "origin", "block_size", "more", "resync")
REFUSED: Final = frozenset({"damaged", "malformed", "other_schema"})


class Step(NamedTuple):
    """A step of a vector: a record, and what a reader holds after it.

    If the record is None, no record came until ``at`` seconds.
    """

    record: bytes | None
    holds: str
    epoch: int
    next: int
    view: tuple[int, ...]
    at: float
    counted: dict[str, int]


def step(
    data: bytes | None, holds: str, position: tuple[int, int], *view: int, at: float = 0.0, **counted: int
) -> Step:
    """Return a step of a vector.

    Args:
        data: the record that arrives; None if no record arrives until ``at``.
        holds: which blocks the reader has after the step: ``nothing``, ``part`` of a state, ``all`` or ``former``.
        position: the epoch and the next seq after the step.
        view: the hashes of the reader's blocks after the step.
        at: the time of the step, in seconds.
        counted: the numbers of records that the reader drops in this step, by reason.
    """
    return Step(data, holds, *position, view, at, counted)


def fields_of(data: bytes) -> dict[str, Any]:
    """Return the fields of a valid record by name, decoded without kvbus's code.

    The payload is replaced by its unpacked size in bytes.
    """
    _, *values, packed = msgspec.msgpack.decode(data)[:10]
    values[3] = len(zlib.decompress(values[3]) if packed else values[3])
    return dict(zip(FIELDS, values, strict=True))


def written(title: str, steps: list[Step]) -> dict[str, Any]:
    """Return a test vector as its file contains it."""
    return {"title": title, "steps": [_written(each) for each in steps]}


def _written(each: Step) -> dict[str, Any]:
    good = each.record is not None and not REFUSED & each.counted.keys()
    return {
        "at": each.at,
        "record": each.record if each.record is None else each.record.hex(),
        "fields": fields_of(each.record) if each.record is not None and good else None,
        "counted": each.counted,
        "holds": each.holds,
        "epoch": each.epoch,
        "next": each.next,
        "view": [{"group": None, "medium": "GPU", "hash": block} for block in each.view],
    }


# -- records -----------------------------------------------------------------------------------------------------------


def squeezed(data: bytes) -> bytes:
    """Compress data in zlib's format, with run-length encoding (``Z_RLE``).

    The result is then the same in all versions of zlib.
    """
    packing = zlib.compressobj(9, zlib.DEFLATED, 15, 8, zlib.Z_RLE)
    return packing.compress(data) + packing.flush()


def packed(kind: Kind, epoch: int, seq: int, payload: bytes, *, more: bool = False) -> bytes:
    return checked(SCHEMA, kind, epoch, seq, payload, 0, 16, more, False, True)


def of_size(size: int) -> bytes:
    """Return a batch of ``size`` bytes: one block with the number of tokens that fills it."""
    tokens = size - len(payload(store([1], tokens=[0] * 70_000, block_size=70_000))) + 70_000
    return payload(store([1], tokens=[0] * tokens, block_size=tokens))


EVENTS: Final = payload(*(event for n in range(MAX_EVENTS // 2) for event in (removed([n + 1]), store([n + 2]))))
"""A batch with as many events as a record may have. After it only the block that it stores last is live."""

GOOD: Final = [SCHEMA, Kind.BATCH, 1, 1, payload(store([2])), 0, 16, False, False, False]


NO_BYTES: Final[tuple[Any, ...]] = ("text", 0, None, [])


def other(at: int, value: Any) -> bytes:
    """Return a good record in which one field has another value."""
    return checked(*GOOD[:at], value, *GOOD[at + 1 :])


def damaged(data: bytes) -> bytes:
    return data[:30] + bytes([data[30] ^ 1]) + data[31:]


def refused(*wrong: bytes, **counted: int) -> list[Step]:
    """Return a vector's steps in which a reader refuses all records except the first and the last.

    The refused records change nothing. At the last record the reader notices that records are missing. ``counted``
    are the numbers of each refused record by reason, by default one ``malformed`` record.
    """
    steps = [step(clear(1, 0, 1), "all", (1, 1), 1)]
    steps += [step(each, "all", (1, 1), 1, **(counted or {"malformed": 1})) for each in wrong]
    return [*steps, step(batch(1, 2, 3), "nothing", (1, 3), lost=1, unusable=1)]


def _numbers() -> list[Step]:
    last = {"block_size": LARGEST, "origin": LARGEST}
    return [
        step(record(Kind.CLEAR, LAST_EPOCH, LAST_SEQ - 1, payload=payload(cleared())), "all", (LAST_EPOCH, LAST_SEQ)),
        step(
            record(Kind.BATCH, LAST_EPOCH, LAST_SEQ, payload=payload(store([1])), **last),
            "all",
            (LAST_EPOCH, LAST_SEQ + 1),
            1,
        ),
    ]


LOGS: Final[dict[str, tuple[str, list[Step]]]] = {
    "kinds": (
        "A state of two records, a store, a removal, no event with flags that say nothing of a batch, a lease, the end",
        [
            step(clear(1, 0, 1, more=True), "part", (1, 1), 1),
            step(state(1, 1, 2), "all", (1, 2), 1, 2),
            step(record(Kind.BATCH, 1, 2, payload=payload(store([3])), origin=7), "all", (1, 3), 1, 2, 3),
            step(record(Kind.BATCH, 1, 3, payload=payload(removed([1])), origin=8), "all", (1, 4), 2, 3),
            step(record(Kind.BATCH, 1, 4, payload=payload(), more=True, resync=True), "all", (1, 5), 2, 3),
            step(lease(1, 5), "all", (1, 6), 2, 3),
            step(gone(1, 6), "nothing", (1, 7)),
        ],
    ),
    "packed": (
        "A state whose payloads are packed, one of the largest size, one of the most events",
        [
            step(packed(Kind.CLEAR, 1, 0, squeezed(payload(cleared(), store([800]))), more=True), "part", (1, 1), 800),
            step(packed(Kind.STATE, 1, 1, squeezed(of_size(MAX_BYTES)), more=True), "part", (1, 2), 1, 800),
            step(packed(Kind.STATE, 1, 2, squeezed(EVENTS)), "all", (1, 3), 800, MAX_EVENTS // 2 + 1),
        ],
    ),
    "packed-wrong": (
        "A byte more than a payload may have unpacked; cut off; more behind it; not packed; nothing",
        refused(
            packed(Kind.STATE, 1, 1, squeezed(of_size(MAX_BYTES + 1))),
            packed(Kind.STATE, 1, 1, squeezed(payload(store([2])))[:-1]),
            packed(Kind.STATE, 1, 1, squeezed(payload(store([2]))) + b"\0"),
            packed(Kind.STATE, 1, 1, payload(store([2]))),
            packed(Kind.STATE, 1, 1, b""),
        ),
    ),
    "largest-numbers": ("The largest epoch and seq, an origin and a block size of 63 bits", _numbers()),
    "damaged": ("Another bit: the record is missing", refused(damaged(batch(1, 1, 2)), damaged=1)),
    "truncated": (
        "Records that end too early",
        refused(*(batch(1, 1, 2)[:end] for end in (0, 1, 4, 5, 30, -5, -1))),
    ),
    "later-kind": ("Another kind", refused(other(1, 5))),
    "later-schema": (
        "Another schema: the first field says so, whatever the others are",
        refused(
            other(0, SCHEMA + 1),
            other(0, SCHEMA - 1),
            other(0, 0),
            checked(SCHEMA + 1),
            checked(SCHEMA + 1, {"epoch": 1, "seq": 1}, None),
            other_schema=1,
        ),
    ),
    "later-fields": (
        "Fields before the checksum that a later version has added",
        [
            step(clear(1, 0, 1), "all", (1, 1), 1),
            step(checked(*GOOD, "more", 5, {"a": [None]}), "all", (1, 2), 1, 2),
            step(checked(*GOOD[:3], 2, *GOOD[4:], *range(9)), "all", (1, 3), 1, 2),
        ],
    ),
    "fields-missing": (
        "Fewer fields than a record has: the checksum is none of them",
        refused(*(checked(*GOOD[:count]) for count in range(len(GOOD)))),
    ),
    "other-types": (
        "Fields of other types, numbers out of range, no array",
        refused(
            *(other(at, value) for at in (1, 2, 3, 5, 6) for value in (-1, 2**63, 1.0, "1", None, True)),
            *(other(2, value) for value in (0, LAST_EPOCH + 1)),
            other(3, LAST_SEQ + 1),
            *(other(4, value) for value in NO_BYTES),
            *(other(at, value) for at in (7, 8, 9) for value in (0, None)),
        ),
    ),
    "duplicates": (
        "Records that were appended twice",
        [
            step(clear(1, 0, 1), "all", (1, 1), 1),
            step(batch(1, 1, 2), "all", (1, 2), 1, 2),
            step(batch(1, 1, 2), "all", (1, 2), 1, 2, double=1),
            step(clear(1, 0, 1), "all", (1, 2), 1, 2, double=1),
            step(batch(1, 2, 3), "all", (1, 3), 1, 2, 3),
        ],
    ),
    "hole": (
        "Two records are missing; nothing counts before the next state",
        [
            step(clear(1, 0, 1), "all", (1, 1), 1),
            step(batch(1, 3, 2), "nothing", (1, 4), lost=2, unusable=1),
            step(lease(1, 4), "nothing", (1, 5)),
            step(state(1, 5, 8), "nothing", (1, 6), unusable=1),
            step(clear(1, 6, 4), "all", (1, 7), 4),
            step(batch(1, 7, 5), "all", (1, 8), 4, 5),
        ],
    ),
    "hole-in-a-state": (
        "A record of a state is missing, one before a lease, and one of a state that the reader has",
        [
            step(clear(1, 0, 1, more=True), "part", (1, 1), 1),
            step(state(1, 2, 3), "nothing", (1, 3), lost=1, unusable=1),
            step(clear(1, 3, 4), "all", (1, 4), 4),
            step(lease(1, 5), "nothing", (1, 6), lost=1),
            step(clear(1, 6, 5), "all", (1, 7), 5),
            step(clear(1, 7, 5, more=True), "all", (1, 8), 5, known=1),
            step(state(1, 9, 5), "nothing", (1, 10), lost=1, unusable=1),
        ],
    ),
    "from-the-middle": (
        "Whoever begins in the middle waits for a state and has lost nothing",
        [
            step(batch(3, 70, 1), "nothing", (3, 71), unusable=1),
            step(lease(3, 71), "nothing", (3, 72)),
            step(clear(3, 72, 2), "all", (3, 73), 2),
        ],
    ),
    "lower-epoch": (
        "What a fenced writer still says",
        [
            step(clear(2, 0, 1), "all", (2, 1), 1),
            step(clear(1, 0, 2), "all", (2, 1), 1, old_epoch=1),
            step(batch(1, 1, 3), "all", (2, 1), 1, at=29.5, old_epoch=1),
            step(gone(1, 2), "all", (2, 1), 1, at=29.5, old_epoch=1),
            step(batch(2, 1, 4), "all", (2, 2), 1, 4, at=29.5),
        ],
    ),
    "two-epochs": (
        "Another writer: what was known stands until its clear, and a seq that does not begin at 0 is a hole",
        [
            step(clear(1, 0, 1), "all", (1, 1), 1),
            step(lease(2, 0), "former", (2, 1), 1),
            step(batch(1, 1, 7), "former", (2, 1), 1, old_epoch=1),
            step(clear(2, 1, 2), "all", (2, 2), 2),
            step(batch(1, 2, 8), "all", (2, 2), 2, old_epoch=1),
            step(lease(4, 0), "former", (4, 1), 2),
            step(batch(4, 1, 9), "nothing", (4, 2), unusable=1),
            step(clear(4, 2, 3), "all", (4, 3), 3),
            step(clear(5, 1, 4), "all", (5, 2), 4, lost=1),
        ],
    ),
    "gone": (
        "The end of a stream, which another writer begins again",
        [
            step(clear(1, 0, 1), "all", (1, 1), 1),
            step(gone(1, 1), "nothing", (1, 2)),
            step(lease(1, 2), "nothing", (1, 3)),
            step(batch(1, 3, 2), "nothing", (1, 4), unusable=1),
            step(lease(2, 0), "nothing", (2, 1)),
            step(clear(2, 1, 3), "all", (2, 2), 3),
            step(gone(3, 0), "nothing", (3, 1)),
        ],
    ),
    "known-state": (
        "States that the reader has, one that everybody has to read, and records of a state without its clear",
        [
            step(clear(1, 0, 1), "all", (1, 1), 1),
            step(batch(1, 1, 2), "all", (1, 2), 1, 2),
            step(clear(1, 2, 1, more=True), "all", (1, 3), 1, 2, known=1),
            step(state(1, 3, 2), "all", (1, 4), 1, 2, known=1),
            step(batch(1, 4, 3), "all", (1, 5), 1, 2, 3),
            step(clear(1, 5, 4, resync=True, more=True), "part", (1, 6), 4),
            step(state(1, 6, 5), "all", (1, 7), 4, 5),
            step(clear(1, 7, 4, more=True), "all", (1, 8), 4, 5, known=1),
            step(batch(1, 8, 6), "all", (1, 9), 4, 5, 6),
            step(state(1, 9, 5), "all", (1, 10), 4, 5, 6, known=1),
            step(state(1, 10, 7), "nothing", (1, 11), unusable=1),
            step(clear(1, 11, 8), "all", (1, 12), 8),
            step(clear(1, 12, 8, more=True), "all", (1, 13), 8, known=1),
            step(state(2, 0, 9), "nothing", (2, 1), unusable=1),
        ],
    ),
    "batch-in-a-state": (
        "A batch inside a state is not believed",
        [
            step(clear(1, 0, 1, more=True), "part", (1, 1), 1),
            step(batch(1, 1, 2), "nothing", (1, 2), unusable=1),
            step(state(1, 2, 3), "nothing", (1, 3), unusable=1),
        ],
    ),
    "silence": (
        "Nothing for 30 s: the stream is void until its next state",
        [
            step(clear(1, 0, 1), "all", (1, 1), 1, at=100.0),
            step(lease(1, 1), "all", (1, 2), 1, at=110.0),
            step(None, "all", (1, 2), 1, at=139.5),
            step(None, "nothing", (1, 2), at=140.0, expired=1),
            step(None, "nothing", (1, 2), at=141.0),
            step(batch(1, 2, 2), "nothing", (1, 3), at=141.0, unusable=1),
            step(clear(1, 3, 3), "all", (1, 4), 3, at=141.0),
        ],
    ),
    "clock-set-back": (
        "The log has lost everything, and the writer's clock was set back: its lower epoch counts after 30 s of silence",
        [
            step(clear(7, 0, 1), "all", (7, 1), 1),
            step(clear(1, 0, 2), "all", (7, 1), 1, at=29.5, old_epoch=1),
            step(batch(1, 1, 3), "nothing", (1, 2), at=30.0, expired=1, clock_set_back=1, unusable=1),
            step(clear(1, 2, 4), "all", (1, 3), 4, at=30.0),
        ],
    ),
    "erased": (
        "A stream that was erased and written anew: its end, and then a later epoch",
        [
            step(clear(7, 0, 1), "all", (7, 1), 1),
            step(gone(8, 0), "nothing", (8, 1)),
            step(gone(8, 0), "nothing", (8, 1), double=1),
            step(clear(9, 0, 2), "all", (9, 1), 2),
        ],
    ),
}
"""Titles and steps of the vectors, by file name.

No record has more than one block, because the result of packing depends on the version of zlib.
"""


# -- keys --------------------------------------------------------------------------------------------------------------

KEYS: Final[dict[str, Stream | None]] = {
    "kvbus.v1.eu-1.meta-llama%2FLlama-3%2E1-8B.10%2E0%2E0%2E7%3A8000%2Fengine.3": Stream(
        "eu-1", "meta-llama/Llama-3.1-8B", "10.0.0.7:8000/engine", 3
    ),
    "kvbus.v1.%.m_~-9.%25.0": Stream("", "m_~-9", "%", 0),
    "kvbus.v1.%C3%A9%E6%A8%A1%F0%9F%A6%99.%2A%3E%20.%00%0A%7F.9999999999": Stream(
        "\u00e9\u6a21\U0001f999", "*> ", "\0\n\x7f", 9_999_999_999
    ),
    "kvbus.v1.e%CC%81.%21%22%23%24%26%27%28%29%2B%2C.%3B%3C%3D%3F%40%5B%5C%5D%5E%60%7B%7C%7D.1": Stream(
        "e\u0301", "!\"#$&'()+,", ";<=?@[\\]^`{|}", 1
    ),
    **dict.fromkeys(
        (
            "",
            "kvbus.v2.a.b.c.0",
            "kvbus.v1.a.b.c",
            "kvbus.v1.a.b.c.0.0",
            "kvbus.v1.a..c.0",
            "kvbus.v1.a.b.c.",
            "kvbus.v1.a.b.c.01",
            "kvbus.v1.a.b.c.-1",
            "kvbus.v1.a.b.c.\u0661",
            "kvbus.v1.a.b.c.10000000000",
            "kvbus.v1.a.b.c.0\n",
            "kvbus.v1.%61.b.c.0",
            "kvbus.v1.%2f.b.c.0",
            "kvbus.v1.a/b.b.c.0",
            "kvbus.v1.%FF.b.c.0",
            "kvbus.v1.%ED%A0%80.b.c.0",
            "kvbus.v1.%2.b.c.0",
            "kvbus.v1.%%.b.c.0",
            "kvbus.v1.\u00e9.b.c.0",
        )
    ),
}
"""Keys of streams in a log, each with the stream that it names; None if it names no stream."""


def files() -> dict[str, dict[str, Any]]:
    """Return the content of each file of test vectors, by the file's name."""
    keys = [{"key": key, "stream": stream and stream._asdict()} for key, stream in KEYS.items()]
    found = {name: written(*log) for name, log in LOGS.items()}
    return found | {"keys": {"title": "Keys and the streams that they name", "keys": keys}}


def text_of(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


if __name__ == "__main__":
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (DIRECTORY / f"{name}.json").write_text(text_of(content))
