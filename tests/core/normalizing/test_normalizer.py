"""What an engine says, and what a router may rely on: by example."""

import pytest
from msgspec import Raw

from kvbus.core.normalizing.block_size import RELEARN_EVENTS
from kvbus.core.types import Filtered, Reason
from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, payload, plain_all, removed, store, tokens_of


def run_of(*blocks):
    """Tokens of several blocks of 16 in a row."""
    return [token for block in blocks for token in tokens_of(block)]


# every reason and filter that concerns one event: what was there before, the event, what is counted
REASONS = [
    (Reason.UNKNOWN_EVENT, [], {"type": "BlockMoved", "block_hashes": [5]}),
    (Reason.MISSING_FIELD, [], {"type": "BlockRemoved"}),
    (Reason.WRONG_TYPE, [], store([5]) | {"block_size": "16"}),
    (Reason.WRONG_TYPE, [], store([5], tokens=["a"] * 16)),
    (Reason.INTEGER_RANGE, [], store([5], lora_id=-1)),
    (Reason.INTEGER_RANGE, [store([5])], removed([5], group=2**32)),
    (Reason.TOKEN_RANGE, [], store([5], tokens=[-1] * 16)),
    (Reason.TOKEN_RANGE, [], store([5], tokens=[2**32] * 16)),
    (Reason.TOKEN_COUNT, [], store([5], tokens=[1] * 15)),
    (Reason.HASH_KIND, [], store(["5"], tokens=[1] * 16)),
    (Reason.HASH_KIND, [], store([5, b"x"])),
    (Reason.HASH_KIND, [], store([b""])),
    (Reason.HASH_KIND, [store([9])], store([b"x" * 32])),
    (Reason.HASH_COLLISION, [store([5])], store([5], tokens=[1] * 16)),
    (Reason.BLOCK_SIZE, [], store([5], tokens=[1] * 16, block_size=-1)),
    (Reason.BLOCK_SIZE, [store([n, n + 1]) for n in range(10, 20, 2)], store([5, 6], block_size=7)),
    (Reason.BLOCK_SIZE, [store([n, n + 1]) for n in range(10, 20, 2)], store([5, 6], block_size=8)),
    (Reason.BLOCK_SIZE, [store([8, 9])], store([5], block_size=24)),
    (Reason.DUPLICATE_HASH, [], store([5, 5])),
    (Reason.SELF_PARENT, [], store([5], 5)),
    (Reason.SELF_PARENT, [], store([5, 6], 6)),
    (Reason.UNKNOWN_MEDIUM, [], store([5], medium="HBM")),
    (Reason.UNKNOWN_MEDIUM, [store([5])], removed([5], medium="HBM")),
]
FILTERS = [
    (Filtered.GROUP, [], store([5], group=1, kv_cache_spec_kind="sliding_window")),
    (Filtered.GROUP, [], store([5], group=1, kv_cache_spec_kind="mamba")),
    (Filtered.GROUP, [store([5], group=1, kv_cache_spec_kind="mamba")], removed([5], group=1)),
    (Filtered.COARSE, [store([8, 9])], store([5], block_size=128)),
    (Filtered.COARSE, [store([8, 9]), store([5], block_size=128)], removed([5])),
    (Filtered.TAIL, [store([8, 9])], store([5], block_size=8)),
    (Filtered.TAIL, [store([8, 9])], store([5], 1, block_size=7)),
    (Filtered.TAIL, [store([8, 9]), store([5], block_size=8)], store([5], block_size=8)),
    (Filtered.TAIL, [store([8, 9]), store([5], block_size=8)], removed([5])),
    (Filtered.TAIL, [store([8, 9], group=3), store([5], group=3, block_size=8)], removed([5])),
    (Filtered.UNKNOWN_BLOCK, [store([8, 9]), store([5], block_size=8), removed([5])], removed([5])),
    (Filtered.COPY, [store([5])], store([5])),
    (Filtered.COPY, [store([5]), store([5])], removed([5])),
    (Filtered.NO_HASHES, [], store([], tokens=[1] * 16)),
    (Filtered.NO_HASHES, [], removed([])),
    (Filtered.TOKENLESS, [], store([5], tokens=[], block_size=0)),
    (Filtered.UNKNOWN_BLOCK, [], removed([5])),
    (Filtered.UNKNOWN_BLOCK, [store([5])], removed([5], medium="CPU")),
    (Filtered.UNKNOWN_BLOCK, [store([5], group=0)], removed([5], group=1)),
]


class TestReasons:
    @pytest.mark.parametrize(("reason", "before", "event"), REASONS, ids=[f"{r[0]}-{i}" for i, r in enumerate(REASONS)])
    def test_a_bad_event_is_counted_and_the_rest_of_its_batch_lives(self, reason, before, event):
        bench = Bench()
        bench.feed(store([1, 2]), *before)
        out = bench.feed(store([3], 2), event, removed([1]))
        assert bench.rejected == {reason: 1}
        assert out == plain_all([store([3], 2), removed([1])])
        assert {2, 3} <= bench.live
        assert bench.router.violations == []

    @pytest.mark.parametrize(("reason", "before", "event"), FILTERS, ids=[f"{r[0]}-{i}" for i, r in enumerate(FILTERS)])
    def test_a_filtered_event_is_counted_and_the_rest_of_its_batch_lives(self, reason, before, event):
        bench = Bench()
        bench.feed(store([1, 2]), *before)
        bench.stats.filtered.clear()
        out = bench.feed(store([3], 2), event, removed([1]))
        assert bench.filtered == {reason: 1}
        assert bench.rejected == {}
        assert out == plain_all([store([3], 2), removed([1])])
        assert bench.router.violations == []

    def test_every_reason_of_an_event_is_provoked_somewhere(self):
        """The others are of whole messages and batches, or have tests of their own."""
        of_messages = {Reason.FRAME_COUNT, Reason.FRAME_SIZE, Reason.SEQ_WIDTH, Reason.SEQ_RANGE}
        of_messages |= {Reason.CONFLICT, Reason.OTHER_TOPIC}
        of_batches = {Reason.NOT_MSGPACK, Reason.NESTING, Reason.BATCH_SHAPE, Reason.TOO_MANY_EVENTS}
        of_limits = {Reason.INDEX_FULL, Reason.TOO_MANY_GROUPS}
        assert {reason for reason, _, _ in REASONS} == set(Reason) - of_messages - of_batches - of_limits
        others = {Filtered.ORPHAN_PASSED, Filtered.ORPHAN_DROPPED, Filtered.OTHER_RANK, Filtered.OLD_EPOCH}
        others |= {
            Filtered.TOPIC,
            Filtered.ODD_FIELD,
            Filtered.HASH_ONLY,
            Filtered.MEDIUM,
            Filtered.INACTIVE,
            Filtered.OUTLIVED,
        }
        assert {reason for reason, _, _ in FILTERS} == set(Filtered) - others

    def test_what_the_engine_sent_is_counted(self):
        bench = Bench()
        bench.feed(store([1]), store([1, 1]), removed([1]), removed([1], medium="HBM"), cleared())
        assert (bench.stats.stored, bench.stats.removed, bench.stats.cleared) == (2, 2, 1)


