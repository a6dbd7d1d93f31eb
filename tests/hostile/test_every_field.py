"""Tests with wrong values in every field of every event, in every dialect.

kvbus relays the event correctly or counts it. The tests decode kvbus's output with the types of the strictest routers,
which drop a batch for one bad value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
import pytest

from kvbus.core.commands import Publish
from kvbus.core.events import BatchReceived
from kvbus.core.types import Filtered
from kvbus.tools.sim.dialects import DIALECTS, Dialect
from tests.core.dsl import Script
from tests.doubles.payloads import pack, payload
from tests.long import LONG

# -- types of routers --------------------------------------------------------------------------------------------------

U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
I32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Name = int | Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]
Names = Annotated[list[Name], msgspec.Meta(min_length=1)]
Keys = list[list[Any] | None] | None
"""Type of ``extra_keys`` in Dynamo: an optional list of optional lists.

The other types are also Dynamo's: hashes are i64 or u64, other numbers u32, and texts optional strings. SMG has i64
instead of u64.
"""


class Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    """The type with which a strict router decodes a BlockStored event that is a map."""

    block_hashes: Names
    parent_block_hash: Name | None
    token_ids: Any
    block_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    lora_id: U63 | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Keys = None
    group_idx: U32 | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: U32 | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    lookahead_token_ids: list[list[U32]] | None = None


class Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    """The type with which a strict router decodes a BlockRemoved event that is a map."""

    block_hashes: Names
    medium: str | None = None
    group_idx: U32 | None = None


class Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", forbid_unknown_fields=True):
    """The type with which a strict router decodes an AllBlocksCleared event that is a map."""


class StoredArray(msgspec.Struct, array_like=True, tag="BlockStored", forbid_unknown_fields=True):
    """The type with which a strict router decodes a BlockStored event that is an array."""

    block_hashes: Names
    parent_block_hash: Name | None
    token_ids: Any
    block_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    lora_id: U63 | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Keys = None
    group_idx: U32 | None = None


class RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved", forbid_unknown_fields=True):
    """The type with which a strict router decodes a BlockRemoved event that is an array."""

    block_hashes: Names
    medium: str | None = None
    group_idx: U32 | None = None


class ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared", forbid_unknown_fields=True):
    """The type with which a strict router decodes an AllBlocksCleared event that is an array."""


_maps = msgspec.msgpack.Decoder(tuple[float, list[Stored | Removed | Cleared], I32]).decode
_arrays = msgspec.msgpack.Decoder(tuple[float, list[StoredArray | RemovedArray | ClearedArray], I32]).decode
PROFILES: Final = ("vllm", "dynamo", "llm-d-sglang", "mooncake")
"""Names of output profiles whose encodings differ.

