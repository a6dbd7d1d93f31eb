"""Stores that are not plainly new blocks behind a known parent."""

import pytest

from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.codec import decode
from kvbus.core.wire.schema import Batch, BlockStored
from tests.core.dsl import Bench
from tests.doubles.payloads import payload, plain_all, removed, store, tokens_of


def names(events):
    return [event["block_hashes"] for event in events]


class TestOrder:
    def test_beyond_a_removal_nothing_is_waited_for(self):
        bench = Bench()
        bench.feed(store([9]))
        assert names(bench.feed(store([2], 1), removed([9]), store([1]))) == [[2], [9], [1]]
        assert bench.filtered == {Filtered.ORPHAN_PASSED: 1}

    def test_two_that_wait_for_each_other_leave_all_the_same(self):
        bench = Bench()
        assert names(bench.feed(store([2], 1), store([1], 2))) == [[1], [2]]
        assert bench.filtered == {Filtered.ORPHAN_PASSED: 1}

    def test_a_parent_of_its_own_is_refused_on_every_medium(self):
        bench = Bench()
        bench.feed(*[store([n, n + 1], n - 1 or None) for n in range(1, 20, 2)])
        bench.feed(store([30, 31], medium="CPU"))
        bench.feed(store([5, 6], 5, medium="CPU"))
        assert bench.rejected == {Reason.SELF_PARENT: 1}


class TestOffloads:
    def test_each_run_leaves_as_a_store_with_its_own_keys(self):
        bench = Bench()
        bench.feed(store([1, 2]), store([7]))
        images = [[{"hash": "a"}], [{"hash": "c"}], [{"hash": "b"}]]
        out = bench.feed(store([1, 7, 2], tokens=[], block_size=0, medium="CPU", mm_keys=images))
        assert {event["block_hashes"][0]: event["mm_keys"] for event in out} == {
            block: [keys] for block, keys in zip((1, 7, 2), images, strict=True)
        }


class TestOrphans:
    def test_one_whose_parent_a_limit_may_have_refused_shows_that_something_is_missing(self):
        bench = Bench(orphans="drop", max_blocks=2)
        bench.feed(store([1, 2]), store([3], 9, medium="CPU"))
        assert bench.normalizer.dump()["refused"] == []
        bench.feed(store([3], 2, medium="DISK"), store([4], 3, medium="CPU"))
        assert bench.normalizer.dump()["refused"] == [("CPU", "index_full"), ("DISK", "index_full")]
        assert bench.filtered == {Filtered.ORPHAN_DROPPED: 2}
        assert bench.rejected == {Reason.INDEX_FULL: 1}

    def test_a_parent_later_in_the_run_and_refused_is_none(self):
        bench = Bench(orphans="drop", max_blocks=2)
        assert names(bench.feed(store([3], 2), store([2, 4, 5], 1), store([1]), store([6], 1))) == [[1], [6]]
        assert bench.filtered == {Filtered.ORPHAN_DROPPED: 1}

    @pytest.mark.parametrize("length", [2, 3, 50])
    def test_a_cycle_leaves_once_each(self, length):
        bench = Bench()
        ring = [store([n], (n + 1) % length) for n in range(length)]
        out = bench.feed(*ring, *[store([100 + n], n) for n in range(length)])
        assert sorted(name for (name,) in names(out)) == [*range(length), *range(100, 100 + length)]
        assert bench.filtered == {Filtered.ORPHAN_PASSED: 1}
        bench.feed(removed(list(range(length))))
        assert bench.live == set(range(100, 100 + length))
        assert bench.router.violations == []

    def test_a_parent_of_another_group_is_not_waited_for(self):
        bench = Bench()
        assert names(bench.feed(store([2], 1, group=1), store([1], group=2))) == [[2], [1]]
        assert bench.filtered == {Filtered.ORPHAN_PASSED: 1}

    def test_of_a_parent_stored_twice_the_first_is_waited_for(self):
        bench = Bench()
        out = bench.feed(store([2], 1), store([7]), store([1]), store([1], tokens=[3] * 16))
        assert names(out) == [[1], [2], [7]]
        assert (bench.filtered, bench.rejected) == ({Filtered.COPY: 1}, {Reason.HASH_COLLISION: 1})

    def test_a_parent_that_was_refused_before_is_not_waited_for(self):
        """It comes twice in the run; what is behind it does not know that the second one will fit."""
        bench = Bench(max_blocks=2)
        out = bench.feed(store([1, 5, 6]), store([2], 1), store([1]), store([3], 2))
        assert names(out) == [[2], [1]]
        assert bench.filtered == {Filtered.ORPHAN_PASSED: 1}
        assert bench.rejected == {Reason.INDEX_FULL: 2}

    def test_what_was_complete_and_in_order_leaves_as_it_came(self):
        bench = Bench()
        whole = [store([n], n - 1 or None, lora_id=None, lora_name=None) for n in (1, 2, 3)]
        assert bench.feed(*whole) == plain_all(whole)
        bench.feed(*[event | {"medium": "CPU"} for event in whole[:0:-1]])
        bench.feed(*[event | {"block_hashes": [event["block_hashes"][0] + 10]} for event in whole[:0:-1]])

    def test_later_runs_and_batches_are_looked_at_anew(self):
        bench = Bench()
        bench.feed(store([50]))
        out = bench.feed(store([2], 1), store([1]), removed([50]), store([4], 3), store([3]))
        assert names(out) == [[1], [2], [50], [3], [4]]
        assert names(bench.feed(store([6], 5), store([5]))) == [[5], [6]]
        assert bench.filtered == {}


