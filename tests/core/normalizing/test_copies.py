"""Blocks with copies under ``duplicates: detect``: what one removal takes away, what proves more, and what proves nothing."""

import pytest
from msgspec import msgpack

from kvbus.core.normalizing import copies
from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.batch import Batch
from kvbus.core.wire.codec import decode
from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, pack, plain_all, removed, store, tokens_of


def unsure(bench):
    return {block for table in bench.normalizer.indexes[2].tables.values() for block in table.blocks}


@pytest.fixture
def bench():
    """Block 1 was stored three times and removed once, block 2 behind it as often."""
    bench = Bench(duplicates="detect")
    for _ in range(3):
        bench.feed(store([1, 2]))
    assert bench.feed(removed([2, 1])) == plain_all([removed([2, 1])])
    assert unsure(bench) == {1, 2}
    return bench


def test_one_removal_takes_the_block_away_and_is_counted(bench):
    assert bench.live == set()
    assert bench.filtered == {Filtered.COPY: 4, Filtered.COPY_UNSURE: 2}
    assert bench.normalizer.dump()["each"] == []


def test_a_second_removal_proves_that_each_copy_is_removed(bench):
    """All that had copies is live again, and copies count from then on. Everything is announced, parents first."""
    bench.feed(store([9]))
    assert bench.feed(removed([2])) == plain_all([cleared(), store([9]), store([1]), store([2], 1)])
    assert bench.stats.rebuilds == 1
    assert bench.normalizer.dump()["each"] == ["GPU"]
    assert unsure(bench) == set()
    assert bench.feed(removed([1])) == []
    assert bench.feed(removed([2, 1])) == plain_all([removed([2, 1])])
    assert bench.feed(removed([2]), removed([1])) == []
    assert bench.filtered[Filtered.UNKNOWN_BLOCK] == 2


def test_a_block_that_is_stored_again_meanwhile_gets_its_copies_back(bench):
    bench.feed(store([1]))
    assert bench.feed(removed([2])) == plain_all([cleared(), store([1]), store([2], 1)])
    assert [bench.feed(removed([1])) for _ in range(3)] == [[], [], plain_all([removed([1])])]


def test_what_it_came_with_comes_back(bench):
    more = {"extra_keys": [["a"], ["b"]], "future": 7, "lora_name": "x", "session_id": "s"}
    for _ in range(2):
        bench.feed(store([5, 6], 9, **more))
    bench.feed(removed([6]))
    (*_, again, last) = bench.feed(removed([6, 2, 2]))
    assert [again, last] == plain_all([store([5], 9, **more | {"extra_keys": [["a"]]}), store([1])])
    bench.feed(store([5, 6], 9, **more), store([5, 6], 9, **more), removed([6]), removed([6]))
    bench.feed(removed([6]))
    assert bench.live == {1, 5}


def test_a_restored_block_is_what_was_stored():
    bench = Bench(duplicates="detect")
    more = {"extra_keys": [["a"], ["b"]], "lora_name": "x", "session_id": "s"}
    for _ in range(3):
        bench.feed(store([5, 6], 9, **more, future=7, mm_keys=[["c"], ["d"]]))
    bench.feed(removed([6]))
    (_, _, again) = bench.feed(removed([6]))
    (expected,) = plain_all([store([6], 5, **more | {"extra_keys": [["b"]]}, future=7, mm_keys=[["d"]])])
    assert again == expected


@pytest.mark.parametrize(
    "event", [store([7], medium="HBM"), store([7], tokens=[1]), {"type": "BlockStored"}, {"type": "?"}]
)
def test_a_store_that_is_not_taken_in_may_have_been_the_one_in_between(bench, event):
    bench.feed(event)
    assert unsure(bench) == set()
    assert bench.filtered[Filtered.COPY_FORGOTTEN] == 2
    assert bench.feed(removed([1])) == []
    assert bench.normalizer.dump()["each"] == []


@pytest.mark.parametrize(
    ("rules", "event"),
    [
        ({"orphans": "drop"}, store([7], 8)),
        ({}, store([7], tokens=[], block_size=0)),
        ({"block_size": 16}, store([7], tokens=tokens_of(7, 24), block_size=24)),
        ({}, store([7, 8], 8)),
        ({"max_blocks": 3}, store([7, 8, 9, 10])),
    ],
)
def test_nor_one_that_the_rules_keep_out(rules, event):
    bench = Bench(duplicates="detect", **rules)
    bench.feed(store([1]), store([1]), removed([1]))
    assert unsure(bench) == {1}
    bench.feed(event, removed([1]))
    assert bench.normalizer.dump()["each"] == []
    assert unsure(bench) == set()


def test_a_refusal_in_the_batch_of_the_proof(bench):
    """It may have come before the removal: what cannot be read has no place."""
    assert bench.feed(removed([2]), store([7], tokens=[1])) == []
    assert bench.normalizer.dump()["each"] == []


