import pytest
from msgspec import UNSET

from kvbus.core.blocks.index import Chunk, Index, Table, live_runs, raw_or_unset, slice_array
from kvbus.core.blocks.size import chunk_bytes
from kvbus.core.wire.codec import encode_value
from kvbus.core.wire.schema import BlockStored
from tests.doubles.payloads import payload, store, tokens_of
from tests.typed import well_formed


def stored(said):
    (event,) = well_formed(payload(said)).events
    assert isinstance(event, BlockStored)
    return event


def put(index, hashes, parent=None, *, group=None, medium="GPU", size=16):
    event = stored(store(hashes, parent, group=group, medium=medium, block_size=size))
    chunk = Chunk(tuple(event.block_hashes), event.parent_block_hash, bytes(event.token_ids), index.meta(event))
    table = index.table(group, medium)
    table.blocks.update(dict.fromkeys(hashes, chunk))
    index.size.add(chunk, len(hashes), chunk_bytes(chunk), first=True)
    return chunk


def announced(index):
    return [(key, list(chunk.hashes[a:b])) for key, chunk, a, b in index.snapshot()]


class TestCopies:
    def test_the_last_copy_is_the_one_that_counts(self):
        index = Index()
        chunk = put(index, [1, 2])
        table = index.table(None, "GPU")
        table.copies[1] = 2
        assert table.remove(1) is None
        assert table.remove(1) is None
        assert table.remove(1) is chunk
        assert table.remove(1) is None
        assert table.copies == {}
        assert list(table.blocks) == [2]

    def test_a_block_that_is_not_there(self):
        assert Table().remove(1) is None


class TestChunks:
    def test_parents_and_tokens_of_each_block(self):
        chunk = put(Index(), [1, 2, 3], 9)
        assert [chunk.parent_of(i) for i in range(3)] == [9, 1, 2]
        assert [chunk.block_tokens(i) for i in range(3)] == [tokens_of(block) for block in (1, 2, 3)]

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


class TestTables:
    def test_one_hash_in_several_groups_and_media(self):
        index = Index()
        put(index, [1], group=0)
        put(index, [1], group=1)
        put(index, [1], group=0, medium="CPU")
        assert len(index) == 3
        assert index.media() == {"GPU": 2, "CPU": 1}
        assert [key for key, _ in index.tables_with("GPU", 1)] == [(0, "GPU"), (1, "GPU")]
        assert index.tables_with("GPU", 2) == []

    def test_a_block_is_found_on_any_medium_of_its_group_only(self):
        index = Index()
        chunk = put(index, [1], group=0, medium="CPU")
        assert index.find(0, 1) is chunk
        assert index.find(1, 1) is None
        assert index.find(None, 1) is None


class TestMeta:
    def test_equal_metas_are_kept_once(self):
        index = Index()
        assert put(index, [1]).meta is put(index, [2]).meta
        assert put(index, [3]).meta is not put(index, [4], group=1).meta

    def test_a_flood_of_distinct_metas_is_bounded(self):
        index = Index()
        events = [stored(store([1], session_id=f"session {i}")) for i in range(10_000)]
        oldest = index.meta(events[0])
        distinct = 1
        while index.meta(events[0]) is oldest:
            index.meta(events[distinct])
            distinct += 1
        assert distinct <= 4096 + 1, "with one more than that the oldest is forgotten"

    def test_fields_go_in_and_come_out_as_they_were(self):
        assert raw_or_unset(None) is UNSET
        assert bytes(raw_or_unset(b"\xc0")) == b"\xc0"
        assert bytes(slice_array(bytes(encode_value([1, [2], None, b"x"])), 1, 3)) == bytes(encode_value([[2], None]))


class TestSnapshot:
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


class TestWhole:
    def test_what_is_counted_and_found_is_of_every_table(self):
        index = Index()
        put(index, [1, 2])
        put(index, [2, 3], medium="CPU")
        put(index, [1], group=4)
        assert index.announced == 5
        assert index.media() == {"GPU": 3, "CPU": 2}
        assert [key for key, _ in index.tables_with("GPU", 1)] == [(None, "GPU"), (4, "GPU")]
        assert index.find(4, 2) is None

    def test_media_that_are_not_kept_are_forgotten(self):
        index = Index()
        put(index, [1, 2])
        put(index, [2, 3], medium="CPU")
        index.keep({"CPU"})
        assert announced(index) == [((None, "CPU"), [2, 3])]
        assert index.media_names == {"CPU"}
        index.clear()
        assert announced(index) == []
        assert index.announced == 0

    def test_a_copy_stays_as_it_was(self):
        index = Index(copied_below=0)
        put(index, [1, 2])
        copy = index.copy()
        put(index, [3], 2)
        table = index.table(None, "GPU")
        chunk = table.remove(1)
        assert chunk is not None
        index.size.remove(table, 1, chunk)
        assert announced(copy) == [((None, "GPU"), [1, 2])]
        assert announced(index) == [((None, "GPU"), [2]), ((None, "GPU"), [3])]
        del copy
        index.merge_overlays()
        assert len(index) == 2
