"""Tests for decoding bytes into events: every dialect, and every kind of invalid input."""

import math
import re

import msgspec
import pytest
from msgspec import Raw

from kvbus.core.types import Reason
from kvbus.core.wire import codec
from kvbus.core.wire.codec import MAX_EVENTS, decode, decode_batch
from kvbus.core.wire.dialects import event_offset
from kvbus.core.wire.schema import Batch
from tests.doubles.payloads import cleared, pack, payload, plain_all, removed, store, unpack
from tests.hostile.bad import DEEP as LEVELS
from tests.typed import well_formed

GOOD = store([1, 2])
DEEP = b"\x91" * LEVELS + b"\x01"


def array(event):
    """Return a map event as an array, as vLLM 0.10.2 sends it."""
    names: tuple[str, ...]
    if event["type"] == "BlockStored":
        names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    else:
        names = ("type", "block_hashes", "medium")[: 1 if event["type"] == "AllBlocksCleared" else 3]
    return [event.get(name) for name in names]


def decoded(*events, **envelope):
    return well_formed(payload(*events, **envelope))


class TestDialects:
    @pytest.mark.parametrize("name", ["data_parallel_rank", "attn_dp_rank"])
    def test_a_batch_that_is_a_map_is_decoded(self, name):
        batch = well_formed(pack({"ts": 1.5, "events": [GOOD], name: 3}))
        assert (batch.ts, batch.rank, plain_all(batch.events)) == (1.5, 3, plain_all([GOOD]))

    def test_the_salt_of_sglang_0_5_18_is_decoded(self):
        batch = decoded([*array(GOOD), {"cache_salt": "s"}])
        assert plain_all(batch.events) == plain_all([GOOD | {"cache_salt": "s"}])

    def test_the_adapter_name_of_vllm_0_14_is_decoded(self):
        assert plain_all(decoded([*array(GOOD), "adapter"]).events) == plain_all([GOOD | {"lora_name": "adapter"}])

    def test_additional_elements_of_a_positional_event_are_ignored(self):
        known = [*array(GOOD), None, None, 1, "full_attention", None]
        event = GOOD | {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
        assert plain_all(decoded([*known, "new", {"x": 1}]).events) == plain_all([event])

    @pytest.mark.parametrize("count", [1, 15, 16, 300])
    def test_batches_of_any_length_are_decoded(self, count):
        events = [removed([i]) for i in range(count)]
        assert plain_all(decoded(*events).events) == plain_all(events)
        assert plain_all(decoded(*map(array, events)).events) == plain_all(events)
        big = b"\x93\xcb" + bytes(8) + b"\xdd" + count.to_bytes(4, "big") + b"".join(map(pack, events)) + b"\x00"
        assert plain_all(well_formed(big).events) == plain_all(events)


class TestUnknownFields:
    def test_unknown_fields_are_kept(self):
        batch = decoded(cleared(), GOOD | {"novelty": [1, {"a": b"x"}], "other": None})
        assert batch.rejects == []
        assert {name: unpack(raw) for name, raw in batch.extras[1].items()} == {
            "novelty": [1, {"a": b"x"}],
            "other": None,
        }


class TestUnknownNames:
    def test_unknown_events_and_fields_are_named(self):
        later = [*array(GOOD), *[None] * 20]
        batch = decoded({"type": "Later", "x": 1}, ["Newer"], {"x": 1}, GOOD | {"y": 1}, removed([1], z=1), later)
        assert batch.unknown == {
            "event Later",
            "event Newer",
            "event without a name",
            "field of BlockStored y",
            "field of BlockRemoved z",
            "field of BlockStored number 13",
        }

    def test_a_batch_of_known_fields_reports_no_unknown_names(self):
        assert decoded(GOOD, GOOD | {"block_size": "x"}).unknown == set()

    @pytest.mark.parametrize("name", ["\x1b[31m", "<script>", "a\nb", "\u202e", "x" * 10**5, "", 'a"b', "%s", "{}"])
    def test_a_hostile_name_of_an_unknown_event_is_made_safe(self, name):
        (said,) = decoded({"type": name}).unknown
        assert re.fullmatch(r"event [A-Za-z0-9_. ?-]{1,48}…?", said)

    def test_the_number_of_unknown_names_is_bounded(self):
        assert len(decoded(*({"type": f"E{n}"} for n in range(1000))).unknown) == codec.MAX_UNKNOWN


WRONG = [
    (5, Reason.WRONG_TYPE),
    (None, Reason.WRONG_TYPE),
    ([], Reason.UNKNOWN_EVENT),
    ([5], Reason.UNKNOWN_EVENT),
    (["Nonsense", 1], Reason.UNKNOWN_EVENT),
    ({}, Reason.UNKNOWN_EVENT),
    ({"type": "Nonsense"}, Reason.UNKNOWN_EVENT),
    ({"type": 5}, Reason.UNKNOWN_EVENT),
    ({"type": None, "block_hashes": [1]}, Reason.UNKNOWN_EVENT),
    ({"type": "BlockRemoved"}, Reason.MISSING_FIELD),
    (["BlockRemoved"], Reason.MISSING_FIELD),
    (["BlockStored"], Reason.MISSING_FIELD),
    (["BlockStored", [1], None, [1]], Reason.MISSING_FIELD),
    (["BlockStored", [1], None, [1], "16"], Reason.WRONG_TYPE),
    (["BlockRemoved", ["1"]], Reason.HASH_KIND),
    (["BlockRemoved", [1], 5], Reason.WRONG_TYPE),
]


def wrong_types():
    """Yield events with a field of a wrong type, for every field and type, each with the expected reason."""
    for value in ("1", 1.0, True, None, [1], {"a": 1}):
        yield GOOD | {"block_hashes": [value, 2]}, Reason.HASH_KIND
        yield removed([1, value]), Reason.HASH_KIND
        if not isinstance(value, list):
            yield GOOD | {"block_hashes": value}, Reason.WRONG_TYPE
            yield removed([1]) | {"block_hashes": value}, Reason.WRONG_TYPE
        yield GOOD | {"block_size": value}, Reason.WRONG_TYPE
        if value is None:
            continue
        yield GOOD | {"parent_block_hash": value}, Reason.HASH_KIND
        for name in ("lora_id", "group_idx"):
            yield GOOD | {name: value}, Reason.WRONG_TYPE
        if not isinstance(value, str):
            yield GOOD | {"medium": value}, Reason.WRONG_TYPE
            yield removed([1]) | {"medium": value}, Reason.WRONG_TYPE


def malformed():
    """Yield events with text that is not UTF-8, or with a map whose key is a map, each with the expected reason."""
    for value in (Raw(b"\xa1\xff"), Raw(b"\x81\x80\x01")):
        for event in (GOOD | {"medium": value}, GOOD | {"novelty": value}, {"type": value}, [*array(GOOD), value]):
            yield event, Reason.WRONG_TYPE
    yield {"type": "BlockRemoved", 5: 1}, Reason.WRONG_TYPE


def missing():
    for name in ("block_hashes", "token_ids", "block_size"):
        yield {key: value for key, value in GOOD.items() if key != name}, Reason.MISSING_FIELD


WRONG += [*missing(), *wrong_types(), *malformed()]


class TestABadEvent:
    @pytest.mark.parametrize(("event", "reason"), WRONG, ids=[f"{reason}-{i}" for i, (_, reason) in enumerate(WRONG)])
    def test_a_bad_event_is_rejected_without_the_rest_of_its_batch(self, event, reason):
        batch = decoded(store([7]), event, removed([8]))
        assert batch.rejects == [reason]
        assert plain_all(batch.events) == plain_all([store([7]), removed([8])])
        assert batch.ts == 1.0


class TestABadBatch:
    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"\xc1",
            b"\x93",
            b"\xdd\xff\xff\xff\xff",
            b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff\xc0",
            b"\x93\xcb" + bytes(8) + b"\xdc\xff\xff",
            payload(GOOD)[:-1],
            payload(GOOD)[:40],
            payload(GOOD) + b"\x00",
            payload(["BlockRemoved", Raw(b"\xdd\xff\xff\xff\xff\x01")]),
            payload(GOOD | {"block_hashes": Raw(b"\xc6\xff\xff\xff\xff")}),
        ],
        ids=lambda raw: raw[:12].hex() or "empty",
    )
    def test_a_truncated_or_invalid_batch_is_rejected(self, raw):
        assert decode_batch(raw) is Reason.NOT_MSGPACK

    @pytest.mark.parametrize(
        "raw",
        [
            pack(None),
            pack(5),
            pack("batch"),
            pack([]),
            pack([1.0]),
            pack({}),
            pack({"ts": 1.0}),
            pack({"events": []}),
            pack(["1.0", [], 0]),
            pack([None, [], 0]),
            pack([1.0, None, 0]),
            pack([1.0, {}, 0]),
            pack([1.0, [], "0"]),
            pack([1.0, [], 0.5]),
            pack([math.nan, [GOOD], 0]),
            pack([math.inf, [GOOD], 0]),
            pack([-math.inf, [array(GOOD)], 0]),
            pack({"ts": math.nan, "events": []}),
        ],
        ids=repr,
    )
    def test_a_payload_of_another_shape_is_not_a_batch(self, raw):
        assert decode_batch(raw) is Reason.BATCH_SHAPE

    @pytest.mark.parametrize(
        "raw",
        [
            payload(Raw(DEEP)),
            payload(GOOD, Raw(DEEP)),
            payload(GOOD | {"extra_keys": Raw(DEEP)}),
            payload(GOOD | {"novelty": Raw(DEEP)}),
            payload([*array(GOOD), Raw(DEEP)]),
            payload(GOOD | {"token_ids": Raw(DEEP)}),
        ],
        ids=range(6),
    )
    def test_a_too_deeply_nested_batch_is_rejected(self, raw):
        assert decode_batch(raw) is Reason.NESTING

    @pytest.mark.parametrize("raw", [DEEP, payload(rank=Raw(DEEP)), payload(ts=Raw(DEEP))], ids=range(3))
    def test_a_deep_nest_in_place_of_a_number_is_rejected(self, raw):
        assert decode_batch(raw) is Reason.BATCH_SHAPE

    def test_a_too_deeply_nested_map_batch_is_rejected(self):
        assert decode_batch(pack({"ts": 1.0, "events": [], "novelty": Raw(DEEP)})) is Reason.NESTING

    @pytest.mark.parametrize("event", [removed([1]), array(removed([1])), {"type": "Nonsense"}])
    def test_a_batch_with_too_many_events_is_rejected(self, event):
        raw = pack(event)

        def of(count):
            return b"\x93\xcb" + bytes(8) + b"\xdd" + count.to_bytes(4, "big") + raw * count + b"\x00"

        assert decode_batch(of(MAX_EVENTS + 1)) is Reason.TOO_MANY_EVENTS
        batch = well_formed(of(MAX_EVENTS))
        assert len(batch.events) + len(batch.rejects) == MAX_EVENTS