class TestWithoutMedia:
    """LMCache#5076: blocks on the CPU are announced, and never that one has gone."""

    def test_what_is_stored_there_is_left_out_and_counted(self):
        bench = Bench(without_media=frozenset({"CPU"}))
        for n in range(3):
            out = bench.feed(store([n, n + 10]), store([n, n + 10], medium="cpu"), store([n + 20], medium="DISK"))
            assert out == plain_all([store([n, n + 10]), store([n + 20], medium="DISK")])
        assert bench.filtered == {Filtered.MEDIUM: 3}
        assert bench.stats.stored == 9
        assert bench.feed(removed([0], medium="CPU")) == []
        assert bench.filtered[Filtered.UNKNOWN_BLOCK] == 1

    def test_a_clear_is_of_everything_then(self):
        """The tier that is left out is none that the clear leaves."""
        bench = Bench(without_media=frozenset({"CPU"}))
        bench.feed(store([1]), store([1], medium="CPU"), store([2], tokens=[], block_size=0, medium="CPU"))
        assert bench.feed(cleared()) == plain_all([cleared()])
        assert bench.normalizer.emptied


class TestCopies:
    @pytest.mark.parametrize("copies", [1, 2, 5])
    def test_stored_k_times_it_takes_k_removals(self, copies):
        bench = Bench()
        for i in range(copies):
            assert bench.feed(store([1])) == ([] if i else plain_all([store([1])]))
        for _ in range(copies - 1):
            assert bench.feed(removed([1])) == []
        assert bench.feed(removed([1])) == plain_all([removed([1])])
        assert bench.feed(removed([1])) == []
        assert bench.filtered[Filtered.UNKNOWN_BLOCK] == 1

    def test_copies_in_one_event_of_removals(self):
        bench = Bench()
        bench.feed(store([1]), store([1]))
        assert bench.feed(removed([1, 1])) == plain_all([removed([1])])

    def test_ignored_where_hits_are_announced_as_stores(self):
        bench = Bench(duplicates="ignore")
        bench.feed(store([1]), store([1]), store([1]))
        assert bench.feed(removed([1])) == plain_all([removed([1])])
        assert bench.filtered == {Filtered.COPY: 2}

    def test_of_a_store_half_known_the_new_half_leaves(self):
        bench = Bench()
        bench.feed(store([1, 2]))
        out = bench.feed(store([1, 2, 3, 4], extra_keys=[None, ["a"], ["b"], ["c"]]))
        assert out == plain_all([store([3, 4], 2, extra_keys=[["b"], ["c"]])])

    def test_each_new_run_leaves_behind_its_own_parent(self):
        bench = Bench()
        bench.feed(store([2], 1), store([4], 3))
        assert bench.feed(store([1, 2, 3, 4, 5], 9)) == plain_all([store([1], 9), store([3], 2), store([5], 4)])
        assert bench.router.violations == []

    def test_a_copy_on_another_medium_is_a_block_of_its_own(self):
        bench = Bench()
        bench.feed(store([1]))
        assert bench.feed(store([1], medium="CPU")) == plain_all([store([1], medium="CPU")])
        assert bench.feed(removed([1])) == plain_all([removed([1])])
        assert bench.feed(removed([1], medium="CPU")) == plain_all([removed([1], medium="CPU")])

    def test_a_copy_in_another_group_is_a_block_of_its_own(self):
        bench = Bench(groups="all")
        bench.feed(store([1], group=0), store([1], group=1))
        assert bench.feed(removed([1], group=1)) == plain_all([removed([1], group=1)])
        assert {key[0] for key in bench.router.blocks} == {0}

    def test_a_collision_is_a_copy_all_the_same(self):
        """SGLang before 0.5.8 hashes a page without its prefix: equal hashes, other blocks, each with its own removal."""
        bench = Bench()
        bench.feed(store([1], tokens=[1] * 16), store([1], tokens=[2] * 16))
        assert bench.rejected == {Reason.HASH_COLLISION: 1}
        assert bench.feed(removed([1])) == []
        assert bench.feed(removed([1])) == plain_all([removed([1])])

    def test_equal_pages_in_two_places_are_copies(self):
        bench = Bench()
        bench.feed(store([1]), store([2], 1), store([1], 2))
        assert bench.live == {1, 2}
        assert bench.rejected == {}
        bench.feed(removed([1]))
        assert bench.live == {1, 2}


class TestWhatIsOutlived:
    def test_blocks_that_are_taken_for_gone_go_with_their_copies(self):
        bench = Bench()
        bench.feed(store([1, 2]), store([1, 2]), store([3], medium="CPU"))
        gone = bench.normalizer.outlived([(None, "GPU", 1), (None, "GPU", 2), (None, "CPU", 4), (7, "CPU", 3)])
        assert plain_all(gone) == plain_all([removed([2, 1])])
        assert bench.filtered[Filtered.OUTLIVED] == 2
        assert bench.normalizer.index.media() == {"GPU": 0, "CPU": 1}


