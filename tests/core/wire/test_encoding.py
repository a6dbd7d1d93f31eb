"""Tests for encoding a part of a store or removal, in every form of an event."""

import pytest
from msgspec import UNSET

from kvbus.core.wire.codec import decode
from kvbus.core.wire.encoding import (
    block_by_block,
    changed,
    encode_value,
    hashes_of,
    is_store,
    parts,
    value,
    with_extras,
    without_content,
)
from kvbus.core.wire.schema import AllBlocksCleared, Batch
from tests.doubles.payloads import payload, plain_all, removed, store, tokens_of
from tests.typed import well_formed

KEYS = [["a"], None, ["c"]]


def struct(event):
    return well_formed(payload(event)).events[0]


def as_sent(event):
    found = decode(payload(event))
    assert isinstance(found, Batch)
    return found.events[0]


FORMS = [struct, as_sent]


@pytest.mark.parametrize("form", FORMS)
def test_block_by_block_divides_a_store_into_a_chain(form):
    (first, second, third) = block_by_block(form(store([1, 2, 3], 9, extra_keys=KEYS)))
    for event, block, parent, keys in ((first, 1, 9, KEYS[0]), (second, 2, 1, KEYS[1]), (third, 3, 2, KEYS[2])):
        (found,) = plain_all([event])
        assert (list(found["block_hashes"]), found["parent_block_hash"]) == ([block], parent)
        assert found["token_ids"] == tokens_of(block)
        assert found["extra_keys"] == [keys]


def mm_key(offset):
    return {"type": "mm_key", "hash": "ab", "start_offset": offset}


def test_an_unknown_list_with_an_entry_for_each_block_is_divided():
    """If kvbus divides a store, it also divides an unknown list with one entry for each block.

    An example is TensorRT-LLM's ``mm_keys``, which lists the images in each block.
    """
    images = [[mm_key(0)], [], [mm_key(7), mm_key(9)]]
    event = with_extras(as_sent(store([1, 2, 3])), {"mm_keys": encode_value(images), "future": encode_value([1, 2, 3])})
    found = plain_all(parts(event, [(0, 2), (2, 3)]))
    assert [each["mm_keys"] for each in found] == [images[:2], images[2:]]
    assert [each["future"] for each in found] == [[1, 2, 3]] * 2
    assert plain_all(parts(event, [(0, 3)])) == plain_all([event])


def test_parts_returns_ranges_of_a_store_and_of_a_removal():
    (stored,) = parts(struct(store([1, 2, 3], 9)), [(1, 3)])
    assert plain_all([stored]) == plain_all([struct(store([2, 3], 1))])
    assert plain_all(parts(struct(removed([1, 2, 3])), [(0, 1), (2, 3)])) == plain_all([removed([1]), removed([3])])
    whole = struct(store([1, 2]))
    assert parts(whole, [(0, 2)])[0] is whole
    assert parts(whole, []) == []


def test_helpers_read_fields_of_structs_and_of_maps():
    assert value(struct(removed([1])), "group_idx") is None
    assert value({"type": "BlockRemoved"}, "medium") is None
    assert is_store(struct(store([1])))
    assert not is_store(struct(removed([1])))
    assert hashes_of(AllBlocksCleared()) == ()
    assert changed({"a": 1, "b": 2}, {"a": UNSET}) == {"b": 2}


@pytest.mark.parametrize("extras", [{}, {"novelty": encode_value([7])}])
def test_a_store_without_content_has_hashes_and_locations_only(extras):
    place = {"group": 2, "lora_id": 1, "lora_name": "a", "locality": "LOCAL", "ownership": "kvcr"}
    content = {"extra_keys": KEYS, "session_id": "s", "cache_salt": "x", "lookahead_token_ids": [[7]] * 3}
    event = struct(store([1, 2, 3], 9, **place, **content))
    bare = without_content(with_extras(event, extras) if extras else event)
    assert plain_all([bare]) == [store([1, 2, 3], 9, tokens=[], **place)]


def test_without_content_does_not_change_other_events():
    for event in (struct(removed([1], locality="LOCAL")), AllBlocksCleared()):
        assert without_content(event) is event