@pytest.mark.parametrize(
    ("raw", "offset"),
    [
        (pack([1.0, [1], 0]), 11),
        (pack([1, [1], 0]), 3),
        (pack([2**40, [1], 0]), 11),
        (pack([1.0, [1] * 16, 0]), 13),
        (pack([1.0, [1] * 70_000, 0]), 15),
        (pack([1.0, [], 0]), 0),
        (pack({"ts": 1.0}), 0),
        (b"", 0),
        (b"\x93\xcb", 0),
        (b"\x93\xcb\x00\x00", 0),
    ],
    ids=range(10),
)
def test_event_offset_finds_the_first_event(raw, offset):
    assert event_offset(raw) == offset
    if offset:
        assert raw[offset] == 1


def test_msgspec_allocates_no_memory_for_a_false_length():
    for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb"):
        with pytest.raises(msgspec.DecodeError):
            msgspec.msgpack.decode(head + b"\xff\xff\xff\xff")


@pytest.mark.parametrize("block", [7, b"7" * 32])
@pytest.mark.parametrize("shape", [lambda event: event, array], ids=["maps", "arrays"])
def test_a_batch_of_usual_events_is_decoded_by_one_call(block, shape):
    batch = decode(payload(shape(store([block], block)), shape(removed([block]))))
    assert isinstance(batch, Batch)
    assert batch.unknown is None
    assert plain_all(batch.events) == plain_all(decoded(store([block], block), removed([block])).events)


