"""Events to bytes: what was decoded leaves unchanged, in maps and by position."""

from msgspec import Raw

from kvbus.core.wire.encoding import decode_value, encode_batch, encode_positional_batch, encode_value, with_extras
from tests.doubles.payloads import cleared, pack, payload, plain_all, removed, store, tokens_of, unpack
from tests.typed import well_formed

GOOD = store([1, 2])


def decoded(*events, **envelope):
    return well_formed(payload(*events, **envelope))


def test_unknown_fields_are_sent_on_in_maps():
    batch = decoded(GOOD | {"novelty": [1]})
    event = with_extras(batch.events[0], batch.extras[0])
    assert plain_all(unpack(encode_batch([event], 1.0, 0))[1]) == plain_all([GOOD | {"novelty": [1]}])


def test_by_position_there_is_no_place_for_unknown_fields():
    batch = decoded(GOOD | {"novelty": [1]})
    event = with_extras(batch.events[0], batch.extras[0])
    assert unpack(encode_positional_batch([event], 1.0, 0))[1] == [
        ["BlockStored", [1, 2], None, GOOD["token_ids"], 16, None, "GPU"]
    ]


def test_a_round_trip_changes_nothing():
    events = [
        GOOD | {"lora_id": 5, "lora_name": "a", "extra_keys": [None, ["x", b"y"]], "cache_salt": "s"},
        store([b"a" * 32], b"b" * 32, group=2, kv_cache_spec_kind="mla_attention", kv_cache_spec_sliding_window=4),
        store([-1], 2**64 - 1, tokens=[[1, 2]] * 16, locality="x", ownership={"a": 1}, lookahead_token_ids=[9]),
        removed([1, -1], medium="CPU", group=1, locality="x"),
        cleared(),
    ]
    batch = decoded(*events, ts=12.5, rank=3)
    again = well_formed(encode_batch(batch.events, batch.ts, batch.rank))
    assert plain_all(again.events) == plain_all(events)
    assert (again.ts, again.rank) == (12.5, 3)


def test_a_token_array_is_passed_byte_for_byte():
    tokens = b"\xdd" + (16).to_bytes(4, "big") + b"".join(b"\xce" + t.to_bytes(4, "big") for t in tokens_of(1))
    batch = decoded(store([1]) | {"token_ids": Raw(tokens)})
    assert tokens in encode_batch(batch.events, 1.0, 0)


def test_by_position_groups_come_last_and_only_where_there_are_any():
    batch = decoded(store([1], group=3), removed([1], group=3), removed([1]), cleared())
    stored, *others = unpack(encode_positional_batch(batch.events, 1.0, 0))[1]
    assert stored[:2] == ["BlockStored", [1]]
    assert stored[6:] == ["GPU", None, None, 3]
    assert others == [["BlockRemoved", [1], "GPU", 3], ["BlockRemoved", [1], "GPU"], ["AllBlocksCleared"]]


def test_values_go_there_and_back():
    for value in (None, 5, ["a", b"b", {"c": [1.5]}]):
        assert decode_value(encode_value(value)) == value
        assert bytes(encode_value(value)) == pack(value)
