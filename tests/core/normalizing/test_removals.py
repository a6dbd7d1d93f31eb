"""Tests for the removals that kvbus sends to routers after the engine removed blocks in one batch, and for their
order.
"""

import pytest

from kvbus.core.types import Filtered
from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, plain_all, removed, store, tokens_of


def bench(**rules):
    """Return a normalizer with a router (:class:`Bench`), in which the blocks 1 to 4 and a chain of 11 to 14 are live.

    One event stored the blocks 1 to 4. Each block of the chain was stored by its own event.
    """
    known = Bench(**rules)
    known.feed(store([1, 2, 3, 4]))
    for block in range(11, 15):
        known.feed(store([block], block - 1 if block > 11 else None))
    return known


@pytest.mark.parametrize(
    ("events", "left"),
    [
        ([removed([4, 3])], [[4, 3]]),
        ([removed([4]), removed([3])], [[4], [3]]),
        ([removed([1, 2, 3, 4])], [[4, 3, 2, 1]]),
        ([removed([2, 3]), removed([1])], [[3, 2, 1]]),
        ([removed([11, 12]), removed([4, 13])], [[13, 12, 11, 4]]),
        ([removed([1, 3, 2, 4])], [[4, 3, 2, 1]]),
        ([removed([4, 99, 3])], [[4, 3]]),
        ([removed([4], locality="LOCAL")], [[4]]),
        ([removed([99])], []),
        ([removed([4], medium="gpu")], [[4]]),
        ([removed([1, 2]), removed([4])], [[2, 1, 4]]),
        ([removed([14, 2, 4])], [[14, 2, 4]]),
        ([removed([3, 14, 4])], [[4, 3, 14]]),
        ([removed([11]), removed([12])], [[12, 11]]),
    ],
)
def test_removals_are_sorted_children_first_only_if_necessary(events, left):
    known = bench()
    out = known.feed(*events)
    assert [event["block_hashes"] for event in out] == left
    assert known.router.violations == []


def test_a_removal_before_its_groups_first_store_is_filtered_by_group():
    known = Bench()
    known.feed(removed([5], group=1), store([6], group=1, kv_cache_spec_kind="mamba"), removed([7], group=2))
    assert known.filtered == {Filtered.GROUP: 2, Filtered.UNKNOWN_BLOCK: 1}


def test_an_offload_finds_blocks_that_its_batch_has_just_removed():
    known = bench()
    known.feed(removed([4, 3]), store([20]), removed([14]), store([3, 4], tokens=[], block_size=0, medium="CPU"))
    assert {("CPU", 4), ("CPU", 3)} <= {(medium, block) for _, medium, block in known.router.blocks}
    known.feed(store([3], tokens=[], block_size=0, medium="DISK"))
    known.feed(removed([3], medium="CPU"), removed([3], medium="DISK"))
    known.feed(store([3], tokens=[], block_size=0, medium="CPU"))
    assert known.filtered == {Filtered.TOKENLESS: 1}, "of the next batch it does not"


def cut(size=16):
    """Return a bench (a source without sockets) that cuts radix nodes into blocks of ``size`` tokens.

    With 16 tokens, node 1 has six blocks, node 2 has the first two of them, and node 3 follows node 1.
    """
    known = Bench(block_size=size)
    tokens = tokens_of(1, 96)
    known.feed(store([1], tokens=tokens, block_size=96), store([2], tokens=tokens[:32], block_size=32))
    known.feed(store([3], 1, block_size=32))
    return known


class TestReblocked:
    @pytest.mark.parametrize(("gone", "left"), [([1], 4), ([2], 8), ([1, 2], 2), ([3], 6), ([3, 1, 2], 0)], ids=str)
    def test_sub_blocks_are_removed_with_the_last_block_that_contains_them(self, gone, left):
        for events in ([removed(gone)], [removed([block]) for block in gone]):
            known = cut()
            out = known.feed(*events)
            assert {event["type"] for event in out} <= {"BlockRemoved"}
            assert len(known.live) == left
            assert known.router.violations == []
            assert known.announced().blocks == known.router.blocks


class TestWithoutAGroup:
    """Tests for an engine that gives a group number in its stores but not in its removals."""

    @pytest.mark.parametrize("copies", [0, 2])
    def test_a_removal_without_a_group_applies_to_the_only_group_with_the_block(self, copies):
        known = Bench()
        known.feed(store([1, 2], group=3), store([7], group=4), *[store([2], 1, group=3)] * copies)
        for _ in range(copies):
            assert known.feed(removed([2])) == []
        assert known.feed(removed([2])) == plain_all([removed([2], group=3)])
        assert known.filtered == ({Filtered.COPY: 2 * copies} if copies else {})

    def test_a_removal_without_a_group_removes_the_sub_blocks_of_a_divided_block(self):
        known = Bench(block_size=16)
        (stored,) = known.feed(store([1], block_size=64, group=3))
        assert known.feed(removed([1])) == plain_all([removed(stored["block_hashes"][::-1], group=3)])

    def test_a_removal_without_a_group_removes_a_coarse_copy_before_a_fine_block(self):
        known = Bench()
        known.feed(store([1, 2, 3, 4], group=3), *[store([4], block_size=64, group=3)] * 2, store([9], group=5))
        assert known.feed(removed([4]), removed([4])) == []
        assert known.filtered == {Filtered.COARSE: 4}
        assert known.feed(removed([4])) == plain_all([removed([4], group=3)])
        assert known.normalizer.entries == 4

    @pytest.mark.parametrize("other", [store([4], group=5), store([4, 5], group=5, block_size=64)], ids=["fine", "new"])
    def test_an_ambiguous_removal_without_a_group_is_filtered(self, other):
        known = Bench()
        known.feed(store([1, 2], group=3), store([4], block_size=64, group=3), other)
        assert known.feed(removed([4])) == []
        assert known.filtered == {Filtered.COARSE: 1, Filtered.UNKNOWN_BLOCK: 1}


@pytest.mark.parametrize("gone", [[1], [2], [3, 1], [3, 2, 1]], ids=str)
def test_removals_in_place_of_a_clear_name_all_remaining_blocks(gone):
    for known in (bench(), cut()):
        live = known.live
        known.normalizer.names_cleared = True
        assert known.feed(removed(gone), cleared()) == plain_all([cleared()])
        (make,) = known.normalizer.cleared
        named = [block for event in plain_all(make()) for block in event["block_hashes"]]
        assert sorted(named) == sorted(live)
        assert len(known.normalizer.index) == 0