class TestOrderWithinABatch:
    def test_removed_and_stored_again(self):
        bench = Bench()
        bench.feed(store([1]))
        assert bench.feed(removed([1]), store([1])) == plain_all([removed([1]), store([1])])
        assert bench.live == {1}

    def test_stored_and_removed(self):
        bench = Bench()
        assert bench.feed(store([1]), removed([1])) == plain_all([store([1]), removed([1])])
        assert bench.live == set()

    def test_stored_removed_and_stored(self):
        bench = Bench()
        bench.feed(store([1]), removed([1]), store([1]), store([1]), removed([1]))
        assert bench.live == {1}

    def test_cleared_in_the_middle(self):
        bench = Bench()
        bench.feed(store([1]))
        assert bench.feed(removed([1]), store([2]), cleared(), store([3])) == plain_all(
            [removed([1]), store([2]), cleared(), store([3])]
        )
        assert bench.live == {3}

    def test_removals_leave_leaf_first(self):
        bench = Bench()
        bench.feed(store([1, 2, 3]), store([4], 3))
        assert bench.feed(removed([1, 2]), removed([3]), removed([4])) == plain_all([removed([4, 3, 2, 1])])

    def test_a_copy_between_removals_is_not_between_them(self):
        bench = Bench()
        bench.feed(store([1, 2]), store([5]))
        bench.feed(removed([1]), store([5]), removed([2]))
        assert bench.router.violations == []

    @pytest.mark.parametrize(("first", "second"), [({"medium": None}, {}), ({}, {"group_idx": None})])
    def test_leaf_first_however_the_stores_spelled_their_medium_and_group(self, first, second):
        bench = Bench()
        bench.feed(store([1]) | first, store([2], 1) | second)
        bench.feed(removed([1, 2]))
        assert bench.router.violations == []

    def test_a_block_that_is_its_own_parent_and_lives_on_another_medium(self):
        bench = Bench()
        bench.feed(store([1], medium="CPU"), store([2]))
        bench.feed(store([1, 2], 1))
        assert bench.router.violations == []

    def test_a_store_between_removals_stays_between_them(self):
        bench = Bench()
        bench.feed(store([1, 2]))
        assert bench.feed(removed([1]), store([5]), removed([2])) == plain_all([removed([1]), store([5]), removed([2])])

    def test_removals_of_several_media_and_groups_stay_apart(self):
        bench = Bench()
        bench.feed(store([1, 2]), store([1, 2], medium="CPU"), store([1, 2], group=3))
        out = bench.feed(
            removed([1]), removed([1], medium="CPU"), removed([1], group=3), removed([2]), removed([2], medium="CPU")
        )
        assert out == plain_all([removed([2, 1]), removed([2, 1], medium="CPU"), removed([1], group=3)])

    def test_a_cycle_of_parents_is_removed_whole(self):
        bench = Bench()
        bench.feed(store([1], 2), store([2], 1))
        (event,) = bench.feed(removed([1, 2]))
        assert sorted(event["block_hashes"]) == [1, 2]
        assert bench.router.violations == []

    def test_parents_first_whatever_the_order_in_a_batch(self):
        bench = Bench()
        out = bench.feed(store([3], 2), store([2], 1), store([1]), store([5], 4))
        assert out == plain_all([store([1]), store([2], 1), store([3], 2), store([5], 4)])
        assert bench.router.orphans == 1

    def test_a_parent_that_is_there_is_not_waited_for(self):
        bench = Bench()
        bench.feed(store([1]))
        assert bench.feed(store([2], 1), store([1])) == plain_all([store([2], 1)])

    def test_a_batch_of_ten_thousand_in_the_wrong_order(self):
        bench = Bench()
        bench.feed(*[store([i], i - 1 or None) for i in range(10_000, 0, -1)])
        assert len(bench.live) == 10_000
        assert bench.router.orphans == 0


class TestOrphans:
    def test_passed_and_counted(self):
        bench = Bench()
        assert bench.feed(store([2], 1)) == plain_all([store([2], 1)])
        assert bench.filtered == {Filtered.ORPHAN_PASSED: 1}

    def test_dropped_and_counted(self):
        bench = Bench(orphans="drop")
        assert bench.feed(store([2], 1), store([3], 2), store([5])) == plain_all([store([5])])
        assert bench.filtered == {Filtered.ORPHAN_DROPPED: 2}

    def test_a_parent_on_another_medium_is_a_parent(self):
        bench = Bench(orphans="drop")
        bench.feed(store([1], medium="CPU"))
        assert bench.feed(store([2], 1)) == plain_all([store([2], 1)])

    def test_a_parent_in_another_group_is_none(self):
        bench = Bench(orphans="drop", groups="all")
        bench.feed(store([1], group=0))
        assert bench.feed(store([2], 1, group=1)) == []


class TestGroups:
    @pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", None])
    def test_kinds_that_carry_a_prefix_pass(self, kind):
        event = store([1], group=2, kv_cache_spec_kind=kind)
        assert Bench().feed(event) == plain_all([event])

    @pytest.mark.parametrize("kind", ["sliding_window", "sliding_window_mla", "chunked_local_attention", "mamba", "?"])
    def test_other_kinds_do_not(self, kind):
        event = store([1], group=2, kv_cache_spec_kind=kind)
        assert Bench().feed(event) == []
        assert Bench(groups="all").feed(event) == plain_all([event])

    def test_one_hash_with_two_block_sizes_in_two_groups(self):
        bench = Bench(groups="all")
        bench.feed(store([1], group=0), store([1], group=1, block_size=64))
        assert len(bench.router.blocks) == 2
        bench.feed(removed([1], group=0))
        assert {key[0] for key in bench.router.blocks} == {1}

    def test_a_removal_without_a_group_finds_the_only_one_that_has_it(self):
        bench = Bench()
        bench.feed(store([1], group=3))
        assert bench.feed(removed([1])) == plain_all([removed([1], group=3)])

    def test_a_removal_without_a_group_that_several_have_is_not_guessed(self):
        bench = Bench()
        bench.feed(store([1], group=3), store([1], group=4))
        assert bench.feed(removed([1])) == []
        assert bench.filtered == {Filtered.UNKNOWN_BLOCK: 1}

    def test_masked_blocks_of_a_group_that_is_left_out_are_filtered(self):
        bench = Bench()
        bench.feed(store([1], tokens=list(range(48)), group=1, kv_cache_spec_kind="mamba"))
        assert bench.rejected == {}
        assert bench.filtered == {Filtered.GROUP: 1}


