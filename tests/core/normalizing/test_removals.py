"""Removals of one batch: what leaves, and in which order."""

import pytest

from kvbus.core.blocks.size import MANY
from kvbus.core.types import Filtered
from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, plain_all, removed, store


def bench(**rules):
    """Blocks 1 to 4 in one event, and 11 to 14 one by one behind each other."""
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
    ],
)
def test_leaves_go_first_and_what_is_in_order_stays_as_it_came(events, left):
    known = bench()
    out = known.feed(*events)
    assert [event["block_hashes"] for event in out] == left
    assert known.router.violations == []


def test_a_run_ends_where_a_store_leaves_and_not_at_a_copy():
    known = bench()
    out = known.feed(removed([1]), store([3], 2), removed([2]), store([20]), removed([4]))
    assert plain_all(out) == plain_all([removed([2, 1]), store([20]), removed([4])])
    assert known.filtered == {Filtered.COPY: 1}


def test_copies_go_one_by_one():
    known = bench()
    known.feed(store([3, 4], 2), store([4], 3))
    assert known.feed(removed([4, 3, 2])) == plain_all([removed([2])])
    assert known.feed(removed([4, 4])) == plain_all([removed([4])])
    assert known.filtered[Filtered.COPY] == 6


def test_why_a_block_is_unknown_is_known_when_the_batch_ends():
    known = Bench()
    known.feed(removed([5], group=1), store([6], group=1, kv_cache_spec_kind="mamba"), removed([7], group=2))
    assert known.filtered == {Filtered.GROUP: 2, Filtered.UNKNOWN_BLOCK: 1}


def test_an_offload_names_blocks_that_earlier_runs_of_its_batch_have_removed():
    known = bench()
    known.feed(removed([4, 3]), store([20]), removed([14]), store([3, 4], tokens=[], block_size=0, medium="CPU"))
    assert {("CPU", 4), ("CPU", 3)} <= {(medium, block) for _, medium, block in known.router.blocks}
    known.feed(store([3], tokens=[], block_size=0, medium="DISK"))
    known.feed(removed([3], medium="CPU"), removed([3], medium="DISK"))
    known.feed(store([3], tokens=[], block_size=0, medium="CPU"))
    assert known.filtered == {Filtered.TOKENLESS: 1}, "of the next batch it does not"


def test_a_removal_that_waits_leaves_before_everything_is_announced_again():
    """Two sizes in a group without a number: its blocks are radix nodes, and the first batch did not know."""
    known = Bench()
    known.feed(*[store([n], n - 1 or None) for n in range(1, 4)])
    out = known.feed(removed([3]), store([9], block_size=48))
    assert [event["type"] for event in out[:2]] == ["BlockRemoved", "AllBlocksCleared"]
    assert known.router.violations == []
    assert known.stats.rebuilds == 1


def test_a_clear_says_what_has_not_left_yet():
    known = bench()
    assert known.feed(removed([4]), cleared()) == plain_all([cleared()])
    known = bench()
    known.feed(store([1], medium="CPU"))
    out = known.feed(removed([4, 3]), cleared())
    assert sorted(block for event in out for block in event["block_hashes"]) == [1, 2, 3, 4, 11, 12, 13, 14]
    assert known.router.violations == []


def test_many_chunks_are_looked_at_while_they_go():
    known = Bench(block_size=16)
    for at in range(2 * MANY):
        known.feed(store([at]))
    known.feed(*[removed([at]) for at in range(2 * MANY)])
    assert len(known.normalizer.index.size.firsts_gone) <= MANY
    assert known.normalizer.index_bytes == 0
