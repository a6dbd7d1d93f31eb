import msgspec
import pytest
from msgspec import UNSET

from kvbus.core.types import Hash
from kvbus.core.wire.schema import (
    CARRIED,
    AllBlocksCleared,
    ArrayBatch,
    BlockRemoved,
    BlockStored,
    MapBatch,
    StoredArray,
)
from tests.doubles.payloads import cleared, pack, payload, removed, store, unpack

decode = msgspec.msgpack.Decoder(MapBatch[Hash]).decode
decode_arrays = msgspec.msgpack.Decoder(ArrayBatch[Hash]).decode


def test_maps_are_told_by_their_type():
    events = decode(payload(store([1]), removed([1]), cleared())).events
    assert [type(event) for event in events] == [BlockStored, BlockRemoved, AllBlocksCleared]


def test_what_was_not_sent_is_not_sent_on():
    event = store([1], 2, lora_id=None, lora_name=None)
    assert unpack(pack(decode(payload(event)).events[0])) == event
    assert BlockStored((1,), None, msgspec.Raw(b"\x90"), 16).medium is UNSET


def test_a_null_that_was_sent_is_sent_on():
    event = store([1], lora_id=None, lora_name=None) | {"group_idx": None, "extra_keys": None, "session_id": None}
    assert unpack(pack(decode(payload(event)).events[0])) == event


@pytest.mark.parametrize("value", [None, [None, ["a"]], {"deep": [1, b"x"]}, b"\x00", -1])
@pytest.mark.parametrize("name", CARRIED)
def test_carried_fields_are_carried_byte_for_byte(name, value):
    event = decode(payload(store([1]) | {name: value})).events[0]
    assert bytes(getattr(event, name)) == pack(value)


@pytest.mark.parametrize("value", [0, -(2**63), 2**64 - 1, b"\xff" * 32])
def test_hashes_stay_as_they_are(value):
    event = decode(payload(store([value], value))).events[0]
    assert unpack(pack(event))["block_hashes"] == [value]
    assert unpack(pack(event))["parent_block_hash"] == value


def test_an_unknown_field_is_refused_here_and_left_to_the_codec():
    for event in (store([1], novelty=1), removed([1], novelty=1), cleared() | {"novelty": 1}):
        with pytest.raises(msgspec.ValidationError):
            decode(payload(event))


@pytest.mark.parametrize("length", range(5, 13))
def test_a_positional_store_of_every_released_length(length):
    event = ["BlockStored", [1], None, [1, 2], 2, 3, "GPU", "adapter", [None], 0, "full_attention", 128]
    (decoded,) = decode_arrays(payload(event[:length])).events
    assert isinstance(decoded, StoredArray)
    assert decoded.lora_id == (3 if length > 5 else None)
    assert decoded.medium == ("GPU" if length > 6 else None)
    assert decoded.lora_name == ("adapter" if length > 7 else None)
    assert decoded.group_idx == (0 if length > 9 else UNSET)


@pytest.mark.parametrize("length", [1, 4, 13])
def test_a_positional_store_too_short_or_too_long_is_refused(length):
    event = ["BlockStored", [1], None, [1, 2], 2, 3, "GPU", None, None, 0, None, None, "new"]
    with pytest.raises(msgspec.ValidationError):
        decode_arrays(payload(event[:length]))


def test_two_elements_are_a_batch_too():
    assert decode(pack([1.0, [cleared()]])).rank is None
