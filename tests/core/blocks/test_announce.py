"""Chunks said as events; how they come about is in test_normalize."""

import pytest

from kvbus.core.blocks.announce import announce, out_parent, removals_of, slices, stores_of
from kvbus.core.blocks.chains import PAUSE
from kvbus.core.blocks.index import MAX_RUN
from tests.core.dsl import Bench
from tests.doubles.payloads import payload, plain_all, removed, store, tokens_of
from tests.typed import there


def test_the_middle_of_a_chunk_hangs_on_the_block_before_it():
    bench = Bench()
    bench.feed(store([1, 2, 3, 4], 9, extra_keys=[None, ["a"], ["b"], ["c"]], lora_id=3))
    index = bench.normalizer.index
    chunk = there(index.find(None, 1))
    assert plain_all(stores_of(index, chunk, 1, 3)) == plain_all(
        [store([2, 3], 1, extra_keys=[["a"], ["b"]], lora_id=3)]
    )
    assert plain_all(stores_of(index, chunk, 0, 1))[0]["parent_block_hash"] == 9


def test_a_block_that_leaves_as_it_came_keeps_its_name():
    bench = Bench()
    bench.feed(store([1, 2]))
    index = bench.normalizer.index
    assert [out_parent(index, None, name) for name in (None, 1, 2, 77)] == [None, 1, 2, 77]


def test_a_block_that_was_cut_is_known_by_its_last_piece():
    bench = Bench(block_size=16)
    (event,) = bench.feed(store([1, 2], block_size=32, tokens=[t for b in range(4) for t in tokens_of(b)]))
    index = bench.normalizer.index
    assert [out_parent(index, None, name) for name in (1, 2)] == event["block_hashes"][1::2]


def test_pieces_that_two_chunks_share_are_said_once_as_long_as_one_is_left():
    bench = Bench(block_size=16)
    tokens = [t for b in range(3) for t in tokens_of(b)]
    bench.feed(store([1], tokens=tokens[:32], block_size=32))
    bench.feed(store([2], tokens=tokens[:32], block_size=32))
    for gone in ([], [1], [2]):
        bench.feed(removed(gone))
        names = [name for event in plain_all(announce(bench.normalizer.index)) for name in event["block_hashes"]]
        assert len(names) == len(set(names)) == len(bench.live)
    assert bench.live == set()


def benches(*events, **rules):
    bench = Bench(**rules)
    bench.feed(*events)
    return bench


@pytest.mark.parametrize("rules", [{}, {"block_size": 16}], ids=["as they came", "reblocked"])
def test_removals_empty_a_router_leaves_first(rules):
    size = 32 if rules else 16
    bench = benches(
        *[
            store([4 * at + 1, 4 * at + 2], 4 * at or None, block_size=size, tokens=list(range(2 * size)))
            for at in range(3)
        ],
        store([90], medium="CPU", block_size=size),
        **rules,
    )
    assert bench.router.blocks
    events = removals_of(bench.normalizer.index)
    bench.router.apply(bench.seq, payload(*events))
    assert bench.router.blocks == {}
    assert bench.router.violations == []
    assert len(events) == 2, "one for each medium"


def test_removals_of_many_blocks_are_several_events():
    bench = benches(*[store([block], block - 1 or None) for block in range(1, 2 * MAX_RUN + 2)])
    events = plain_all(removals_of(bench.normalizer.index))
    assert [len(event["block_hashes"]) for event in events] == [MAX_RUN, MAX_RUN, 1]


def test_what_another_rank_has_announced_is_left_out():
    one, other = benches(store([1, 2, 3, 4])), benches(store([2, 3]), store([9]))
    (events,) = slices(one.normalizer.index, 100, [other.normalizer.index])
    assert [event["block_hashes"] for event in plain_all(events)] == [[1], [4]]
    (events,) = slices(other.normalizer.index, 100, [one.normalizer.index])
    assert [event["block_hashes"] for event in plain_all(events)] == [[9]]


def test_sub_blocks_that_another_rank_has_announced_are_left_out():
    tokens = [token for block in range(4) for token in tokens_of(block)]
    one = benches(store([1, 2], block_size=32, tokens=tokens), block_size=16)
    other = benches(store([1], block_size=32, tokens=tokens[:32]), block_size=16)
    (events,) = slices(one.normalizer.index, 100, [other.normalizer.index])
    (event,) = plain_all(events)
    assert event["token_ids"] == tokens[32:]
    assert list(slices(other.normalizer.index, 100, [one.normalizer.index])) == []


def test_a_large_list_pauses():
    bench = benches(*[store([block]) for block in range(3 * PAUSE)])
    found = [len(events) for events in slices(bench.normalizer.index, 2 * PAUSE)]
    assert [size for size in found if size] == [2 * PAUSE, PAUSE]
    assert found[:3] == [0, 0, 0], "while the window fills"
    assert 0 in found[found.index(2 * PAUSE) - 1 :], "while a list is made"
