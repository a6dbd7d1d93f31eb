"""Tests for the normalizer by example: the events that a router gets for the events of an engine."""

import pytest
from msgspec import Raw

from kvbus.core.normalizing.block_size import RELEARN_EVENTS
from kvbus.core.types import Filtered, Reason
from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, payload, plain_all, removed, store, tokens_of

# For each reason or filter that concerns one event: the events before, the event itself, and the expected counts.
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
    def test_a_bad_event_is_rejected_without_the_rest_of_its_batch(self, reason, before, event):
        bench = Bench()
        bench.feed(store([1, 2]), *before)
        out = bench.feed(store([3], 2), event, removed([1]))
        assert bench.rejected == {reason: 1}
        assert out == plain_all([store([3], 2), removed([1])])
        assert {2, 3} <= bench.live
        assert bench.router.violations == []

    @pytest.mark.parametrize(("reason", "before", "event"), FILTERS, ids=[f"{r[0]}-{i}" for i, r in enumerate(FILTERS)])
    def test_an_event_is_filtered_without_the_rest_of_its_batch(self, reason, before, event):
        bench = Bench()
        bench.feed(store([1, 2]), *before)
        bench.stats.filtered.clear()
        out = bench.feed(store([3], 2), event, removed([1]))
        assert bench.filtered == {reason: 1}
        assert bench.rejected == {}
        assert out == plain_all([store([3], 2), removed([1])])
        assert bench.router.violations == []

    def test_every_reason_to_reject_or_filter_an_event_has_a_case(self):
        """For each reason for which kvbus refuses or filters a single event, this module has a test that causes it.

        The reasons that are left out concern complete messages and batches, or have their own tests.
        """
        of_messages = {Reason.FRAME_COUNT, Reason.FRAME_SIZE, Reason.SEQ_WIDTH, Reason.SEQ_RANGE}
        of_messages |= {Reason.MESSAGE_SIZE, Reason.ZMTP, Reason.CONFLICT, Reason.OTHER_TOPIC}
        of_batches = {Reason.NOT_MSGPACK, Reason.NESTING, Reason.BATCH_SHAPE, Reason.TOO_MANY_EVENTS}
        of_limits = {Reason.INDEX_FULL, Reason.TOO_MANY_GROUPS, Reason.TOO_MANY_OWNERS}
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


class TestWithoutMedia:
    """Tests for media on which an engine announces stores and no removals, such as LMCache's CPU blocks
    (LMCache#5076).
    """

    def test_blocks_on_a_medium_of_without_media_are_filtered(self):
        bench = Bench(without_media=frozenset({"CPU"}))
        for n in range(3):
            out = bench.feed(store([n, n + 10]), store([n, n + 10], medium="cpu"), store([n + 20], medium="DISK"))
            assert out == plain_all([store([n, n + 10]), store([n + 20], medium="DISK")])
        assert bench.filtered == {Filtered.MEDIUM: 3}
        assert bench.stats.stored == 9
        assert bench.feed(removed([0], medium="CPU")) == []
        assert bench.filtered[Filtered.UNKNOWN_BLOCK] == 1


class TestFields:
    def test_lists_with_an_entry_per_block_are_divided_with_the_blocks(self):
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

    @pytest.mark.parametrize("keys", [5, True, 1.5, {"a": 1}, Raw(b"\x91\xa1\xff")], ids=range(5))
    def test_extra_keys_that_are_not_a_list_are_counted_as_odd(self, keys):
        bench = Bench()
        bench.feed(store([1]))
        raw = payload(store([1, 2]) | {"extra_keys": keys}, store([3]))
        bench.feed(raw=raw)
        assert bench.live == {1, 2, 3}
        assert bench.filtered == {Filtered.COPY: 1, Filtered.ODD_FIELD: 1}


class TestLearned:
    """Tests for the facts about the stream that the normalizer reports, such as its block sizes."""

    def test_the_reported_block_size_is_that_of_the_first_prefix_group(self):
        bench = Bench()
        bench.feed(store([1], group=4, kv_cache_spec_kind="mamba"))
        assert bench.normalizer.only_without_prefix
        bench.feed(store([2, 3], group=2, block_size=32), store([4, 5], group=3, medium="cpu"))
        normalizer = bench.normalizer
        assert (normalizer.block_size, normalizer.engine_block_size, normalizer.first_group) == (32, 32, 2)
        assert (normalizer.dump()["media"], normalizer.known_groups) == (["CPU", "GPU"], 3)
        assert not normalizer.only_without_prefix


def run_of(*blocks):
    """Return the tokens of several blocks of 16, one after the other."""
    return [token for block in blocks for token in tokens_of(block)]