def test_salts_as_proposed_for_sglang_are_decoded():
    """kvbus reads salts as sglang#39991 proposes them: in `extra_keys` of the first page, and in `cache_salt`.

    `lora_name` is always present in these events.
    """
    event = store([1, 2], extra_keys=[["tenant"], None], cache_salt="tenant", lora_name=None)
    batch = decoded(event)
    assert batch.unknown is None
    assert plain_all(batch.events) == plain_all([event])


def test_events_that_tensorrt_llm_publishes_are_decoded():
    """kvbus reads the events of TensorRT-LLM#17023, which leave out fields that have their default value."""
    event = store([-1, 2], 5, lora_id=None, lora_name=None, medium="GPU", group_idx=0)
    batch = decoded(event, removed([-1], group=0), cleared(), rank=3)
    assert (batch.unknown, batch.rank) == (None, 3)
    assert plain_all(batch.events) == plain_all([event, removed([-1], group=0), cleared()])


@pytest.mark.parametrize(
    ("raw", "begins"),
    [
        (payload(cleared(), GOOD), True),
        (payload(GOOD, cleared()), False),
        (payload(), False),
        (b"nonsense", False),
        (payload(*[cleared()] * 3), False),
    ],
)
def test_a_state_begins_with_a_clear(raw, begins):
    assert codec.begins_with_clear(raw, 2) is begins