class TestMedia:
    @pytest.mark.parametrize(("sent", "leaves"), [("cpu", "CPU"), ("gpu", "GPU"), ("Cpu_Pinned", "CPU_PINNED")])
    def test_names_leave_in_capitals(self, sent, leaves):
        bench = Bench()
        assert bench.feed(store([1], medium=sent)) == plain_all([store([1], medium=leaves)])
        assert bench.feed(removed([1], medium=sent)) == plain_all([removed([1], medium=leaves)])

    @pytest.mark.parametrize(("stored", "gone"), [(None, "GPU"), ("GPU", None), ("DEVICE", "GPU"), ("gpu", "DEVICE")])
    def test_a_removal_leaves_under_the_name_of_the_store(self, stored, gone):
        bench = Bench()
        (event,) = bench.feed(store([1], medium=stored))
        assert bench.feed(removed([1], medium=gone)) == plain_all([removed([1], medium=event.get("medium"))])


class TestTokenless:
    def test_tokens_come_from_another_medium(self):
        bench = Bench()
        bench.feed(store([1, 2, 3], lora_id=4))
        out = bench.feed(store([2, 3], tokens=[], block_size=0, medium="CPU"))
        assert out == plain_all([store([2, 3], 1, medium="CPU", lora_id=4)])

    @pytest.mark.parametrize("hashes", [[4], [1, 4]])
    def test_only_if_all_blocks_are_known(self, hashes):
        bench = Bench()
        bench.feed(store([1, 2, 3]))
        assert bench.feed(store(hashes, tokens=[], block_size=0, medium="CPU")) == []
        assert bench.filtered == {Filtered.TOKENLESS: 1}

    def test_a_block_offloaded_in_the_batch_that_removes_it(self):
        bench = Bench()
        bench.feed(store([1]))
        bench.feed(removed([1]), store([1], tokens=[], block_size=0, medium="CPU"))
        assert set(bench.router.blocks) == {(None, "CPU", 1)}

    def test_a_block_offloaded_in_the_batch_that_stored_it(self):
        bench = Bench()
        bench.feed(store([1]), store([1], tokens=[], block_size=0, medium="CPU"))
        assert set(bench.router.blocks) == {(None, "GPU", 1), (None, "CPU", 1)}


class TestVariableNodes:
    """One hash for a whole radix node of any number of pages (SGLang before fixed pages)."""

    TOKENS = tuple(range(1000, 1096))

    def bench(self):
        bench = Bench()
        bench.feed(store([900], block_size=16), store([901], block_size=32, tokens=list(range(32))))
        return bench

    def node(self, name, first, last, parent=None):
        return store([name], parent, tokens=list(self.TOKENS[first:last]), block_size=last - first)

    def test_nodes_are_cut_into_pages(self):
        bench = self.bench()
        (event,) = bench.feed(self.node(1, 0, 96))
        assert (len(event["block_hashes"]), event["block_size"], event["token_ids"]) == (6, 16, list(self.TOKENS))
        assert 1 not in event["block_hashes"]

    def test_a_child_hangs_on_the_last_page_of_its_parent(self):
        bench = self.bench()
        (first,) = bench.feed(self.node(1, 0, 48))
        (second,) = bench.feed(self.node(2, 48, 96, 1))
        assert second["parent_block_hash"] == first["block_hashes"][-1]

    def test_a_split_keeps_the_derived_names(self):
        bench = self.bench()
        (whole,) = bench.feed(self.node(1, 0, 96))
        (leaf,) = bench.feed(store([9], 1, tokens=list(range(16))))
        before = dict(bench.router.blocks)
        bench.feed(removed([1]), self.node(2, 0, 32), self.node(3, 32, 96, 2))
        assert bench.router.blocks == before
        assert {*whole["block_hashes"], *leaf["block_hashes"]} <= bench.live

    def test_after_a_split_the_halves_are_announced_before_what_hangs_on_them(self):
        bench = self.bench()
        bench.feed(self.node(1, 0, 48), self.node(2, 48, 96, 1))
        bench.feed(removed([1]), self.node(3, 0, 16), self.node(4, 16, 48, 3))
        announced = bench.announced()
        assert announced.blocks == bench.router.blocks
        assert announced.orphans == 0

    def test_a_removal_removes_the_pages(self):
        bench = self.bench()
        there = bench.live
        (event,) = bench.feed(self.node(1, 0, 96))
        (gone,) = bench.feed(removed([1]))
        assert gone["block_hashes"] == event["block_hashes"][::-1]
        assert bench.live == there

    def test_pages_two_nodes_share_live_as_long_as_one_of_them(self):
        bench = self.bench()
        there = bench.live
        bench.feed(self.node(1, 0, 32))
        (more,) = bench.feed(self.node(2, 0, 48))
        assert len(more["block_hashes"]) == 1
        (gone,) = bench.feed(removed([2]))
        assert gone["block_hashes"] == more["block_hashes"]
        bench.feed(removed([1]))
        assert bench.live == there
        assert bench.router.violations == []

    def test_what_was_learned_late_is_put_right(self):
        bench = Bench()
        bench.feed(self.node(1, 0, 96))
        out = bench.feed(self.node(2, 0, 32))
        assert out[0] == cleared()
        assert bench.stats.rebuilds == 1
        assert {len(block.tokens) for block in bench.router.blocks.values()} == {32}
        assert len(bench.live) == 3

    def test_a_node_of_another_divisor_cuts_everything_finer(self):
        bench = self.bench()
        bench.feed(self.node(1, 0, 96))
        bench.feed(self.node(2, 0, 24))
        assert {len(block.tokens) for block in bench.router.blocks.values()} == {8}
        bench.feed(removed([1, 2, 900, 901]))
        assert bench.live == set()

    def test_salts_tell_equal_tokens_apart(self):
        bench = self.bench()
        (one,) = bench.feed(self.node(1, 0, 32) | {"cache_salt": "a"})
        (other,) = bench.feed(self.node(2, 0, 32) | {"cache_salt": "b"})
        assert not set(one["block_hashes"]) & set(other["block_hashes"])

    def test_pages_of_several_nodes_leave_leaf_first(self):
        bench = self.bench()
        bench.feed(self.node(1, 0, 48), self.node(2, 48, 96, 1))
        bench.feed(removed([1, 2]))
        assert bench.router.violations == []

    def test_a_page_two_nodes_share_is_announced_once(self):
        bench = self.bench()
        bench.feed(self.node(1, 0, 32), self.node(2, 0, 48))
        announced = bench.announced()
        assert announced.blocks == bench.router.blocks
        assert announced.violations == []


