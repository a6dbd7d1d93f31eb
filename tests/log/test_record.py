"""Tests for the encoding of a log's records and keys.

kvbus reads each written record back unchanged, keeps the size limits, and refuses a record with a changed bit.
"""

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.log_relay import LAST
from kvbus.parts.log.record import (
    MAX_BYTES,
    MAX_EVENTS,
    SCHEMA,
    Kind,
    Record,
    Stream,
    block_size_of,
    divided,
    read,
    write,
)
from tests.doubles.payloads import cleared, payload, removed, store, unpack
from tests.doubles.router import PlainSetRouter
from tests.log.records import record

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.text("./:%*> ~é-_", max_size=8)
STREAMS = st.builds(Stream, NAMES, NAMES, NAMES, st.integers(0, 2**31 - 1))


@given(STREAMS)
def test_a_key_has_six_tokens_and_parses_to_its_stream(stream):
    assert Stream.parse(stream.key) == stream
    tokens = stream.key.split(".")
    assert len(tokens) == 6
    assert all(tokens)
    assert not set(stream.key) & set("/:*> \t\r\n\0")
    assert stream.key.isascii()


@given(STREAMS, STREAMS)
def test_different_streams_have_different_keys(one, other):
    assert (one == other) == (one.key == other.key)


NUMBERS = st.integers(0, 2**63 - 1)
RECORDS = st.builds(
    Record,
    st.just(SCHEMA),
    st.sampled_from(Kind),
    st.integers(1, 2**53 - 1),
    st.integers(0, LAST - 1),
    st.binary(max_size=50) | st.binary(min_size=1, max_size=9).map(lambda some: some * 100),
    NUMBERS,
    NUMBERS,
    st.booleans(),
    st.booleans(),
    st.just(False),
)


@given(RECORDS)
def test_a_record_is_unchanged_after_writing_and_reading(record):
    assert read(write(record)) == record
    assert msgspec.msgpack.decode(write(record))[-1] == zlib.crc32(write(record)[:-5])


@given(st.binary(max_size=60) | st.builds(lambda r, n: write(r)[:n], RECORDS, st.integers(0, 20)))
def test_reading_arbitrary_bytes_raises_value_error(data):
    with pytest.raises(ValueError):
        read(data)


@given(RECORDS, st.data())
def test_a_record_with_a_flipped_bit_is_refused(record, data):
    whole = bytearray(write(record))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError):
        read(bytes(whole))


def test_a_state_is_compressed_if_that_is_smaller_and_a_batch_never():
    blocks = payload(*(store([n]) for n in range(MAX_EVENTS)))
    batch, state = (record(kind, 1, 0, payload=blocks) for kind in (Kind.BATCH, Kind.STATE))
    assert len(state) < len(batch) / 2
    assert read(state).payload == read(batch).payload == blocks
    assert read(state).packed is False
    noise = b"".join(zlib.crc32(bytes([n])).to_bytes(4, "big") for n in range(256))
    assert noise in record(Kind.STATE, 1, 0, payload=noise)


# -- size --------------------------------------------------------------------------------------------------------------


def test_a_batch_within_the_limits_is_not_divided():
    whole = payload(*(store([n]) for n in range(MAX_EVENTS)))
    assert divided(whole, MAX_EVENTS) == [whole]
    assert divided(whole, MAX_EVENTS + 1) == [whole]


def test_a_batch_with_too_many_events_is_divided_in_order():
    events = [{**store([n]), "no struct": [n]} if n % 3 else removed([n + 1]) for n in range(5 * MAX_EVENTS + 7)]
    whole = payload(*events)
    parts = [unpack(part) for part in divided(whole, len(events))]
    assert [event for part in parts for event in part[1]] == events
    assert all(
        len(part[1]) <= MAX_EVENTS and [part[0], part[2]] == [unpack(whole)[0], unpack(whole)[2]] for part in parts
    )


def test_an_oversize_event_is_divided_between_its_blocks():
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


def test_a_single_block_is_never_divided():
    large = payload(store([1], tokens=[2**31] * 150_000, block_size=150_000))
    assert divided(large, 1) == [large]


def test_the_block_size_of_a_batch_comes_from_its_first_store():
    assert block_size_of(payload(removed([1]), store([2], tokens=[1] * 32, block_size=32))) == 32
    assert block_size_of(payload(cleared())) == 0
