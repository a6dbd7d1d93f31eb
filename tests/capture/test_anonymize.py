"""Tests for anonymized captures: kvbus treats an anonymized capture like the original one.

The anonymized capture contains no name and no hash of the original one.
"""

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbus.core.types import Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.schema import AllBlocksCleared, BlockInactive, BlockRemoved, BlockStored
from kvbus.tools.capture.anonymize import Anonymizer, Pseudonyms
from kvbus.tools.capture.format import Message
from tests.doubles.payloads import pack, payload, removed, store
from tests.doubles.renaming import COUNTS, STAYS, run, same_but_for_names
from tests.hostile.bad import BATCHES, fields, with_field
from tests.long import sample
from tests.wire.captures import CAPTURES, load

KEY = b"k" * 32


def anonymized(messages, key=KEY):
    anonymizer = Anonymizer(Pseudonyms(key))
    return [anonymizer.message(message) for message in messages]


def renamed(raw, key=KEY):
    return Anonymizer(Pseudonyms(key)).payload(raw)


def streamed(payloads):
    return [Message(0.5 * seq, b"kv@pod@model", seq, raw) for seq, raw in enumerate(payloads)]


@pytest.mark.parametrize("name", sorted({*sample(CAPTURES, 3), "syn_mooncake_rfc1527"}))
def test_kvbus_relays_an_anonymized_capture_like_the_original(name):
    """Except for names, kvbus sends the same batches for a capture and for its anonymized copy.

    A fifth of the live batches is lost, so kvbus reads both the live stream and the engine's replay. The test compares
    kvbus's live stream and its replays.
    """
    messages = load(name)
    names = anonymized(messages)
    for message, other in zip(messages, names, strict=True):
        assert (message.t, message.seq, len(message.payload)) == (other.t, other.seq, len(other.payload))
    renaming = same_but_for_names(run(messages, lost=0.2), run(names, lost=0.2))
    assert len(renaming.names) > 10
    stay = [value for (_, value), other in renaming.names.items() if value == other and recognisable(value)]
    assert set(stay) <= {"LOCAL", "REMOTE"}


def recognisable(value):
    """Return whether a value is a hash or a name of at least four bytes, which must not stay in an anonymized capture.

    A shorter value may by chance be its own pseudonym. If no value were its own pseudonym, a reader could infer
    original values.
    """
    return abs(value) >= 2**32 if isinstance(value, int) else not isinstance(value, float) and len(value) >= 4


RENAMED = {
    *("block_hashes", "parent_block_hash", "token_ids", "lora_id", "lora_name", "extra_keys", "locality", "ownership"),
    *("session_id", "cache_salt", "lookahead_token_ids"),
}


def test_each_event_field_is_listed_as_renamed_or_kept():
    """Each field of an event is in the list of fields that are renamed or in the list of those that are kept.

    Fields on which kvbus bases decisions keep their values. A developer who adds a field must put it into a list.
    """
    events: list[type[Any]] = [BlockStored, BlockRemoved, AllBlocksCleared, BlockInactive]
    assert {name for event in events for name in event.__struct_fields__} == RENAMED | STAYS - {"type"} | {COUNTS} | {
        "kv_cache_spec_kind"
    }


def test_anonymization_keeps_the_remaining_copy_counts():
    copies = [store([1, 2]), store([1, 2]), store([3], 2)]
    for left in ([1, 0], [0, 1], [0, 0]):
        messages = streamed([payload(*copies), payload(removed([1, 2], remaining_copy_counts=left))])
        messages += streamed([b"", b"", payload(removed([2], remaining_copy_counts=left[1:]))])[2:]
        renaming = same_but_for_names(run(messages), run(anonymized(messages)))
        assert len({name for kind, name in renaming.names if kind is int}) >= 51


# Of the bad batches with a million nested levels, one is enough.
BAD = [bad.payload for bad in BATCHES if bad.name not in ("nested", "nested maps")]
BAD += [payload(with_field(*field)) for field in fields()]