class TestPinnedBlockSize:
    def test_coarse_blocks_are_cut(self):
        bench = Bench(block_size=16)
        (event,) = bench.feed(store([1, 2], block_size=64))
        assert (len(event["block_hashes"]), event["block_size"]) == (8, 16)
        (gone,) = bench.feed(removed([1]))
        assert gone["block_hashes"] == event["block_hashes"][3::-1]
        assert bench.announced().blocks == bench.router.blocks

    def test_a_coarse_block_that_came_before_the_pinned_size_is_taken_back(self):
        bench = Bench(block_size=16)
        bench.feed(store([99], block_size=64, tokens=run_of(1, 2, 3, 4)))
        bench.feed(store([1, 2, 3, 4]))
        assert bench.live == {1, 2, 3, 4}

    def test_blocks_of_that_size_keep_their_names(self):
        assert Bench(block_size=16).feed(store([1, 2])) == plain_all([store([1, 2])])

    @pytest.mark.parametrize(("names", "size"), [([1, 2], 8), ([1], 24), ([1], 100)])
    def test_what_is_no_multiple_is_rejected(self, names, size):
        bench = Bench(block_size=16)
        assert bench.feed(store(names, block_size=size)) == []
        assert bench.rejected == {Reason.BLOCK_SIZE: 1}

    def test_bytes_give_bytes(self):
        (event,) = Bench(block_size=16).feed(store([b"x" * 32], block_size=64))
        assert {len(name) for name in event["block_hashes"]} == {32}

    def test_the_size_shows(self):
        bench = Bench(block_size=16)
        assert bench.normalizer.block_size == 16
        bench.feed(store([1], block_size=64))
        assert bench.normalizer.block_size == 16
        learned = Bench()
        assert learned.normalizer.block_size is None
        learned.feed(store([1], block_size=64))
        assert learned.normalizer.block_size == 64


class TestATierWithLargerBlocks:
    """LMCache keeps chunks of 256 tokens on the CPU, of an engine whose device has blocks of 16."""

    CHUNK = run_of(*range(1, 17))

    def chunk(self, name=9001, parent=None, **more):
        return store([name], parent, block_size=256, tokens=self.CHUNK, medium="CPU", **more)

    def on_cpu(self, bench):
        return sum(key[1] == "CPU" for key in bench.router.blocks)

    @pytest.mark.parametrize("group", [None, 0])
    @pytest.mark.parametrize("first", ["device", "tier"])
    def test_they_leave_in_blocks_of_the_devices_size_and_go_with_their_removal(self, group, first):
        bench = Bench()
        events = [store(list(range(1, 17)), group=group), self.chunk(group=group)]
        for event in events if first == "device" else events[::-1]:
            bench.feed(event)
        assert (self.on_cpu(bench), len(bench.router.blocks)) == (16, 32)
        assert bench.announced().blocks == bench.router.blocks
        bench.feed(removed(list(range(1, 17)), group=group))
        assert (self.on_cpu(bench), len(bench.router.blocks)) == (16, 16)
        assert bench.router.path(group, bench.feed(self.chunk(9002, 9001, group=group))[0]["block_hashes"][-1])
        bench.feed(removed([9002], medium="CPU", group=group), removed([9001], medium="CPU", group=group))
        assert bench.router.blocks == {}
        assert bench.router.violations == []
        assert bench.rejected == {}

    def test_single_blocks_of_the_device_stay_what_they_are(self):
        """A decoding engine announces block after block, so nothing has proven their size."""
        bench = Bench()
        for block in range(1, 9):
            bench.feed(store([block], block - 1 or None))
        bench.feed(self.chunk())
        bench.feed(store([9], 8))
        assert {key[2] for key in bench.router.blocks if key[1] == "GPU"} == set(range(1, 10))
        assert self.on_cpu(bench) == 16

    def test_many_stores_of_several_larger_blocks_do_not_overrule_the_device(self):
        bench = Bench()
        bench.feed(store([1, 2]))
        for at in range(2 * RELEARN_EVENTS):
            bench.feed(store([9000 + 2 * at, 9001 + 2 * at], block_size=64, medium="CPU"))
        bench.feed(store([3, 4], 2))
        assert {key[2] for key in bench.router.blocks if key[1] == "GPU"} == {1, 2, 3, 4}
        assert self.on_cpu(bench) == 2 * RELEARN_EVENTS * 2 * 4

    def test_they_repeat_smaller_ones_on_a_tier_that_has_both(self):
        bench = Bench()
        bench.feed(store(list(range(1, 17))), self.chunk())
        bench.feed(store(list(range(1, 17)), medium="CPU"))
        assert {key[2] for key in bench.router.blocks if key[1] == "CPU"} == set(range(1, 17))
        bench.feed(removed([9001], medium="CPU"))
        assert self.on_cpu(bench) == 16
        assert bench.router.violations == []

    def test_where_the_tier_has_smaller_ones_first_nothing_is_announced_again(self):
        bench = Bench()
        bench.feed(store([1, 2]), store([1, 2], medium="CPU"))
        bench.feed(self.chunk())
        assert (self.on_cpu(bench), bench.stats.rebuilds) == (2, 0)
        assert bench.filtered == {Filtered.COARSE: 1}

    def test_a_restart_goes_on_with_what_was_learned(self):
        bench = Bench()
        bench.feed(store([1, 2]), self.chunk(), store([1], medium="DISK"))
        bench.restart()
        bench.feed(store([99], block_size=64, medium="DISK"))
        assert bench.filtered == {Filtered.COARSE: 1}
        bench.feed(removed([9001], medium="CPU"))
        assert self.on_cpu(bench) == 0