def test_what_is_known_of_one_medium_is_not_known_of_another(bench):
    bench.feed(store([1], medium="CPU"), store([1], medium="CPU"), removed([1], medium="CPU"))
    bench.feed(removed([1], medium="CPU"))
    assert bench.normalizer.dump()["each"] == ["CPU"]
    assert unsure(bench) == {1, 2}


def test_a_clear_is_of_what_is_unsure_too(bench):
    bench.feed(cleared())
    assert unsure(bench) == set()
    assert bench.feed(removed([1])) == []
    assert bench.normalizer.dump()["each"] == []


def test_a_clear_of_the_device_leaves_what_is_unsure_elsewhere():
    """However many clears come, and whether anything is live there or not."""
    bench = Bench(duplicates="detect")
    bench.feed(store([1], medium="CPU"), store([1], medium="CPU"), removed([1], medium="CPU"), cleared())
    bench.feed(cleared())
    bench.feed(cleared())
    assert unsure(bench) == {1}


def test_a_group_that_turns_out_to_carry_no_prefixes_proves_nothing():
    bench = Bench(duplicates="detect")
    bench.feed(store([1], group=1), store([1], group=1), removed([1], group=1))
    bench.feed(store([1], group=1, kv_cache_spec_kind="mamba"), removed([1], group=1))
    assert bench.normalizer.dump()["each"] == []


def test_positional_events_are_of_releases_that_remove_each_copy():
    """vLLM up to 0.23, SGLang up to 0.5.19. What a former epoch was is not asked."""
    bench = Bench(duplicates="detect")
    stored = ["BlockStored", [1], None, tokens_of(1), 16, None, "GPU"]
    array = pack([1.0, [stored, stored, ["BlockRemoved", [1], "GPU"]], 0])
    bench.feed(raw=array)
    assert bench.live == {1}
    bench.normalizer.reset(same_epoch=True)
    assert bench.normalizer.dump()["each"]
    bench.normalizer.reset()
    assert not bench.normalizer.dump()["each"]
    bench.feed(raw=array)
    assert bench.normalizer.dump()["each"]


class TestWhatIsSaid:
    def test_by_the_engine_about_each_block(self):
        """vllm#48933, whatever is counted."""
        bench = Bench(duplicates="detect")
        for _ in range(3):
            bench.feed(store([1, 2]))
        assert bench.feed(removed([1, 2], remaining_copy_counts=[1, 0])) == plain_all([removed([2])])
        assert bench.feed(removed([1])) == plain_all([removed([1])])

    def test_about_a_block_that_is_unsure(self, bench):
        assert bench.feed(removed([1, 2], remaining_copy_counts=[1, 0])) == plain_all([cleared(), store([1])])
        assert bench.feed(removed([1], remaining_copy_counts=[0])) == plain_all([removed([1])])

    def test_about_a_block_that_is_live_and_unsure(self, bench):
        bench.feed(store([1]))
        bench.feed(removed([1], remaining_copy_counts=[2]))
        assert [bench.feed(removed([1])) for _ in range(2)] == [[], plain_all([removed([1])])]

    def test_about_a_block_that_is_not_known(self):
        bench = Bench(duplicates="detect")
        assert bench.feed(removed([1, 2], remaining_copy_counts=[1, 0])) == []
        assert bench.filtered == {Filtered.UNKNOWN_BLOCK: 2}

    @pytest.mark.parametrize("said", [None, [], [1], [1, -1], "ab", [1, "a"], {1: 2}, [1, 2**64 - 1, 3]])
    def test_what_is_not_said_of_each_block_is_not_said(self, said):
        bench = Bench()
        bench.feed(store([1, 2]), store([1, 2]))
        assert bench.feed(removed([2, 1], remaining_copy_counts=said)) == []
        assert bench.feed(removed([2, 1], remaining_copy_counts=said)) == plain_all([removed([2, 1])])
        assert bench.rejected == {}

    def test_it_does_not_leave(self):
        bench = Bench()
        bench.feed(store([1]))
        (event,) = bench.feed(removed([1], remaining_copy_counts=[0]))
        assert "remaining_copy_counts" not in event

    def test_hits_announced_again_are_no_copies_where_it_is_said(self):
        """``kv_cache_report_mode=full``, which counting alone cannot tell."""
        bench = Bench()
        for _ in range(5):
            bench.feed(store([1]))
        assert bench.feed(removed([1], remaining_copy_counts=[0])) == plain_all([removed([1])])


def test_the_oldest_is_given_up_where_there_are_too_many(monkeypatch):
    monkeypatch.setattr(copies, "MAX_UNSURE", 2)
    bench = Bench(duplicates="detect")
    for block in (1, 2, 3):
        bench.feed(store([block]), store([block]), removed([block]))
    assert unsure(bench) == {2, 3}
    assert bench.filtered[Filtered.COPY_FORGOTTEN] == 1


