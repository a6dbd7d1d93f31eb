"""Stores that are not plainly new blocks behind a known parent."""

import pytest

from kvbus.core.types import Filtered, Reason
from tests.core.dsl import Bench
from tests.doubles.payloads import plain_all, removed, store, tokens_of


def names(events):
    return [event["block_hashes"] for event in events]


class TestOrder:
    def test_a_parent_that_comes_later_in_the_run_goes_first(self):
        bench = Bench()
        assert names(bench.feed(store([3], 2), store([2], 1), store([1]))) == [[1], [2], [3]]
        assert bench.filtered == {}

    def test_beyond_a_removal_nothing_is_waited_for(self):
        bench = Bench()
        bench.feed(store([9]))
        assert names(bench.feed(store([2], 1), removed([9]), store([1]))) == [[2], [9], [1]]
        assert bench.filtered == {Filtered.ORPHAN_PASSED: 1}

    def test_two_that_wait_for_each_other_leave_all_the_same(self):
        bench = Bench()
        assert names(bench.feed(store([2], 1), store([1], 2))) == [[1], [2]]
        assert bench.filtered == {Filtered.ORPHAN_PASSED: 1}

    def test_a_chain_named_from_its_end_is_put_in_order_once(self):
        bench = Bench()
        out = bench.feed(*[store([n], n - 1 or None) for n in range(3000, 0, -1)])
        assert names(out) == [[n] for n in range(1, 3001)]

    def test_a_parent_of_its_own_is_refused_on_every_medium(self):
        bench = Bench()
        bench.feed(*[store([n, n + 1], n - 1 or None) for n in range(1, 20, 2)])
        bench.feed(store([30, 31], medium="CPU"))
        bench.feed(store([5, 6], 5, medium="CPU"))
        assert bench.rejected == {Reason.SELF_PARENT: 1}


class TestCopies:
    def test_new_blocks_among_live_ones_leave_as_runs(self):
        bench = Bench()
        bench.feed(store([2, 4]))
        tokens = [token for block in (1, 2, 3, 4, 5) for token in tokens_of(block)]
        out = bench.feed(store([1, 2, 3, 4, 5], tokens=tokens))
        assert [(event["block_hashes"], event.get("parent_block_hash")) for event in out] == [
            ([1], None),
            ([3], 2),
            ([5], 4),
        ]
        assert (bench.filtered, bench.rejected) == ({Filtered.COPY: 2}, {})

    def test_other_tokens_are_a_collision_of_that_block_alone(self):
        bench = Bench()
        bench.feed(store([1, 2, 3]))
        bench.feed(store([1, 2, 3], tokens=tokens_of(1) + [9] * 16 + tokens_of(3)))
        assert bench.rejected == {Reason.HASH_COLLISION: 1}


class TestOffloads:
    def test_tokens_size_parent_and_adapter_are_those_of_the_blocks(self):
        bench = Bench()
        bench.feed(store([1, 2], lora_name="a"), store([3], 2, lora_name="a"))
        out = bench.feed(store([2, 3], tokens=[], block_size=0, medium="CPU"))
        assert out == plain_all([store([2, 3], 1, medium="CPU", lora_name="a")])

    def test_its_own_parent_and_adapter_are_kept(self):
        bench = Bench()
        bench.feed(store([1, 2]))
        (event,) = bench.feed(store([2], 9, tokens=[], block_size=0, medium="CPU", lora_name="b"))
        assert (event["parent_block_hash"], event["lora_name"]) == (9, "b")

    @pytest.mark.parametrize("fields", [{"group": 1}, {"hashes": [1, 7]}], ids=["another group", "one is unknown"])
    def test_what_is_not_known_as_a_whole_is_left_out(self, fields):
        bench = Bench()
        bench.feed(store([1, 2]))
        event = store(fields.pop("hashes", [1]), tokens=[], block_size=0, medium="CPU", **fields)
        assert bench.feed(event) == []
        assert bench.filtered == {Filtered.TOKENLESS: 1}