@pytest.mark.parametrize("raw", BAD, ids=range(len(BAD)))
def test_an_anonymized_bad_batch_is_refused_for_the_same_reason(raw):
    around = [payload(store([1, 2])), raw, payload(store([3], 2), removed([1]))]
    messages = streamed(around)
    same_but_for_names(run(messages), run(anonymized(messages)))


SEEDS = [message.payload for name in CAPTURES for message in load(name)[:3]] + [bad.payload for bad in BATCHES[:-1]]
SEEDS = [raw for raw in SEEDS if len(raw) < 3000]


@st.composite
def mutated(draw):
    """Draw a valid or invalid batch of an engine, and change, remove or insert some bytes."""
    raw = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(raw)))
        what = draw(st.sampled_from(["byte", "byte", "cut", "put", "drop"]))
        if what == "byte" and at < len(raw):
            raw[at] = draw(st.integers(0, 255))
        elif what == "cut":
            del raw[at:]
        elif what == "put":
            raw[at:at] = draw(st.binary(max_size=12))
        else:
            del raw[at : at + draw(st.integers(1, 12))]
    return bytes(raw)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 300),
    st.floats(),
    st.text(max_size=12),
    st.binary(max_size=12),
    st.sampled_from(["BlockStored", "GPU", "cpu", "full_attention", "cache_salt", "events", "kv@x@y"]),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