class TestTwoGranularities:
    def test_the_coarse_duplicate_is_left_out(self):
        bench = Bench()
        bench.feed(store([1, 2, 3, 4]))
        assert bench.feed(store([99], block_size=64, tokens=run_of(1, 2, 3, 4))) == []
        assert bench.filtered == {Filtered.COARSE: 1}
        assert bench.feed(removed([99])) == []
        assert bench.live == {1, 2, 3, 4}

    def test_in_one_batch_it_does_not_matter_which_comes_first(self):
        bench = Bench()
        out = bench.feed(store([99], block_size=64, tokens=run_of(1, 2, 3, 4)), store([1, 2, 3, 4]))
        assert out == plain_all([store([1, 2, 3, 4])])

    def test_a_coarse_block_that_came_first_is_taken_back(self):
        bench = Bench()
        bench.feed(store([99], block_size=64, tokens=run_of(1, 2, 3, 4)))
        bench.feed(store([1, 2, 3, 4]))
        assert bench.live == {1, 2, 3, 4}
        bench.feed(removed([99]))
        assert bench.filtered == {Filtered.COARSE: 2}
        assert bench.live == {1, 2, 3, 4}

    def test_a_coarse_block_with_the_name_of_a_fine_one(self):
        """Hybrid models: the coarse hash equals the fine one at that boundary."""
        bench = Bench()
        bench.feed(store([1, 2, 3, 4]), store([4], block_size=64, tokens=run_of(1, 2, 3, 4)))
        bench.feed(removed([4]))
        assert bench.live == {1, 2, 3, 4}
        bench.feed(removed([4]))
        assert bench.live == {1, 2, 3}

    def test_several_coarse_blocks_that_came_first_cost_no_fine_one(self):
        bench = Bench()
        bench.feed(store([98, 99], block_size=64))
        for i in range(0, 100, 2):
            bench.feed(store([i, i + 1]))
        assert bench.rejected == {}
        assert bench.live == set(range(100))

    def test_an_odd_first_event_does_not_overrule_all_that_follow(self):
        bench = Bench()
        bench.feed(store([7], block_size=7))
        for i in range(100, 300, 2):
            bench.feed(store([i, i + 1]))
        assert bench.live >= set(range(100, 300))

    @pytest.mark.parametrize("before", [0, 1, 4])
    def test_nor_do_several_odd_blocks_in_one_event(self, before):
        bench = Bench()
        for i in range(before):
            bench.feed(store([1000 + 2 * i, 1001 + 2 * i]))
        bench.feed(store([7, 8], block_size=6))
        for i in range(100, 300, 2):
            bench.feed(store([i, i + 1]))
        assert bench.live >= set(range(200, 300))


def whole(*names, parent=None):
    return store(list(names), parent, block_size=64, group=0)


def tail(name, parent=None, size=16, **more):
    return store([name], parent, block_size=size, **{"group": 0, **more})


class TestTails:
    """vLLM with partial hits: the end of a prompt is announced as one block smaller than those of its group."""

    @pytest.mark.parametrize("rules", [{}, {"block_size": 64}], ids=["learned", "pinned"])
    def test_prompts_that_never_fill_two_blocks(self, rules):
        """None of their events holds several blocks."""
        bench = Bench(**rules)
        for n in range(1, 70):
            assert bench.feed(whole(n), tail(1000 + n, n)) == plain_all([whole(n)])
        assert bench.live == set(range(1, 70))
        assert bench.stats.rebuilds == 0
        assert bench.filtered == {Filtered.TAIL: 69}

    def test_one_that_comes_first_is_taken_back(self):
        bench = Bench()
        assert bench.feed(tail(1001)) == plain_all([tail(1001)])
        bench.feed(whole(1))
        assert bench.live == {1}
        assert bench.feed(removed([1001], group=0)) == []
        assert bench.filtered == {Filtered.TAIL: 2}

    @pytest.mark.parametrize("rules", [{}, {"block_size": 64}], ids=["learned", "pinned"])
    def test_one_that_is_promoted_to_a_whole_block(self, rules):
        """The engine removes it when the block it is the beginning of is full."""
        bench = Bench(**rules)
        bench.feed(whole(1, 2), tail(1002, 2), tail(1003, 1002))
        out = bench.feed(removed([1002], group=0), removed([1003], group=0), whole(3, parent=2))
        assert out == plain_all([whole(3, parent=2)])
        assert bench.normalizer.entries == 3
        assert bench.filtered == {Filtered.TAIL: 4}
        assert bench.rejected == {}

    @pytest.mark.parametrize("block_size", [16, 32])
    def test_one_among_blocks_that_are_cut(self, block_size):
        bench = Bench(block_size=block_size)
        bench.feed(tail(1001))
        bench.feed(whole(1, 2))
        there = bench.live
        assert len(there) == 2 * 64 // block_size
        bench.feed(tail(1002, 2), tail(1003, 1002, 32))
        bench.feed(whole(3, parent=2), tail(1001))
        assert there < bench.live
        assert len(bench.live) == 3 * 64 // block_size
        assert bench.announced().blocks == bench.router.blocks

    @pytest.mark.parametrize(("duplicates", "left"), [("count", 1), ("ignore", 0)])
    def test_its_copies(self, duplicates, left):
        bench = Bench(duplicates=duplicates)
        bench.feed(whole(1, 2), tail(9), tail(9))
        bench.feed(removed([9], group=0))
        assert bench.normalizer.entries == 2 + left
        bench.feed(removed([9], group=0))
        assert bench.normalizer.entries == 2

    def test_it_goes_with_its_tier(self):
        bench = Bench()
        bench.feed(whole(1, 2), tail(9), tail(9, medium="cpu"))
        bench.feed(cleared())
        assert bench.normalizer.entries == 1
        bench.feed(removed([9], medium="CPU", group=0))
        assert bench.normalizer.entries == 0
        bench.feed(whole(1, 2), tail(9), tail(9, medium="CPU"))
        bench.feed(cleared(), cleared())
        assert bench.normalizer.entries == 0

    def test_it_counts_towards_the_limit(self):
        bench = Bench(max_blocks=4)
        bench.feed(whole(1, 2), tail(8), tail(9), tail(10))
        assert bench.rejected == {Reason.INDEX_FULL: 1}
        assert not bench.normalizer.full, "no block of a router's is missing"
        bench.feed(whole(3))
        assert bench.rejected == {Reason.INDEX_FULL: 2}
        bench.feed(removed([8], group=0), removed([9], group=0), whole(3))
        assert bench.live == {1, 2, 3}

    def test_they_take_their_room(self):
        bench = Bench(max_blocks=14)
        bench.feed(*[whole(n, n + 1, parent=n - 1 or None) for n in range(1, 12, 2)], tail(99, 12))
        assert bench.feed(whole(13, parent=12)) == plain_all([whole(13, parent=12)])
        bench.feed(whole(14, parent=13))
        assert bench.rejected == {Reason.INDEX_FULL: 1}

    @pytest.mark.parametrize("coarse", [[whole(90)], [whole(90, 91)]], ids=["alone", "several"])
    def test_a_finer_stream_that_was_taken_for_them_is_told_after_all(self, coarse):
        bench = Bench()
        fine = [store([n], n - 1 or None, group=0) for n in range(1, 5)]
        bench.feed(*coarse)
        bench.feed(*fine, store([4], 3, group=0))
        assert bench.live == {name for event in coarse for name in event["block_hashes"]}
        bench.feed(store([5, 6], 4, group=0))
        assert bench.live == {1, 2, 3, 4, 5, 6}
        assert bench.router.orphans == 0
        bench.feed(removed([4], group=0))
        assert 4 in bench.live, "it has a copy"
        bench.feed(removed([6, 5, 4, 3, 2, 1], group=0), removed([90], group=0))
        assert bench.live == set()
        assert bench.router.violations == []