They send unchanged maps, maps with changed values, arrays, and maps without groups.
"""


def read_by_a_router(profile: str, published: bytes) -> list[Any]:
    """Return the events of a batch, decoded as a router decodes them that accepts only these types."""
    _, events, _ = _arrays(published) if profile == "llm-d-sglang" else _maps(published)
    for event in events:
        if isinstance(event, Stored | StoredArray):
            count = len(event.block_hashes)
            assert len(event.token_ids) == count * event.block_size or (profile == "vllm" and not event.token_ids)
            for token in event.token_ids:
                pair = token if isinstance(token, list) else [token, 0]
                assert len(pair) == 2
                assert all(type(each) is int and 0 <= each < 2**32 for each in pair)
            assert len(event.extra_keys or ()) in {0, count}
            for key in (key for keys in event.extra_keys or () for key in keys or ()):
                one = not isinstance(key, list)
                assert isinstance(key, str | bytes | int | float) if one else list(map(type, key)) == [str, int]
            if isinstance(event, Stored):
                assert len(event.lookahead_token_ids or ()) in {0, count}
    return events


# -- events of engines -------------------------------------------------------------------------------------------------

NOTICED: Final = (Filtered.ORPHAN_PASSED, Filtered.OTHER_RANK, Filtered.ODD_FIELD, Filtered.HASH_ONLY)
"""Reasons that kvbus counts for an event although it relays the event."""
PER_BLOCK: Final = (Filtered.COPY, Filtered.UNKNOWN_BLOCK)
MISSING: Final = object()
NOT_UTF8: Final = msgspec.Raw(b"\xa1\xff")
DEEP: Final = msgspec.Raw(b"\x91" * 5000 + b"\xc0")
VALUES: Final[tuple[Any, ...]] = (
    *(MISSING, NOT_UTF8, DEEP, None, True, 1.5, float("nan"), "", "text", "gpu", "?", b"", b"bytes", b"x" * 65),
    *(0, 1, -1, -5, 127, 2**31, 2**32 - 1, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *([], [None], [[]], [1], [-1], [2**32], ["x"], [b"x"], [1.5], [True], [[1, 2]], [["x"], None], [[None], None]),
    *([["x", 3], None], [["x"], ["x"], ["x"]], [["x", ["y"]], None], [[["y", 1]], [["y", "z"]]], [[1], [-1]], [1, 1]),
    *([1, b"x"], [1, 3], [[1, 2]] * 32, [[1, 2, 3]] * 32, [[1, -1]] * 32, [7] * 31, [7] * 31 + ["x"], [[7]] * 32),
    *({}, {"a": 1}, {1: 2}, {"cache_salt": "x"}, {"cache_salt": 5}, msgspec.msgpack.Ext(1, b"x")),
)
STORED: Final[dict[str, Any]] = {
    "block_hashes": [100, 101],
    "parent_block_hash": 1,
    "token_ids": list(range(32)),
    "block_size": 16,
    "lora_id": 7,
    "medium": "GPU",
    "lora_name": "x",
    "extra_keys": [["x"], None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": None,
    "locality": "LOCAL",
    "ownership": "framework",
    "session_id": "session",
    "cache_salt": "salt",
    "lookahead_token_ids": [[1], [2]],
}
REMOVED: Final[dict[str, Any]] = STORED | {"block_hashes": [2]}


def event_of(dialect: Dialect, tag: Any, fields: dict[str, Any]) -> Any:
    """Return an event in the form of a dialect. An array ends at the first missing field."""
    names = {"BlockStored": dialect.stored, "BlockRemoved": dialect.removed}.get(fields.pop("?", tag), ())
    if dialect.maps:
        kept = {name: fields[name] for name in names if fields[name] is not MISSING}
        return kept if tag is MISSING else {"type": tag, **kept}
    values = [] if tag is MISSING else [tag, *(fields[name] for name in names)]
    return values[: values.index(MISSING)] if MISSING in values else values


def begun(dialect: Dialect, *, settled: bool) -> Script:
    """Return a relay that knows blocks 1 and 2.

    If ``settled``, it has also learned the block size from enough events.
    """
    script = Script(profiles=PROFILES)
    chain = [(1, 2), *((10 * n, 10 * n + 1) for n in range(1, 7 if settled else 1))]
    for seq, pair in enumerate(chain):
        stored = {**STORED, "block_hashes": list(pair), "parent_block_hash": None, "lookahead_token_ids": None}
        script.relay.handle(
            BatchReceived(0, [b"", seq.to_bytes(8, "big"), payload(event_of(dialect, "BlockStored", stored))]), 1.0
        )
    assert not script.stats.rejected
    return script


def check(script: Script, sent: bytes, what: Any) -> None:
    """Relay a batch in which one value, of an event or of the batch around it, is wrong or unusual.

    Check that routers can decode the result, or that kvbus counts one reason.
    """
    stats = script.stats
    seq = script.source.sequencer.next
    commands = script.relay.handle(BatchReceived(0, [b"", seq.to_bytes(8, "big"), sent]), 2.0)
    published = {
        name: [c.payload for c in commands if isinstance(c, Publish) and c.output == at]
        for at, name in enumerate(PROFILES)
    }
    try:
        left = {
            name: [e for each in payloads for e in read_by_a_router(name, each)] for name, payloads in published.items()
        }
    except (msgspec.DecodeError, AssertionError) as error:
        raise AssertionError(f"{what}: leaves, and a router loses the batch: {error}") from error
    counted = {str(reason): n for reason, n in (*stats.rejected.items(), *stats.filtered.items()) if n}
    noticed = [counted.pop(reason, 0) for reason in NOTICED]
    assert max(noticed) <= 1, f"{what}: {noticed}"
    blocks = sum(counted.pop(reason, 0) for reason in PER_BLOCK)
    if left["vllm"]:
        assert not counted, f"{what}: leaves, and is counted: {counted}"
    else:
        assert sum(counted.values()) == (not blocks), f"{what}: does not leave, and is counted {counted}"


def odd_events(dialect: Dialect) -> Iterator[tuple[Any, Any]]:
    """Yield each event of a dialect with one changed field, and a description of the change."""
    for tag, base in (("BlockStored", STORED), ("BlockRemoved", REMOVED), ("AllBlocksCleared", {})):
        for value in VALUES:
            yield event_of(dialect, value, {**base, "?": tag}), (dialect.name, tag, "type", value)
        for name in {"BlockStored": dialect.stored, "BlockRemoved": dialect.removed}.get(tag, ()):
            for value in VALUES:
                yield event_of(dialect, tag, {**base, name: value}), (dialect.name, tag, name, value)


CASES: Final = [
    (name, settled)
    for number, name in enumerate(DIALECTS)
    for settled in (False, True)
    if LONG or settled == bool(number % 2)
]


@pytest.mark.parametrize(("name", "settled"), CASES)
def test_an_odd_event_is_relayed_readable_or_counted_once(name: str, settled: bool) -> None:
    dialect = DIALECTS[name]
    wrong = []
    for event, what in odd_events(dialect):
        script = begun(dialect, settled=settled)
        try:
            check(script, payload(event), what)
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def test_an_odd_batch_envelope_is_relayed_readable_or_counted_once() -> None:
    dialect = DIALECTS["vllm-0.33"]
    good = event_of(dialect, "BlockStored", {**STORED})
    wrong = []
    for at, name in enumerate(("ts", "events", "data_parallel_rank")):
        for value in VALUES:
            values: list[Any] = [1.0, [good], 0]
            values[at] = value
            if name == "events" and isinstance(value, list) and len(value) != 1:
                continue  # several odd events are counted separately, and an empty list is a heartbeat
            forms: list[Any] = [values[: values.index(MISSING)] if value is MISSING else values]
            forms.append(
                {
                    key: item
                    for key, item in zip(("ts", "events", "data_parallel_rank"), values, strict=True)
                    if item is not MISSING
                }
            )
            for form in forms:
                try:
                    check(begun(dialect, settled=True), pack(form), (type(form), name, value))
                except AssertionError as error:
                    wrong.append(str(error))
    assert not wrong, "\n".join(wrong)
