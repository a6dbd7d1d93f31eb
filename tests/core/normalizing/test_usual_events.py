"""The usual events, alone and among odd ones."""

import pytest

from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.codec import decode, decode_batch
from kvbus.core.wire.schema import Batch
from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, payload, plain_all, removed, store


def settled(**rules):
    """A group whose size is proven, with blocks 1 to 20 in one chain."""
    bench = Bench(**rules)
    for first in range(1, 20, 2):
        bench.feed(store([first, first + 1], first - 1 or None, lora_id=None, lora_name=None))
    return bench


def whole(hashes, parent=None, **fields):
    return store(hashes, parent, lora_id=None, lora_name=None, **fields)


@pytest.mark.parametrize(
    "odd",
    [
        whole([50, 51], extra_keys=[None]),
        whole([50], session_id=5),
        whole([50], lookahead_token_ids=[[-1]]),
        whole([50]) | {"lora_name": 5},
    ],
    ids=["keys", "session", "lookahead", "adapter"],
)
def test_a_store_with_an_odd_field_leaves_between_those_around_it(odd):
    bench = settled()
    events = [whole([30], 20), odd, whole([31], 30)]
    assert bench.feed(*events) == plain_all(events)
    assert (bench.rejected, bench.filtered) == ({}, {"odd_field": 1})


def test_fields_of_a_request_go_with_their_blocks():
    bench = settled()
    events = [whole([30 + n], 20, session_id=f"s{n % 3}", cache_salt="x") for n in range(6)]
    assert bench.feed(*events) == plain_all(events)
    assert {event["session_id"] for event in plain_all(bench.normalizer.announce()) if "session_id" in event} == {
        "s0",
        "s1",
        "s2",
    }


def without(event, *names):
    return {name: value for name, value in event.items() if name not in names}


def carried(bench, name):
    """What a field says of the blocks from 30 on, when they are announced."""
    return [
        event.get(name) for event in plain_all(bench.normalizer.announce()) if event["block_hashes"][0] in range(30, 40)
    ]


@pytest.mark.parametrize("keys", [None, [], [None], [["a"]], [[b"x", ["y", 1]]]], ids=str)
def test_keys_leave_and_are_kept(keys):
    bench = settled()
    for n in range(30, 33):
        assert bench.feed(whole([n], 20, extra_keys=keys)) == plain_all([whole([n], 20, extra_keys=keys)])
    assert carried(bench, "extra_keys") == [keys] * 3


@pytest.mark.parametrize(
    "ahead", [[[5], []], [], None, [[2**32 - 1] * 900, [1]]], ids=["each", "empty", "null", "longer than is shared"]
)
def test_lookahead_tokens_go_with_their_blocks(ahead):
    bench = settled()
    for n in (30, 32):
        event = whole([n, n + 1], 20, lookahead_token_ids=ahead, session_id="s")
        assert bench.feed(event) == plain_all([event])
    assert carried(bench, "lookahead_token_ids") == [ahead] * 2
    assert carried(bench, "session_id") == ["s"] * 2


@pytest.mark.parametrize(
    ("event", "leaves"),
    [
        (without(whole([30]), "parent_block_hash"), whole([30])),
        (whole([30], 20, medium="gpu"), whole([30], 20)),
        (without(whole([30], 20), "lora_id", "lora_name"), whole([30], 20)),
        (without(whole([30], 20), "medium"), without(whole([30], 20), "medium")),
    ],
    ids=["parent", "medium in small letters", "adapter", "medium"],
)
def test_what_was_not_sent_is_filled_in_and_the_batch_is_not_the_one_that_came(event, leaves):
    bench = settled()
    for _ in range(2):
        assert bench.feed(event) == plain_all([leaves])
        bench.feed(removed([30]))
    assert bench.filtered == {}


def test_a_parent_on_another_tier_is_known_and_one_that_nobody_has_is_an_orphan():
    bench = settled()
    bench.feed(whole([40], 20, medium="CPU"))
    bench.feed(removed([20]), whole([41], 40), whole([42], 99), whole([43], 42))
    assert bench.filtered == {Filtered.ORPHAN_PASSED: 1}
    assert {(medium, block) for _, medium, block in bench.router.blocks} >= {("GPU", 41), ("GPU", 42), ("GPU", 43)}


def test_blocks_named_by_bytes():
    bench = Bench()
    for n in range(8):
        bench.feed(whole([b"%d" % n, b"%d+" % n], b"%d+" % (n - 1) if n else None))
    assert bench.feed(whole([5]), whole([b"8"], b"7+"), removed([b"7+"])) == plain_all(
        [whole([b"8"], b"7+"), removed([b"7+"])]
    )
    assert bench.rejected == {Reason.HASH_KIND: 1}
    assert bench.stats.stored == 10


def test_bytes_are_limited_in_the_middle_of_a_batch():
    bench = settled()
    room = bench.normalizer.index_bytes
    small = Bench(max_index_bytes=room)
    for first in range(1, 18, 2):
        small.feed(whole([first, first + 1], first - 1 or None))
    out = small.feed(whole([30], 18), whole([31], 18), whole([32], 18), removed([30]), whole([33], 18))
    assert [event["block_hashes"] for event in out] == [[30], [30], [33]]
    assert small.rejected == {Reason.INDEX_FULL: 2}
    assert small.normalizer.full


def test_blocks_that_no_request_uses_any_more_cost_their_batch_nothing():
    """BlockInactive (vllm#50732) with the fields it is proposed with, and one that nobody knows: all else stays plain."""
    idle = {"type": "BlockInactive", "block_hashes": [1], "medium": "GPU", "group_idx": 0, "later": 1}
    bench = Bench()
    bench.feed(store([1], group=0), store([2], 1, group=0))
    out = bench.feed(idle, store([3], 2, group=0), idle, removed([3], group=0))
    assert out == plain_all([store([3], 2, group=0), removed([3], group=0)])
    assert bench.feed(cleared(), idle, store([4])) == plain_all([cleared(), store([4])])
    assert bench.filtered == {Filtered.INACTIVE: 3}
    assert bench.rejected == {}
    batch = decode(payload(idle, store([3], 2, group=0)))
    assert isinstance(batch, Batch)
    assert batch.unknown is None


def test_readers_of_events_do_not_see_them():
    batch = decode_batch(payload({"type": "BlockInactive", "block_hashes": [1]}, store([1])))
    assert isinstance(batch, Batch)
    assert plain_all(batch.events) == plain_all([store([1])])