class TestFields:
    def test_unknown_fields_are_carried_through(self):
        event = store([1, 2], novelty={"a": [1, b"x"]}, other=None)
        bench = Bench()
        assert bench.feed(event) == plain_all([event])
        assert plain_all(bench.normalizer.announce()) == plain_all([event])

    def test_and_by_each_part_of_an_event_that_is_cut(self):
        bench = Bench()
        bench.feed(store([2], 1))
        assert bench.feed(store([1, 2, 3], novelty=1)) == plain_all([store([1], novelty=1), store([3], 2, novelty=1)])

    def test_carried_fields_come_back_when_announced(self):
        fields = {
            "lora_id": 3,
            "lora_name": "a",
            "locality": "LOCAL",
            "ownership": "o",
            "session_id": "s",
            "cache_salt": "c",
            "lookahead_token_ids": [[1], [2]],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            "kv_cache_spec_sliding_window": 5,
            "extra_keys": [None, ["x"]],
        }
        event = store([1, 2], **fields)
        bench = Bench()
        assert bench.feed(event) == plain_all([event])
        assert plain_all(bench.normalizer.announce()) == plain_all([event])

    def test_lists_with_an_entry_per_block_are_cut_with_their_blocks(self):
        bench = Bench()
        keys = [["a"], None, [b"b", ["c", 3]], ["d"]]
        ahead = [[5], [6], [7], []]
        images = [[], [{"hash": "a"}], [], [{"hash": "b"}]]
        bench.feed(store([2], 1))
        assert bench.feed(store([1, 2, 3, 4], extra_keys=keys, lookahead_token_ids=ahead, mm_keys=images)) == plain_all(
            [
                store([1], extra_keys=[["a"]], lookahead_token_ids=[[5]], mm_keys=[[]]),
                store([3, 4], 2, extra_keys=keys[2:], lookahead_token_ids=ahead[2:], mm_keys=images[2:]),
            ]
        )
        bench.feed(removed([3]))
        (_, _, fourth) = plain_all(bench.normalizer.announce())
        assert fourth == plain_all([store([4], 3, extra_keys=[["d"]], lookahead_token_ids=[[]], mm_keys=images[3:])])[0]

    def test_sub_blocks_have_none_of_them(self):
        bench = Bench(block_size=8)
        (event,) = bench.feed(store([1, 2], extra_keys=[None, None], lookahead_token_ids=[[5], [6]], mm_keys=[[], []]))
        assert not {"lookahead_token_ids", "mm_keys"} & event.keys()

    def test_extra_keys_of_null_stay_null(self):
        bench = Bench()
        bench.feed(store([1, 2]) | {"extra_keys": None})
        bench.feed(removed([1]))
        assert plain_all(bench.normalizer.announce()) == plain_all([store([2], 1)])

    @pytest.mark.parametrize("keys", [5, True, 1.5, {"a": 1}, Raw(b"\x91\xa1\xff")], ids=range(5))
    def test_extra_keys_that_are_no_list(self, keys):
        bench = Bench()
        bench.feed(store([1]))
        raw = payload(store([1, 2]) | {"extra_keys": keys}, store([3]))
        bench.feed(raw=raw)
        assert bench.live == {1, 2, 3}
        assert bench.filtered == {Filtered.COPY: 1, Filtered.ODD_FIELD: 1}

    def test_pairs_of_eagle_pass_and_are_cut(self):
        pairs = [[i, i + 1] for i in range(32)]
        bench = Bench()
        bench.feed(store([2], 1, tokens=pairs[16:]))
        (event,) = bench.feed(store([1, 2], tokens=pairs))
        assert event["token_ids"] == pairs[:16]
        assert bench.rejected == {}


class TestLimit:
    def test_what_does_not_fit_is_counted_and_what_is_told_stays_true(self):
        bench = Bench(max_blocks=3)
        assert bench.feed(store([1, 2]), store([3, 4]), store([5])) == plain_all([store([1, 2]), store([5])])
        assert bench.rejected == {Reason.INDEX_FULL: 1}
        assert bench.normalizer.full
        assert bench.live == {1, 2, 5}
        bench.feed(removed([3, 4, 1]))
        assert bench.live == {2, 5}
        assert bench.feed(store([6])) == plain_all([store([6])])

    def test_full_until_it_is_cleared(self):
        bench = Bench(max_blocks=1)
        bench.feed(store([1]), store([2]))
        assert bench.normalizer.full
        bench.feed(cleared())
        assert not bench.normalizer.full

    def test_copies_are_counted_at_the_limit_too(self):
        bench = Bench(max_blocks=1)
        bench.feed(store([1]), store([1]))
        bench.feed(removed([1]))
        assert bench.live == {1}

    def test_copies_of_what_is_left_out_are_counted_too(self):
        """Hybrid models: the coarse block has the name of a fine one, which would go in its place."""
        bench = Bench(max_blocks=3)
        bench.feed(store([1, 2]), store([2], block_size=32), store([2], block_size=32))
        bench.feed(removed([2]), removed([2]))
        assert bench.live == {1, 2}
        assert bench.rejected == {}

    def test_a_coarse_block_that_is_not_remembered_may_cost_a_fine_one(self):
        bench = Bench(max_blocks=2)
        bench.feed(store([1, 2]), store([2], block_size=32))
        bench.feed(removed([2]))
        assert bench.live == {1}
        assert bench.normalizer.full, "and that is known"

    def test_a_device_clear_does_not_make_the_host_tier_whole(self):
        bench = Bench(max_blocks=1)
        bench.feed(store([1], medium="CPU"), store([2], medium="CPU"))
        bench.feed(cleared())
        assert bench.normalizer.full