class TestTwoGranularities:
    def test_a_coarse_block_is_removed_when_finer_blocks_arrive(self):
        bench = Bench()
        bench.feed(store([99], block_size=64, tokens=run_of(1, 2, 3, 4)))
        bench.feed(store([1, 2, 3, 4]))
        assert bench.live == {1, 2, 3, 4}
        bench.feed(removed([99]))
        assert bench.filtered == {Filtered.COARSE: 2}
        assert bench.live == {1, 2, 3, 4}

    def test_an_odd_first_block_size_does_not_overrule_later_blocks(self):
        bench = Bench()
        bench.feed(store([7], block_size=7))
        for i in range(100, 300, 2):
            bench.feed(store([i, i + 1]))
        assert bench.live >= set(range(100, 300))


def full_blocks(*names, parent=None):
    return store(list(names), parent, block_size=64, group=0)


def tail(name, parent=None, size=16, **more):
    return store([name], parent, block_size=size, **{"group": 0, **more})


class TestTails:
    """Tests for tail blocks: blocks that are smaller than the other blocks of their group.

    vLLM with partial hits (cache hits that may end inside a block) announces the end of a prompt as a tail block.
    """

    @pytest.mark.parametrize("block_size", [16, 32])
    def test_a_tail_block_among_divided_blocks_is_not_announced(self, block_size):
        bench = Bench(block_size=block_size)
        bench.feed(tail(1001))
        bench.feed(full_blocks(1, 2))
        there = bench.live
        assert len(there) == 2 * 64 // block_size
        bench.feed(tail(1002, 2), tail(1003, 1002, 32))
        bench.feed(full_blocks(3, parent=2), tail(1001))
        assert there < bench.live
        assert len(bench.live) == 3 * 64 // block_size
        assert bench.announced().blocks == bench.router.blocks

    def test_a_clear_of_a_tier_removes_the_tail_blocks_of_this_tier(self):
        bench = Bench()
        bench.feed(full_blocks(1, 2), tail(9), tail(9, medium="cpu"))
        bench.feed(cleared())
        assert bench.normalizer.entries == 1
        bench.feed(removed([9], medium="CPU", group=0))
        assert bench.normalizer.entries == 0
        bench.feed(full_blocks(1, 2), tail(9), tail(9, medium="CPU"))
        bench.feed(cleared(), cleared())
        assert bench.normalizer.entries == 0

    def test_a_tail_block_counts_towards_max_blocks(self):
        bench = Bench(max_blocks=4)
        bench.feed(full_blocks(1, 2), tail(8), tail(9), tail(10))
        assert bench.rejected == {Reason.INDEX_FULL: 1}
        assert not bench.normalizer.full, "no block of a router's is missing"
        bench.feed(full_blocks(3))
        assert bench.rejected == {Reason.INDEX_FULL: 2}
        bench.feed(removed([8], group=0), removed([9], group=0), full_blocks(3))
        assert bench.live == {1, 2, 3}

    @pytest.mark.parametrize("coarse", [[full_blocks(90)], [full_blocks(90, 91)]], ids=["alone", "several"])
    def test_finer_blocks_that_were_taken_for_tails_are_announced_later(self, coarse):
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


class TestATierWithLargerBlocks:
    """Tests for LMCache's chunks of 256 tokens on the CPU, beside an engine with blocks of 16 tokens on the device."""

    CHUNK = run_of(*range(1, 17))

    def chunk(self, name=9001, parent=None, **more):
        return store([name], parent, block_size=256, tokens=self.CHUNK, medium="CPU", **more)

    def on_cpu(self, bench):
        return sum(key[1] == "CPU" for key in bench.router.blocks)

    def test_stores_of_larger_cpu_blocks_do_not_change_the_device_block_size(self):
        bench = Bench()
        bench.feed(store([1, 2]))
        for at in range(2 * RELEARN_EVENTS):
            bench.feed(store([9000 + 2 * at, 9001 + 2 * at], block_size=64, medium="CPU"))
        bench.feed(store([3, 4], 2))
        assert {key[2] for key in bench.router.blocks if key[1] == "GPU"} == {1, 2, 3, 4}
        assert self.on_cpu(bench) == 2 * RELEARN_EVENTS * 2 * 4

    def test_a_restarted_normalizer_keeps_the_learned_block_sizes(self):
        bench = Bench()
        bench.feed(store([1, 2]), self.chunk(), store([1], medium="DISK"))
        bench.restart()
        bench.feed(store([99], block_size=64, medium="DISK"))
        assert bench.filtered == {Filtered.COARSE: 1}
        bench.feed(removed([9001], medium="CPU"))
        assert self.on_cpu(bench) == 0

    def test_a_tail_becomes_a_copy_of_a_larger_block_with_the_same_hash(self):
        bench = Bench()
        bench.feed(store([1, 2], group=0))
        bench.feed(tail(5, size=8, medium="CPU", tokens=run_of(5)[:8]))
        bench.feed(store([5], group=0, block_size=32, medium="CPU"))
        bench.feed(store([3, 4], group=0, block_size=8))
        assert (bench.stats.rebuilds, self.on_cpu(bench)) == (1, 4)
        assert bench.feed(removed([5], medium="CPU", group=0)) == []
        bench.feed(removed([5], medium="CPU", group=0))
        assert self.on_cpu(bench) == 0
        assert Filtered.UNKNOWN_BLOCK not in bench.filtered
