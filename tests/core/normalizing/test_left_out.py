"""Blocks that are not announced, remembered; what becomes of them in a stream is in test_normalizer and test_tails."""

import pytest

from kvbus.core.blocks.chunk import Chunk, Meta
from kvbus.core.blocks.index import Index
from kvbus.core.blocks.size import ITEM_BYTES, chunk_bytes
from kvbus.core.normalizing.block_size import Treatment
from kvbus.core.normalizing.copies import Copies
from kvbus.core.normalizing.left_out import LeftOut
from kvbus.core.source_stats import SourceStats

GPU, CPU = (0, "GPU"), (0, "CPU")


def chunk_of(*names, size=16):
    meta = Meta(size, None, None, "GPU", 0, None, None)
    return Chunk(names, None, b"", meta)


@pytest.fixture
def left_out():
    return LeftOut(stats := SourceStats(), Copies("count", stats, set()))


def test_each_copy_is_removed_once(left_out):
    left_out.store_coarse(GPU, [1])
    left_out.store_coarse(GPU, [1, 2])
    left_out.store_tail(GPU, 9, chunk_of(9), copies=2)
    assert len(left_out) == 3
    assert [left_out.remove_coarse(GPU, 1) for _ in range(3)] == [True, True, False]
    assert [left_out.remove_tail(GPU, 9) for _ in range(4)] == [True, True, True, False]
    assert len(left_out) == 1


def test_what_is_new_is_known_before_it_is_remembered(left_out):
    assert left_out.new(GPU, [1, 2], Treatment.COARSE) == 2
    assert left_out.new(GPU, [9], Treatment.TAIL) == 1
    left_out.store_coarse(GPU, [1])
    left_out.store_tail(GPU, 9, chunk_of(9))
    assert left_out.new(GPU, [1, 2, 9], Treatment.COARSE) == 2
    assert left_out.new(GPU, [1, 9], Treatment.TAIL) == 1
    assert left_out.new(CPU, [1, 9], Treatment.COARSE) == 2


def test_copies_take_no_more_bytes(left_out):
    held = [left_out.bytes]
    for _ in range(2):
        left_out.store_coarse(GPU, [1])
        left_out.store_tail(GPU, 9, chunk_of(9))
        held.append(left_out.bytes)
    assert held == [0, ITEM_BYTES + chunk_bytes(chunk_of(9)), held[1]]
    for _ in range(2):
        left_out.remove_coarse(GPU, 1)
        left_out.remove_tail(GPU, 9)
        held.append(left_out.bytes)
    assert held[3:] == [held[1], 0]


def test_a_removal_speaks_of_its_group_and_medium(left_out):
    left_out.store_coarse(GPU, [1])
    left_out.store_tail(GPU, 9, chunk_of(9))
    for key in (CPU, (1, "GPU"), (None, "CPU")):
        assert not left_out.remove_coarse(key, 1)
        assert not left_out.remove_tail(key, 9)
    assert left_out.remove_tail((None, "GPU"), 9), "the only group that has it"


def test_without_a_group_it_is_not_guessed_which_of_several(left_out):
    left_out.store_tail((0, "GPU"), 9, chunk_of(9))
    left_out.store_tail((1, "GPU"), 9, chunk_of(9))
    assert not left_out.remove_tail((None, "GPU"), 9)


def test_a_tier_is_forgotten(left_out):
    for key in (GPU, CPU):
        left_out.store_coarse(key, [1])
        left_out.store_tail(key, 9, chunk_of(9))
    assert left_out.media == {"GPU", "CPU"}
    left_out.keep({"CPU"})
    assert left_out.media == {"CPU"}
    assert left_out.remove_coarse(CPU, 1)
    assert left_out.remove_tail(CPU, 9)


def test_which_groups_hold_a_coarse_block_on_a_medium(left_out):
    left_out.store_coarse(GPU, [1, 2])
    left_out.store_coarse((3, "GPU"), [2])
    left_out.store_coarse(CPU, [1])
    assert [left_out.coarse_with("GPU", block) for block in (1, 2, 3)] == [{GPU}, {GPU, (3, "GPU")}, set()]


@pytest.mark.parametrize("treatment", list(Treatment))
def test_what_becomes_of_blocks_and_tails_when_sizes_are_learned(left_out, treatment):
    index = Index()
    index.table(*GPU).add(1, chunk_of(1), 1, count=True)
    left_out.store_tail(GPU, 9, chunk_of(9), copies=1)
    left_out.take_from(GPU, index.table(*GPU), lambda group, chunk: treatment)
    left_out.give_back(index, lambda group, chunk: treatment)
    announced = {1, 9} if treatment in (Treatment.NATIVE, Treatment.REBLOCK) else set()
    coarse = {1, 9} if treatment in (Treatment.COARSE, Treatment.REJECT) else set()
    table, tails = index.table(*GPU), left_out.tails.table(*GPU)
    assert table.blocks.keys() == announced == table.copies.keys()
    assert left_out.coarse == ({GPU: dict.fromkeys(coarse, 2)} if coarse else {})
    assert tails.blocks.keys() == {1, 9} - announced - coarse == tails.copies.keys()