class TestLimits:
    """In the middle of a batch; what was refused takes no room."""

    def test_of_bytes(self):
        one = Bench()
        one.feed(store([1]))
        bench = Bench(max_index_bytes=2 * one.normalizer.index_bytes)
        bench.feed(store([1]), store([2], novelty="x" * 300), store([3], session_id="s" * 3000), store([4]), store([5]))
        assert bench.live == {1, 4}
        assert bench.rejected == {Reason.INDEX_FULL: 3}
        bench.feed(removed([1]), store([5]), store([6]))
        assert bench.live == {4, 5}

    def test_of_bytes_that_chunks_half_gone_still_hold(self):
        """The size of an index is counted exactly before a store is refused."""
        one = Bench()
        one.feed(store([1, 2]))
        bench = Bench(max_index_bytes=2 * one.normalizer.index_bytes)
        bench.feed(store([1, 2]), store([3, 4]))
        bench.feed(removed([2]), store([5]))
        assert bench.rejected == {Reason.INDEX_FULL: 1}
        bench.feed(removed([1]), store([5, 6]))
        assert bench.live == {3, 4, 5, 6}
        assert bench.rejected == {Reason.INDEX_FULL: 1}

    @pytest.mark.parametrize("size", [8, 64], ids=["tails", "coarse"])
    def test_of_what_is_left_out(self, size):
        bench = Bench(max_blocks=3)
        bench.feed(store([1, 2]), store([8], block_size=size), store([9], block_size=size), store([3]))
        assert bench.live == {1, 2}
        assert bench.rejected == {Reason.INDEX_FULL: 2}
        assert bench.normalizer.entries == 3
        bench.feed(removed([8]), store([3]))
        assert bench.live == {1, 2, 3}

    def test_a_store_half_known_takes_room_for_its_new_half(self):
        bench = Bench(max_blocks=4)
        bench.feed(store([1, 2]))
        assert names(bench.feed(store([1, 2, 3, 4]), store([4, 5], 3))) == [[3, 4]]
        assert bench.rejected == {Reason.INDEX_FULL: 1}


class TestPartlyLive:
    def test_only_the_blocks_of_other_tokens_collide(self):
        bench = Bench()
        bench.feed(store([1, 2]), store([3], 2))
        bench.feed(store([1, 2, 3, 4], tokens=[9] * 16 + tokens_of(2) + [8] * 16 + tokens_of(4)))
        assert bench.rejected == {Reason.HASH_COLLISION: 2}
        assert (bench.live, bench.filtered) == ({1, 2, 3, 4}, {Filtered.COPY: 3})

    @pytest.mark.parametrize(("hashes", "parent", "count"), [([1, 2], None, 1), ([1], None, 0), ([2, 3], 1, 0)])
    def test_whole_prefixes_that_come_again_are_counted(self, hashes, parent, count):
        bench = Bench()
        bench.feed(store([1, 2, 3]))
        assert bench.feed(store(hashes, parent)) == []
        assert bench.stats.reannounced == count

    def test_a_parent_of_its_own_that_is_live_is_a_copy(self):
        bench = Bench()
        bench.feed(store([1, 2]))
        assert names(bench.feed(store([1, 5], 1))) == [[5]]
        assert (bench.rejected, bench.filtered) == ({}, {Filtered.COPY: 1})


