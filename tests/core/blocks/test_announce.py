"""Chunks said as events; how they come about is in test_normalize."""

from kvbus.core.blocks.announce import announce, out_parent, stores_of
from tests.core.dsl import Bench
from tests.doubles.payloads import plain_all, removed, store, tokens_of
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
