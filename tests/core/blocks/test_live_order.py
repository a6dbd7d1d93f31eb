"""The order in which blocks are announced, and the runs of a chunk that are left."""

import pytest

from kvbus.core.blocks.index import Index
from kvbus.core.blocks.live_order import live_runs
from tests.core.blocks.chunks import announced, put


class TestRuns:
    @pytest.mark.parametrize(
        ("gone", "runs"),
        [
            ([], [(0, 4)]),
            ([1], [(1, 4)]),
            ([4], [(0, 3)]),
            ([2], [(0, 1), (2, 4)]),
            ([1, 3], [(1, 2), (3, 4)]),
            ([1, 2, 3, 4], []),
        ],
    )
    def test_runs_of_what_is_left(self, gone, runs):
        index = Index()
        chunk = put(index, [1, 2, 3, 4])
        table = index.table(None, "GPU")
        for block in gone:
            table.remove(block)
        assert list(live_runs(table, chunk)) == runs

    def test_a_block_that_came_back_in_another_chunk_is_not_of_this_one(self):
        index = Index()
        chunk = put(index, [1, 2, 3])
        put(index, [2], 1)
        assert list(live_runs(index.table(None, "GPU"), chunk)) == [(0, 1), (2, 3)]


class TestOrder:
    def test_parents_first_whatever_the_order_they_came_in(self):
        index = Index()
        put(index, [3], 2)
        put(index, [2], 1)
        put(index, [1])
        assert [blocks for _, blocks in announced(index)] == [[1], [2], [3]]

    def test_device_first_then_one_medium_at_a_time(self):
        index = Index()
        put(index, [1], medium="DISK")
        put(index, [2], medium="CPU", group=1)
        put(index, [2], medium="CPU", group=0)
        put(index, [3], group=1)
        put(index, [3])
        assert [key for key, _ in announced(index)] == [
            (None, "GPU"),
            (1, "GPU"),
            (0, "CPU"),
            (1, "CPU"),
            (None, "DISK"),
        ]

    def test_a_chunk_with_holes_is_told_in_pieces(self):
        index = Index()
        put(index, [1, 2, 3, 4, 5])
        index.table(None, "GPU").remove(2)
        index.table(None, "GPU").remove(4)
        assert [blocks for _, blocks in announced(index)] == [[1], [3], [5]]

    def test_a_piece_whose_parent_came_back_elsewhere_waits_for_it(self):
        index = Index()
        put(index, [1, 2, 3])
        index.table(None, "GPU").remove(2)
        put(index, [2], 1)
        assert [blocks for _, blocks in announced(index)] == [[1], [2], [3]]

    @pytest.mark.parametrize("frozen", [False, True])
    def test_a_reblocked_chunk_follows_the_block_whose_sub_block_is_its_parent(self, frozen):
        index = Index()
        put(index, [4], 3).reblock_into([40, 41], 21)  # the engine's hash 3 is not live
        put(index, [1, 2]).reblock_into([10, 11, 20, 21], None)
        put(index, [5])
        table = index.table(None, "GPU")
        table.refs.update(dict.fromkeys([10, 11, 20, 21, 40, 41], 1))
        table.remove(1)
        seen = index.copy() if frozen else index
        assert [blocks for _, blocks in announced(seen)] == [[2], [4], [5]]

    def test_a_cycle_of_parents_is_told_once(self):
        index = Index()
        put(index, [1], 2)
        put(index, [2], 3)
        put(index, [3], 1)
        assert sorted(block for _, blocks in announced(index) for block in blocks) == [1, 2, 3]

    def test_a_long_chain_is_no_recursion(self):
        index = Index()
        for block in range(5_000, 0, -1):
            put(index, [block], block - 1 or None)
        assert [blocks[0] for _, blocks in announced(index)] == list(range(1, 5_001))