NAMES = (
    "remaining_copy_counts",
    "block_hashes",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
MORE = (
    "session_id",
    "cache_salt",
    "locality",
    "lookahead_token_ids",
    "kv_cache_spec_kind",
    "new_field",
    "x y",
    "parent",
)


@st.composite
def batches(draw):
    """Draw a batch whose stores have arbitrary values in some fields, or which contains arbitrary values as events."""
    events = []
    for at in range(draw(st.integers(0, 3))):
        event = store([100 + at], 99 + at if at else None)
        event |= draw(st.dictionaries(st.sampled_from(NAMES + MORE), VALUES, max_size=2))
        events.append(draw(st.sampled_from([event, list(event.values()), draw(VALUES)])))
    return pack([1.0, events, 0, *draw(st.lists(VALUES, max_size=1))])


@given(st.lists(mutated() | batches() | VALUES.map(pack) | st.binary(max_size=40), min_size=1, max_size=4))
@example([b"\xd9\x05a", b"\xdc\x00", b"\xcd\x01", b"\x93\xcb\x00", b"\xc7\x00"])
@example([pack([1.0, [store([5], medium="f\u017f"), store([6], 5, medium="QQ")], 0])])
@example([b"\x93\x01\x91\x93\xa3a\xff\xa3\x01\x02\xc0", b"\xd6\xff" + bytes(4), b"\xd7\xff" + b"\xff" * 8])
@example([pack([1.0, [store([5]) | {"remaining_copy_counts": counts}], 0]) for counts in (0, [0, "a", [3]])])
def test_kvbus_relays_anonymized_random_batches_like_the_originals(payloads):
    messages = streamed([payload(store([1, 2])), *payloads, payload(store([3], 2))])
    names = anonymized(messages)
    assert [len(message.payload) for message in names] == [len(message.payload) for message in messages]
    same_but_for_names(run(messages), run(names))
    rules: Any = {"groups": "all", "duplicates": "ignore"}
    same_but_for_names(run(messages, **rules), run(names, **rules))


@given(mutated() | batches() | VALUES.map(pack))
def test_an_anonymized_batch_decodes_like_the_original(raw):
    before, after = decode_batch(raw), decode_batch(renamed(raw))
    if isinstance(before, Reason) or isinstance(after, Reason):
        assert before == after
    else:
        facts = [(len(each.events), each.rejects, each.unknown is None) for each in (before, after)]
        assert facts[0] == facts[1]


NUMBERS = [0x5EC2E700 + at for at in range(64)]
HASHES = [0x5EC2E75EC2E70000 + at for at in range(4)]


def recognisable_stream():
    """Return a stream that has recognisable values wherever an engine, or a defective engine, may put names or
    numbers.
    """
    event = store(
        HASHES,
        0x5EC2E75EC2E7FFFF,
        tokens=NUMBERS,
        lora_id=0x5EC2E7FF,
        lora_name="secret-adapter",
        session_id="secret-session",
        cache_salt="secret-salt",
        extra_keys=[["secret-image", 7], ["secret-adapter"], [b"secret-digest", 0x5EC2E7AA], None],
        lookahead_token_ids=[NUMBERS[:2]] * 4,
        locality="secret-place",
        ownership="secret-owner",
        new_field={"secret-key": ["secret-value", 0x5EC2E7BB, struct.unpack("d", b"secret-f")[0]]},
    )
    positional = ["BlockStored", HASHES, None, NUMBERS, 16, None, "GPU", {"cache_salt": "secret-salt"}]
    bytes_ = store([b"secret-hash" * 3], tokens=NUMBERS[:16], kv_cache_spec_kind="secret kind", medium="secret-tier")
    unknown = {"type": "secret event!", "secret field!": "secret-value", "token_ids": NUMBERS}
    good = payload(event, positional, bytes_, unknown, ["BlockMoved", "secret-moved", NUMBERS])
    ext = msgspec.msgpack.Ext(5, b"secret-extension")
    raws = [good, good[:-7], good + b"secret-tail", pack({"events": "secret", "secret key!": NUMBERS}), pack([ext])]
    raws += [b"secret text and no msgpack", b"\xc1secret", pack("secret-text"), pack(b"secret-bytes")]
    raws += [good.replace(b"secret-salt", b"secret-\xff\xfe\xfd\xfc"), b"\xd9\x40secret-and-cut-off"]
    topics = [b"kv@secret-pod:5557@secret/model", b"secret-topic", b"secret\xff\xfe", b""]
    return [Message(0.1 * at, topics[at % 4], at, raw) for at, raw in enumerate(raws)]


@pytest.mark.parametrize("number", range(20))
def test_an_anonymized_capture_contains_no_value_of_the_original(number):
    messages = recognisable_stream()
    assert all(b"secret" in message.payload for message in messages)
    out = b"".join(message.topic + message.payload for message in anonymized(messages, b"%032d" % number))
    assert b"secret" not in out
    for value in (*NUMBERS, 0x5EC2E7FF, 0x5EC2E7AA, 0x5EC2E7BB, *HASHES, 0x5EC2E75EC2E7FFFF):
        assert value.to_bytes(4 if value < 2**32 else 8, "big") not in out
    assert all(word in out for word in (b"BlockStored", b"BlockMoved", b"new_field", b"cache_salt"))


def test_anonymized_captures_are_equal_only_for_equal_keys():
    messages = recognisable_stream()
    assert anonymized(messages) == anonymized(messages)
    other = anonymized(messages, b"o" * 32)
    assert not [one for one, two in zip(anonymized(messages), other, strict=True) if one.payload == two.payload]


def test_an_anonymized_topic_keeps_its_length_and_separators():
    topic = Anonymizer(Pseudonyms(KEY)).topic
    for before in (b"kv@10.0.0.1:5557@org/model", b"kv-events", b"", b"@@", b"kv@", b"kv@\xff@x"):
        after = topic(before)
        assert (len(after), after.count(b"@")) == (len(before), before.count(b"@"))
        assert after.startswith(b"kv@") == before.startswith(b"kv@")
    assert topic(b"kv@a-pod@model").split(b"@")[0] == b"kv"


def test_messages_that_are_not_msgpack_are_counted_as_unreadable():
    anonymizer = Anonymizer(Pseudonyms(KEY))
    for raw in (b"", b"\x93", b"\xc1", pack([1.0, [], 0]) + b"x", b"\xd9\x05a"):
        anonymizer.payload(raw)
    anonymizer.payload(pack([1.0, [], 0]))
    anonymizer.payload(pack(["whatever"]))
    assert anonymizer.unreadable == 5
