"""Tests for unusual stores: with an unknown parent, with blocks that are already live, or with blocks of several
chains.
"""

import pytest

from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.codec import decode
from kvbus.core.wire.schema import Batch, BlockStored
from tests.core.dsl import Bench
from tests.doubles.payloads import payload, removed, store


def names(events):
    return [event["block_hashes"] for event in events]


class TestOrder:
    def test_a_store_does_not_wait_for_a_parent_after_a_removal(self):
        bench = Bench()
        bench.feed(store([9]))
        assert names(bench.feed(store([2], 1), removed([9]), store([1]))) == [[2], [9], [1]]
        assert bench.filtered == {Filtered.ORPHAN_PASSED: 1}


class TestOffloads:
    def test_an_offload_of_several_runs_becomes_stores_with_their_own_keys(self):
        bench = Bench()
        bench.feed(store([1, 2]), store([7]))
        images = [[{"hash": "a"}], [{"hash": "c"}], [{"hash": "b"}]]
        out = bench.feed(store([1, 7, 2], tokens=[], block_size=0, medium="CPU", mm_keys=images))
        assert {event["block_hashes"][0]: event["mm_keys"] for event in out} == {
            block: [keys] for block, keys in zip((1, 7, 2), images, strict=True)
        }


class TestOrphans:
    def test_an_orphan_of_a_full_index_marks_its_medium_as_incomplete(self):
        bench = Bench(orphans="drop", max_blocks=2)
        bench.feed(store([1, 2]), store([3], 9, medium="CPU"))
        assert bench.normalizer.dump()["refused"] == []
        bench.feed(store([3], 2, medium="DISK"), store([4], 3, medium="CPU"))
        assert bench.normalizer.dump()["refused"] == [("CPU", "index_full"), ("DISK", "index_full")]
        assert bench.filtered == {Filtered.ORPHAN_DROPPED: 2}
        assert bench.rejected == {Reason.INDEX_FULL: 1}

    @pytest.mark.parametrize("length", [2, 3, 50])
    def test_each_store_of_a_cycle_of_parents_is_sent_once(self, length):
        bench = Bench()
        ring = [store([n], (n + 1) % length) for n in range(length)]
        out = bench.feed(*ring, *[store([100 + n], n) for n in range(length)])
        assert sorted(name for (name,) in names(out)) == [*range(length), *range(100, 100 + length)]
        assert bench.filtered == {Filtered.ORPHAN_PASSED: 1}
        bench.feed(removed(list(range(length))))
        assert bench.live == set(range(100, 100 + length))
        assert bench.router.violations == []


class TestLimits:
    """Tests for limits that are reached in the middle of a batch. A refused block takes no room."""

    def test_stores_beyond_max_index_bytes_are_rejected(self):
        one = Bench()
        one.feed(store([1]))
        bench = Bench(max_index_bytes=2 * one.normalizer.index_bytes)
        bench.feed(store([1]), store([2], novelty="x" * 300), store([3], session_id="s" * 3000), store([4]), store([5]))
        assert bench.live == {1, 4}
        assert bench.rejected == {Reason.INDEX_FULL: 3}
        bench.feed(removed([1]), store([5]), store([6]))
        assert bench.live == {4, 5}

    @pytest.mark.parametrize("size", [8, 64], ids=["tails", "coarse"])
    def test_blocks_that_are_not_announced_count_towards_max_blocks(self, size):
        bench = Bench(max_blocks=3)
        bench.feed(store([1, 2]), store([8], block_size=size), store([9], block_size=size), store([3]))
        assert bench.live == {1, 2}
        assert bench.rejected == {Reason.INDEX_FULL: 2}
        assert bench.normalizer.entries == 3
        bench.feed(removed([8]), store([3]))
        assert bench.live == {1, 2, 3}

    def test_a_partly_known_store_uses_room_for_its_new_blocks_only(self):
        bench = Bench(max_blocks=4)
        bench.feed(store([1, 2]))
        assert names(bench.feed(store([1, 2, 3, 4]), store([4, 5], 3))) == [[3, 4]]
        assert bench.rejected == {Reason.INDEX_FULL: 1}


class TestPartlyLive:
    @pytest.mark.parametrize(("hashes", "parent", "count"), [([1, 2], None, 1), ([1], None, 0), ([2, 3], 1, 0)])
    def test_repeated_stores_of_complete_prefixes_are_counted(self, hashes, parent, count):
        bench = Bench()
        bench.feed(store([1, 2, 3]))
        assert bench.feed(store(hashes, parent)) == []
        assert bench.stats.reannounced == count

    def test_a_store_that_contains_its_own_live_parent_sends_only_new_blocks(self):
        bench = Bench()
        bench.feed(store([1, 2]))
        assert names(bench.feed(store([1, 5], 1))) == [[5]]
        assert (bench.rejected, bench.filtered) == ({}, {Filtered.COPY: 1})


def test_a_root_that_omits_its_parent_keeps_no_parent_after_an_orphan():
    bench = Bench()
    bench.feed(store([1]))
    root = store([3])
    del root["parent_block_hash"]
    batch = decode(payload(store([2], 77), root))
    assert isinstance(batch, Batch)
    out = bench.normalizer.apply(batch)
    assert [event.parent_block_hash for event in out if isinstance(event, BlockStored)] == [77, None]