class TestLearned:
    """What is known of the stream, for those who ask."""

    def test_of_the_beginning_nothing_is_known(self):
        normalizer = Bench().normalizer
        assert (normalizer.block_size, normalizer.engine_block_size, normalizer.first_group) == (None, 0, None)
        assert (normalizer.dump()["media"], normalizer.known_groups, normalizer.only_without_prefix) == ([], 0, False)
        assert normalizer.clears.empty
        assert not normalizer.clears.tiers_unknown

    def test_the_first_group_with_a_size_is_the_one_that_shows(self):
        bench = Bench()
        bench.feed(store([1], group=4, kv_cache_spec_kind="mamba"))
        assert bench.normalizer.only_without_prefix
        bench.feed(store([2, 3], group=2, block_size=32), store([4, 5], group=3, medium="cpu"))
        normalizer = bench.normalizer
        assert (normalizer.block_size, normalizer.engine_block_size, normalizer.first_group) == (32, 32, 2)
        assert (normalizer.dump()["media"], normalizer.known_groups) == (["CPU", "GPU"], 3)
        assert not normalizer.only_without_prefix

    def test_radix_nodes_have_no_size_of_their_own(self):
        bench = Bench()
        bench.feed(store([1], block_size=32), store([2], block_size=48))
        assert (bench.normalizer.block_size, bench.normalizer.engine_block_size) == (16, 0)

    @pytest.mark.parametrize("rules", [{}, {"block_size": 64}])
    def test_a_group_whose_size_is_unknown_shows_what_the_operator_said(self, rules):
        bench = Bench(**rules)
        bench.feed(store([1], tokens=[], block_size=0), store([2], tokens=[1] * 8, block_size=8))
        assert bench.normalizer.engine_block_size == (0 if rules else 8)
        assert bench.normalizer.block_size == rules.get("block_size", 8)

    def test_what_an_unreadable_event_cost_is_counted_once(self):
        bench = Bench()
        assert bench.feed({"type": "Nonsense"}, store([1]), {"type": "Nonsense"}) == plain_all([store([1])])
        assert bench.rejected == {Reason.UNKNOWN_EVENT: 2}


class TestRestart:
    def test_what_was_learned_goes_on(self):
        bench = Bench(max_blocks=4)
        bench.feed(cleared(), store([1, 2], group=1), store([90], group=1, block_size=32), first_of_epoch=True)
        bench.feed(store([1, 2], group=1, medium="CPU"), store([90], group=1, block_size=32), cleared())
        bench.feed(store([1, 2], group=1), store([90], group=1, block_size=32))
        bench.feed(store([90], group=1, block_size=32), store([8, 9], group=1, medium="DISK"))
        before = bench.normalizer.dump()
        assert before["refused"] == [("DISK", "index_full")]
        bench.restart()
        assert bench.normalizer.dump() == before
        normalizer = bench.normalizer
        assert (normalizer.full, normalizer.entries, normalizer.engine_block_size) == (True, 3, 16)
        bench.stats.filtered.clear()
        bench.feed(removed([90], group=1), removed([90], group=1), removed([90], group=1))
        assert bench.filtered == {Filtered.COARSE: 2, Filtered.UNKNOWN_BLOCK: 1}
        bench.feed(store([1], group=1, medium="CPU"), cleared())
        assert bench.router.blocks == {}

    def test_an_epochs_beginning_that_was_taken_for_over_stays_so(self):
        bench = Bench()
        bench.feed(store([1]), cleared())
        bench.normalizer.clears.take_for_empty()
        bench.restart()
        bench.feed(store([1], medium="CPU"))
        assert bench.normalizer.clears.tiers_unknown

    def test_blocks_put_in_behind_its_back_are_counted(self):
        """As a checkpoint does: blocks first, then what was learned."""
        bench, other = Bench(max_blocks=5), Bench()
        bench.feed(store([1, 2], block_size=32))
        other.feed(store([8, 9], block_size=32), store([7]))
        held = bench.normalizer.index_bytes + other.normalizer.index_bytes
        one, two = bench.normalizer, other.normalizer
        for mine, theirs in ((one.index, two.index), (one.tails, two.tails)):
            for key, table in theirs.tables.items():
                for block, chunk in table.blocks.items():
                    mine.table(*key).blocks[block] = chunk
        bench.normalizer.count()
        assert bench.normalizer.entries == 5
        assert bench.normalizer.index_bytes == held
        bench.feed(store([3], 2, block_size=32))
        assert bench.rejected == {Reason.INDEX_FULL: 1}


class TestAnnounce:
    def test_nothing_is_announced_by_nothing(self):
        assert list(Bench().normalizer.announce()) == []

    def test_everything_once_whatever_the_copies(self):
        bench = Bench()
        bench.feed(store([3], 2), store([1, 2]), store([1]), store([1], medium="CPU"), store([8, 9]), removed([8]))
        assert bench.announced().blocks == bench.router.blocks
        assert bench.announced().violations == []

    def test_a_reset_forgets(self):
        bench = Bench()
        bench.feed(store([1, 2]))
        bench.normalizer.reset()
        assert list(bench.normalizer.announce()) == []
        assert bench.feed(store([b"x" * 32], block_size=64)) == plain_all([store([b"x" * 32], block_size=64)])

    def test_a_reset_in_the_same_epoch_remembers_the_stream(self):
        bench = Bench(clears="auto", max_blocks=2)
        bench.feed(cleared(), store([1, 2]), store([3], medium="CPU"), first_of_epoch=True)
        bench.normalizer.reset(same_epoch=True)
        bench.router.blocks.clear()
        assert (bench.normalizer.full, bench.normalizer.entries, bench.normalizer.dump()["media"]) == (
            False,
            0,
            ["CPU", "GPU"],
        )
        assert bench.feed(store([b"x" * 32])) == []
        assert bench.rejected[Reason.HASH_KIND] == 1
        bench.feed(store([4], medium="CPU"), cleared())
        assert bench.live == set()
        bench.normalizer.reset()
        assert bench.normalizer.dump()["media"] == []
        assert bench.feed(store([b"x" * 32])) == plain_all([store([b"x" * 32])])
