"""Records and keys: what is written is read again, nothing is larger than it may be, and nothing is read wrong."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.log.record import MAX_BYTES, MAX_EVENTS, SCHEMA, Kind, Record, Stream, block_size_of, divided, read, write
from tests.doubles.payloads import cleared, payload, removed, store, unpack
from tests.doubles.router import PlainSetRouter

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.text("./:%*> ~é-_", max_size=8)
STREAMS = st.builds(Stream, NAMES, NAMES, NAMES, st.integers(0, 2**31 - 1))


@given(STREAMS)
def test_a_key_names_one_stream_and_is_a_subject_of_six_tokens(stream):
    assert Stream.parse(stream.key) == stream
    tokens = stream.key.split(".")
    assert len(tokens) == 6
    assert all(tokens)
    assert not set(stream.key) & set("/:*> \t\r\n\0")
    assert stream.key.isascii()


@given(STREAMS, STREAMS)
def test_two_streams_have_two_keys(one, other):
    assert (one == other) == (one.key == other.key)


def test_names_of_the_field_are_readable_in_a_key():
    stream = Stream("eu-1", "meta-llama/Llama-3.1-8B", "10.0.0.7:8000", 3)
    assert stream.key == "kvbus.v1.eu-1.meta-llama%2FLlama-3%2E1-8B.10%2E0%2E0%2E7%3A8000.3"
    assert Stream("", "m", "w", 0).key == "kvbus.v1.%.m.w.0"


@pytest.mark.parametrize(
    "key",
    [
        "",
        "kvbus.v1.a.b.c",
        "kvbus.v2.a.b.c.0",
        "kvbus.v1.a.b.c.0.0",
        "kvbus.v1.a.b.c.01",
        "kvbus.v1.a.b.c.-1",
        "kvbus.v1.a..c.0",
        "kvbus.v1.%61.b.c.0",
        "kvbus.v1.%2f.b.c.0",
        "kvbus.v1.%FF.b.c.0",
        "kvbus.v1.a.b.c.0\n",
    ],
)
def test_another_key_is_refused(key):
    with pytest.raises(ValueError):
        Stream.parse(key)


NUMBERS = st.integers(0, 2**63 - 1)
RECORDS = st.builds(
    Record,
    st.just(SCHEMA),
    st.sampled_from(Kind),
    NUMBERS,
    NUMBERS,
    st.binary(max_size=50),
    NUMBERS,
    NUMBERS,
    st.booleans(),
    st.booleans(),
)


@given(RECORDS)
def test_what_is_written_is_read_again(record):
    assert read(write(record)) == record


@given(st.binary(max_size=60) | st.builds(lambda r, n: write(r)[:n], RECORDS, st.integers(0, 20)))
def test_no_bytes_raise_anything_but_a_value_error(data):
    try:
        read(data)
    except ValueError:
        return
    assert write(read(data))


def test_another_schema_and_another_kind_are_refused():
    whole = [SCHEMA, 0, 1, 0, b"", 0, 0, False, False]
    assert read(msgspec.msgpack.encode([*whole, "what a later version adds"])).seq == 0
    for wrong in ([2, *whole[1:]], [SCHEMA, 9, *whole[2:]], [SCHEMA, 0, -1, *whole[3:]], b"\x91" * 10_000):
        with pytest.raises(ValueError):
            read(wrong if isinstance(wrong, bytes) else msgspec.msgpack.encode(wrong))


# -- size --------------------------------------------------------------------------------------------------------------


def test_a_batch_within_the_limits_stays_as_it_is():
    whole = payload(*(store([n]) for n in range(MAX_EVENTS)))
    assert divided(whole, MAX_EVENTS) == [whole]
    assert divided(whole, MAX_EVENTS + 1) == [whole]


def test_more_events_than_a_record_holds_are_divided_in_their_order():
    events = [{**store([n]), "no struct": [n]} if n % 3 else removed([n + 1]) for n in range(5 * MAX_EVENTS + 7)]
    whole = payload(*events)
    parts = [unpack(part) for part in divided(whole, len(events))]
    assert [event for part in parts for event in part[1]] == events
    assert all(
        len(part[1]) <= MAX_EVENTS and [part[0], part[2]] == [unpack(whole)[0], unpack(whole)[2]] for part in parts
    )


def test_an_event_that_is_too_large_is_divided_between_blocks():
    blocks = list(range(1, 4001))
    store_of_all = store(
        blocks, tokens=list(range(70_000, 70_000 + 16 * 4000 * 4)), block_size=64, extra_keys=[None] * 4000
    )
    parts = divided(payload(store_of_all, cleared(), removed([2**63 + n for n in range(70_000)])), 3)
    assert len(parts) > 3
    assert all(len(part) <= MAX_BYTES for part in parts)
    events = [event for part in parts for event in unpack(part)[1]]
    until = next(at for at, event in enumerate(events) if event["type"] == "AllBlocksCleared")
    router = PlainSetRouter()
    for seq, part in enumerate(divided(payload(store_of_all), 1)):
        router.apply(seq, part)
    assert router.violations == []
    assert [key[2] for key in router.blocks] == blocks
    assert [token for event in events[:until] for token in event["token_ids"]] == store_of_all["token_ids"]
    assert [block for event in events[until + 1 :] for block in event["block_hashes"]] == [
        2**63 + n for n in range(70_000)
    ]


def test_one_block_alone_is_never_divided():
    large = payload(store([1], tokens=[2**31] * 150_000, block_size=150_000))
    assert divided(large, 1) == [large]


def test_the_block_size_is_that_of_the_first_store():
    assert block_size_of(payload(removed([1]), store([2], tokens=[1] * 32, block_size=32))) == 32
    assert block_size_of(payload(cleared())) == 0
