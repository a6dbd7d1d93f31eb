"""Tests for event fields that kvbus passes on without using them.

Whatever their value, the block stays, and routers get a value that they can read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from kvbus.client import Worker
from kvbus.client.feed import Feed
from kvbus.client.prefix_index import PrefixIndex
from kvbus.client.view import BlockView
from kvbus.core.blocks.announce import announce
from kvbus.core.outputs.spec import Rights
from kvbus.core.outputs.view import TenantIndex
from kvbus.core.stats import NumberingStats
from kvbus.core.wire.carried import TYPED, as_text, set_aside
from kvbus.core.wire.codec import decode
from kvbus.core.wire.profiles import PROFILES, encode
from kvbus.core.wire.schema import CARRIED, Batch, BlockStored
from tests.core.dsl import Bench
from tests.doubles.payloads import pack, payload, plain_all, removed, store, tokens_of, unpack
from tests.typed import well_formed

ODD: dict[str, Any] = {
    "dict": {"a": 1},
    "list": [1, "a"],
    "int": 7,
    "negative": -7,
    "float": 1.5,
    "bytes": b"\x00\xff",
    "nested": [{"type": "image", "keys": [[1], {"b": None}]}, None],
    "null inside": [[None], None],
    "too short": [None],
    "numbers": [[-1], [2**40]],
}
WELL_FORMED = {("extra_keys", "numbers"), ("kv_cache_spec_sliding_window", "int")}
CASES = [
    pytest.param(name, value, id=f"{name}-{kind}")
    for name in (*CARRIED, *TYPED)
    for kind, value in ODD.items()
    if (name, kind) not in WELL_FORMED
]


def readable_by_rust(name: str, value: Any, count: int) -> bool:
    """Return whether Dynamo's decoder accepts a field. It is the strictest decoder: each of its fields has one type."""
    if value is None:
        return True
    if name == "extra_keys":
        return len(value) in (0, count) and all(
            entry is None or all(isinstance(key, str | bytes | int | float) for key in entry) for entry in value
        )
    if name == "lookahead_token_ids":
        return len(value) in (0, count) and all(0 <= token < 2**32 for entry in value for token in entry)
    return isinstance(value, int) if name == "kv_cache_spec_sliding_window" else isinstance(value, str)


def sent(profile: str, events: Any) -> Iterator[dict[str, Any]]:
    for event in unpack(encode(PROFILES[profile].wire, events, 1.0, 0))[1]:
        names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
        yield event if isinstance(event, dict) else dict(zip((*names, "lora_name", "extra_keys"), event, strict=False))


@pytest.mark.parametrize(("name", "value"), CASES)
def test_an_odd_field_value_is_relayed_and_counted(name: str, value: Any) -> None:
    bench = Bench()
    raw = payload(store([1, 2], group=0, **{name: value}), store([3], 2, group=0))
    batch = decode(raw)
    assert isinstance(batch, Batch)
    events = bench.normalizer.apply(batch)
    assert bench.rejected == {}
    assert bench.filtered == {"odd_field": 1}
    assert batch.unknown == {f"value of {name}"}
    assert [event.get(name) for event in plain_all(events)] == [value, None]
    assert {block for table in bench.normalizer.index.tables.values() for block in table.blocks} == {1, 2, 3}
    assert plain_all(bench.normalizer.announce())[0][name] == value
    for profile in PROFILES:
        for event in sent(profile, events):
            if profile != "vllm" and name in event:
                assert readable_by_rust(name, event[name], len(event["block_hashes"])), (profile, event)


@pytest.mark.parametrize(("name", "value"), CASES)
def test_every_reader_holds_the_blocks_with_odd_field_values(name: str, value: Any) -> None:
    first, second, client = Bench(), Bench(), BlockView()
    limited = TenantIndex(Rights(), NumberingStats())
    feed = Feed("a", PrefixIndex[Worker](), copies=False)
    for batch in ([store([1, 2], **{name: value})], [removed([1])]):
        left = first.normalizer.apply(decoded(*batch))
        limited.take(0, left, first.normalizer.index)
        assert second.feed(*left) == plain_all(left)
        client.apply_batch(well_formed(payload(*left)))
        feed.apply(well_formed(payload(*left)))
    assert {block.hash for block in client} == {2}
    assert second.live == {2}
    (state,) = plain_all(announce(limited.index(0)))
    assert state["block_hashes"] == [2]
    assert name in state


