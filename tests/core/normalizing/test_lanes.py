"""Tests for the usual stores of a lane (a group on a medium, as the engine spells it), and for the end of the usual."""

import pytest

from kvbus.core.normalizing.lanes import MAX_LANES
from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.schema import BlockStored
from tests.core.dsl import Bench
from tests.doubles.payloads import plain_all, removed, store, tokens_of


def settled(**rules):
    """Return a normalizer that has had so many stores of two blocks that further ones are usual."""
    bench = Bench(**rules)
    for first in range(1001, 1021, 2):
        bench.feed(store([first, first + 1]))
    return bench


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_batch_in_which_the_block_size_changes_is_applied_with_the_new_size(blocks):
    """The stores before the change were usual when they were checked, but not when they are applied."""
    bench = Bench()
    for first in range(100, 140):
        bench.feed(store(list(range(first * 10, first * 10 + blocks))))
    proof = [store([7000 + 2 * n, 7001 + 2 * n], block_size=8) for n in range(16)]
    bench.feed(store([1]), *proof, store([2]))
    assert bench.normalizer.engine_block_size == 8
    assert bench.stats.rebuilds == 1
    assert bench.announced().blocks == bench.router.blocks
    assert bench.router.violations == []


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (store([1, b"x" * 8]), Reason.HASH_KIND),
        (store([b"x" * 8]), Reason.HASH_KIND),
        (store([1], b"x" * 8), Reason.HASH_KIND),
        (store([1, 1]), Reason.DUPLICATE_HASH),
        (store([1], 1), Reason.SELF_PARENT),
        (store([1], tokens=[0] * 17), Reason.TOKEN_COUNT),
        (store([1], tokens=[2**32] * 16), Reason.TOKEN_RANGE),
        (store([1, 2], tokens=[0] * 16), Reason.TOKEN_COUNT),
    ],
)
def test_a_lane_with_usual_stores_refuses_a_wrong_one_with_its_reason(event, reason):
    bench = settled()
    assert bench.feed(event, store([3, 4])) == plain_all([store([3, 4])])
    assert bench.rejected == {reason: 1}


@pytest.mark.parametrize("hashes", [[b""], [b"x" * 65], [b"x" * 8, b""], [b"x" * 8, b"y" * 65]], ids=len)
def test_a_lane_of_byte_hashes_refuses_empty_and_too_long_hashes(hashes):
    bench = Bench()
    for n in range(40):
        bench.feed(store([bytes([n, length]) * 4 for length in (1, 2)]))
    assert bench.feed(store(hashes)) == []
    assert bench.feed(removed(hashes)) == []
    assert bench.rejected == {Reason.HASH_KIND: 2}


def test_one_hash_of_another_kind_does_not_change_the_kind_of_the_stream():
    bench = settled()
    other = [store([bytes([n]) * 8]) for n in range(11)]
    assert bench.feed(*other[:9]) == []
    assert bench.rejected == {Reason.HASH_KIND: 9}
    assert bench.feed(other[9], other[10]) == plain_all(other[9:])
    assert bench.feed(store([5])) == plain_all([store([5])])


def test_every_spelling_of_a_medium_is_a_lane_of_the_same_table():
    bench = settled()
    for medium in ("GPU", "gpu", "Gpu", None):
        bench.feed(store([1], medium=medium))
    assert bench.filtered == {Filtered.COPY: 3}
    for medium in ("gpu", None, "GPU"):
        assert bench.feed(removed([1], medium=medium)) == []
    assert bench.feed(removed([1], medium="gPU")) == plain_all([removed([1])])


def test_thousands_of_lanes_keep_their_stores_apart():
    bench = Bench()
    count = MAX_LANES + 20
    for turn in range(3):
        for window in range(count):
            event = store([turn * count + window], group=0, kv_cache_spec_sliding_window=window)
            assert bench.feed(event) == plain_all([event])
    assert len(bench.normalizer.index) == 3 * count
    assert len(plain_all(bench.normalizer.announce())) == 3 * count


def test_a_block_with_tokens_replaces_a_block_without_tokens_although_a_coarse_block_has_its_hash():
    bench = settled()
    bench.feed(store([1], tokens=[], block_size=16), store([1, 2], tokens=tokens_of(1, 64), block_size=32))
    assert bench.normalizer.entries == 20 + 3
    bench.feed(store([1]))
    (again,) = [event for event in plain_all(bench.normalizer.announce()) if event["block_hashes"] == [1]]
    assert again["token_ids"] == tokens_of(1)
    assert bench.announced().blocks == bench.router.blocks
    assert bench.rejected == {}


def test_a_store_without_tokens_is_refused_if_only_tail_blocks_have_shown_a_block_size():
    bench = Bench(block_size=16)
    bench.feed(store([1], block_size=8))
    assert bench.feed(store([2, 3], tokens=[], block_size=8)) == []
    assert (bench.rejected, bench.filtered) == (
        {Reason.BLOCK_SIZE: 1},
        {Filtered.TAIL: 1, Filtered.HASH_ONLY: 1},
    )


VALUES = {
    "lora_id": 3,
    "medium": "CPU",
    "lora_name": "adapter",
    "group_idx": 2,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": 128,
    "extra_keys": [["key"]],
    "locality": "LOCAL",
    "ownership": "own",
    "session_id": "session",
    "cache_salt": "salt",
    "lookahead_token_ids": [[5]],
}
"""A value of each field that a store may have besides its blocks."""


def test_the_values_cover_every_field_of_a_store():
    of_blocks = {"block_hashes", "parent_block_hash", "token_ids", "block_size"}
    assert {*VALUES, *of_blocks} == {*BlockStored.__struct_fields__}


@pytest.mark.parametrize("field", VALUES)
def test_a_usual_store_keeps_the_value_of_every_field(field):
    """Stores with a value and without it alternate, so that neither takes the value of the other."""
    bench = settled()
    events = []
    for n in range(0, 80, 2):
        events += [store([n], lora_id=None), store([n + 1], lora_id=None) | {field: VALUES[field]}]
        assert bench.feed(*events[-2:]) == plain_all(events[-2:])
    announced = {event["block_hashes"][0]: event for event in plain_all(bench.normalizer.announce())}
    for event in plain_all(events):
        assert announced[event["block_hashes"][0]] == event