def test_they_are_bounded_in_bytes_too(monkeypatch):
    monkeypatch.setattr(copies, "MAX_BYTES", 900)
    bench = Bench(duplicates="detect")
    for block in (1, 2, 3):
        bench.feed(store([block]), store([block]), removed([block]))
    assert unsure(bench) == {2, 3}


def test_they_give_way_to_live_blocks():
    bench = Bench(duplicates="detect", max_blocks=3)
    for block in (1, 2):
        bench.feed(store([block]), store([block]), removed([block]))
    assert bench.normalizer.entries == 2
    bench.feed(store([3]), store([4]), store([5]))
    assert bench.live == {3, 4, 5}
    assert bench.normalizer.entries == 3
    assert bench.rejected == {}


def test_the_limit_holds_where_removals_alone_have_made_them():
    """A batch of removals in order, then one of stores in order: neither is looked at event by event."""
    bench = Bench(duplicates="detect", max_blocks=5)
    for first in range(100, 140, 4):  # until nothing is left to learn of block sizes
        blocks = list(range(first, first + 4))
        bench.feed(store(blocks))
        bench.feed(removed(blocks[::-1]))
    bench.feed(store([9]))
    bench.feed(store([1, 2, 3, 4]))
    bench.feed(store([1, 2, 3, 4]))
    bench.feed(removed([4, 3, 2, 1]))
    assert (bench.live, bench.normalizer.entries) == ({9}, 5)
    bench.feed(store([5, 6, 7, 8]))
    assert bench.live == {9, 5, 6, 7, 8}
    assert bench.normalizer.entries == 5
    assert bench.filtered[Filtered.COPY_FORGOTTEN] == 4


def test_a_reblocked_block_comes_back():
    bench = Bench(duplicates="detect", block_size=8)
    before = bench.feed(store([1, 2]))
    bench.feed(store([1, 2]), store([1, 2]))
    bench.feed(removed([2]), removed([1]))
    assert bench.live == set()
    bench.feed(removed([2]))
    assert bench.live == {block for event in before for block in event["block_hashes"]}


def test_coarse_blocks_are_removed_as_copies_are():
    bench = Bench(duplicates="detect")
    bench.feed(
        store([1, 2, 3]),
        store([8], tokens=tokens_of(1, 64), block_size=64),
        store([8], tokens=tokens_of(1, 64), block_size=64),
    )
    assert bench.normalizer.entries == 4
    bench.feed(removed([8]))
    assert bench.normalizer.entries == 3


def test_positions_of_the_field_are_those_of_the_encoder():
    """``remaining_copy_counts`` as vllm#48933's test of the wire has it: a map, and nothing where it is not known."""
    body = msgpack.encode(
        [
            1.0,
            [
                {
                    "type": "BlockRemoved",
                    "block_hashes": [b"\xab" * 32],
                    "medium": "GPU",
                    "locality": "REMOTE",
                    "remaining_copy_counts": [2],
                }
            ],
            0,
        ]
    )
    batch = decode(body)
    assert isinstance(batch, Batch)
    assert batch.uniform
    assert not batch.rejects
    assert Reason.WRONG_TYPE not in batch.rejects


class TestRemovedOnceWhereCopiesCount:
    """What a build that removes the last copy alone looks like, and one that removes each, too. Nothing is decided."""

    @pytest.fixture
    def bench(self, monkeypatch):
        monkeypatch.setattr(copies, "MAX_ONCE", 2)
        bench = Bench()
        for block in range(1, 6):
            bench.feed(store([block]), store([block]))
        bench.feed(removed([1]), removed([2]), removed([3]))
        assert bench.normalizer.never_twice == 1
        return bench

    def test_those_that_are_never_removed_again_are_counted(self, bench):
        bench.feed(removed([4]), removed([5]))
        assert bench.normalizer.never_twice == 3
        assert bench.live == {1, 2, 3, 4, 5}

    def test_one_that_is_removed_again_ends_it(self, bench):
        bench.feed(removed([2]), removed([4]))
        assert bench.normalizer.never_twice == 0
        bench.feed(removed([5]))
        assert bench.normalizer.never_twice == 0
        assert bench.live == {1, 3, 4, 5}

    def test_of_one_that_is_stored_again_nothing_is_known(self, bench):
        bench.feed(store([2]), store([3]), removed([4]), removed([5]))
        assert bench.normalizer.never_twice == 1

    @pytest.mark.parametrize("event", [{"type": "?"}, cleared()])
    def test_nor_behind_a_clear_or_what_cannot_be_read(self, bench, event):
        bench.feed(event)
        bench.feed(*[store([block]) for block in (6, 6, 7, 7)], removed([6]), removed([7]))
        assert bench.normalizer.never_twice == 1