@pytest.mark.parametrize("name", ["extra_keys", "cache_salt", "lora_name"])
def test_prompts_with_different_odd_field_values_get_different_hashes(name: str) -> None:
    """Two tenants send the same prompt with different values of the field ``name``, of a type that kvbus does not
    expect.

    kvbus divides the blocks into sub-blocks. Their hashes must differ between the tenants, and from the hashes without
    such a value.
    """
    names = set()
    for value in (None, {"tenant": 1}, {"tenant": 2}):
        bench = Bench(block_size=16)
        carried = {} if value is None else {name: [[value]] if name == "extra_keys" else value}
        (event,) = bench.feed(store([1], block_size=32, tokens=tokens_of(5, 32), **carried))
        names.add(tuple(event["block_hashes"]))
        index = PrefixIndex[str]()
        batch = Bench().normalizer.apply(decoded(store([1], tokens=tokens_of(5), **carried)))
        index.apply("w", batch[0])
        assert index.longest_prefix(tokens_of(5)) == ({"w": 1} if value is None else {})
        assert index.holds("w", 1)
    assert len(names) == 3


def decoded(*events: Any) -> Batch:
    batch = decode(payload(*events))
    assert isinstance(batch, Batch)
    return batch


def test_an_odd_list_is_divided_with_its_blocks() -> None:
    bench = Bench()
    keys = [[{"a": 1}], [{"b": 2}], None]
    bench.feed(store([1, 2, 3], extra_keys=keys, lookahead_token_ids=[[-1], [-2], [-3]]))
    bench.feed(removed([1]))
    (event,) = plain_all(bench.normalizer.announce())
    assert (event["block_hashes"], event["extra_keys"]) == ([2, 3], keys[1:])
    assert event["lookahead_token_ids"] == [[-2], [-3]]


def test_an_undecodable_field_value_is_sent_as_a_text() -> None:
    """kvbus sends a text in place of bytes that cannot be decoded, because a router would drop the complete batch."""
    bench = Bench()
    bad = b"\xa2\xff\xff"
    raw = payload(store([1], session_id="SALT")).replace(pack("SALT"), bad)
    (event,) = bench.feed(raw=raw)
    assert event["session_id"] == as_text(bad)
    assert bench.filtered == {"odd_field": 1}


def test_the_adapter_of_a_positional_event_may_have_any_type() -> None:
    bench = Bench()
    array = ["BlockStored", [1], None, tokens_of(1), 16, None, "GPU"]
    left = [*bench.feed([*array, {"x": 1}]), *bench.feed([*array[:1], [2], *array[2:], 7])]
    assert [event["lora_name"] for event in left] == [as_text({"x": 1}), 7]
    assert bench.rejected == {}


def test_different_odd_values_become_different_texts() -> None:
    values = [*ODD.values(), "a", b"a", ["a"], {"a": "a"}, True, 1, 1.0]
    assert len({as_text(value) for value in values}) == len(values)
    assert msgspec.msgpack.decode(bytes.fromhex(as_text({"a": 1}).removeprefix("msgpack:"))) == {"a": 1}


def odd_fields(event: dict[str, Any]) -> list[str]:
    (decoded,) = well_formed(payload(event)).events
    assert isinstance(decoded, BlockStored)
    return list(set_aside(decoded))


@pytest.mark.parametrize("raw", [b"\xa1\xff", b"\x81\x80\x01", b"\x91\xa1\xff"], ids=["text", "key", "text inside"])
@pytest.mark.parametrize("name", CARRIED)
def test_a_carried_field_with_invalid_msgpack_is_odd(name: Any, raw: Any) -> None:
    assert odd_fields(store([1]) | {name: Raw(raw)})


@pytest.mark.parametrize("keys", [[None], [1], ["a"], [None] * 3, [[None], None], [[["y", "z"]], None], [{}, None]])
def test_extra_keys_without_an_entry_for_each_block_are_odd(keys: Any) -> None:
    assert odd_fields(store([1, 2], extra_keys=keys))


@pytest.mark.parametrize(
    ("ahead", "good"), [([[1], []], True), ([], True), ([[1]], False), ([1, 2], False), (5, False)]
)
def test_lookahead_tokens_without_a_list_for_each_block_are_odd(ahead: Any, good: Any) -> None:
    assert (odd_fields(store([1, 2], lookahead_token_ids=ahead)) == []) is good


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, True, None])
def test_an_invalid_lookahead_token_is_odd(token: Any) -> None:
    assert odd_fields(store([1], lookahead_token_ids=[[token]]))