class TestReblocked:
    TOKENS = tokens_of(900, 96)

    def node(self, name, first, last, parent=None):
        return store([name], parent, tokens=self.TOKENS[first:last], block_size=last - first)

    def test_of_a_store_half_known_the_new_half_is_cut(self):
        bench = Bench(block_size=16)
        bench.feed(store([2, 4], block_size=32))
        out = bench.feed(store([1, 2, 3], block_size=32))
        assert [event["token_ids"] for event in out] == [tokens_of(1, 32), tokens_of(3, 32)]
        assert bench.filtered == {Filtered.COPY: 1}
        assert bench.announced().blocks == bench.router.blocks

    def test_a_finer_stream_in_the_middle_of_a_batch_is_announced_with_what_was_before(self):
        bench = Bench()
        bench.feed(store([90], block_size=64), store([91], 90, block_size=64, medium="CPU"))
        out = bench.feed(removed([91], medium="CPU"), store([2, 3], 1), store([1]), removed([90]), store([4], 3))
        assert out[0]["type"] == "AllBlocksCleared"
        assert bench.live == {1, 2, 3, 4}
        assert bench.stats.rebuilds == 1
        assert bench.filtered == {Filtered.COARSE: 2}
        assert bench.router.violations == []

    def test_nodes_of_a_new_divisor_keep_their_order_and_parents(self):
        bench = Bench()
        bench.feed(self.node(1, 0, 48), self.node(3, 64, 96, 2))
        bench.feed(self.node(2, 48, 64, 1), self.node(4, 0, 24))
        assert bench.stats.rebuilds == 1
        assert {len(block.tokens) for block in bench.router.blocks.values()} == {8}
        assert bench.announced().blocks == bench.router.blocks
        assert bench.router.orphans <= 2
        bench.feed(removed([3]), removed([1, 4]), removed([2]))
        assert bench.live == set()
        assert bench.router.violations == []

    def test_other_groups_and_blocks_half_gone_are_announced_anew_with_them(self):
        bench = Bench()
        bench.feed(store([50, 51], group=1), self.node(1, 0, 48), self.node(2, 48, 96, 1))
        bench.feed(removed([50], group=1), self.node(3, 0, 16))
        assert bench.stats.rebuilds == 1
        assert {(group, block) for group, _, block in bench.router.blocks if group} == {(1, 51)}
        assert len(bench.live) == 1 + 6
        assert bench.announced().blocks == bench.router.blocks

    def test_a_chunk_with_a_hole_is_cut_once(self):
        bench = Bench(block_size=16)
        bench.feed(store([1, 2, 3], block_size=32))
        bench.feed(removed([2]))
        before = dict(bench.router.blocks)
        bench.feed(store([9], group=4, block_size=32))
        bench.feed(store([8, 7], group=4))
        assert bench.stats.rebuilds == 1
        assert {key: block for key, block in bench.router.blocks.items() if key[0] is None} == before
        bench.feed(removed([1, 3]))
        assert bench.live == {7, 8}
        assert bench.router.violations == []


def test_a_root_without_a_parent_leaves_with_none_behind_any_event():
    bench = Bench()
    bench.feed(store([1]))
    root = store([3])
    del root["parent_block_hash"]
    batch = decode(payload(store([2], 77), root))
    assert isinstance(batch, Batch)
    out = bench.normalizer.apply(batch)
    assert [event.parent_block_hash for event in out if isinstance(event, BlockStored)] == [77, None]


def test_a_copy_of_blocks_that_several_stores_have_is_compared_with_each():
    bench = Bench()
    bench.feed(store([1, 2, 3]))
    bench.feed(store([4], 3))
    bench.feed(removed([2]))
    assert names(bench.feed(store([1, 3, 4]))) == []
    assert bench.rejected == {}
    assert names(bench.feed(store([3, 1, 4], tokens=[*tokens_of(3), *[9] * 16, *tokens_of(4)]))) == []
    assert bench.rejected == {Reason.HASH_COLLISION: 1}
