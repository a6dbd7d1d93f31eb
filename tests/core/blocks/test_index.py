import pytest
from msgspec import UNSET

from kvbus.core.blocks.chunk import Rest
from kvbus.core.blocks.index import MAX_SHARED, Index, Table, raw_or_unset, slice_array
from kvbus.core.blocks.size import chunk_bytes
from kvbus.core.wire.encoding import encode_value
from tests.core.blocks.chunks import announced, put, stored
from tests.doubles.payloads import pack, store, tokens_of


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

    @pytest.mark.parametrize(("count", "copies"), [(True, {1: 3}), (False, {})])
    def test_a_block_that_is_there_already_is_one_more_copy_where_they_count(self, count, copies):
        table = Table()
        first, second = put(Index(), [1]), put(Index(), [1])
        table.add(1, first, 0, count=count)
        assert table.copies == {}
        table.add(1, second, 2, count=count)
        assert table.blocks[1] is first
        assert table.copies == copies


class TestChunks:
    def test_parents_and_tokens_of_each_block(self):
        chunk = put(Index(), [1, 2, 3], 9)
        assert [chunk.parent_of(i) for i in range(3)] == [9, 1, 2]
        assert [chunk.tokens_of(i, i + 1) for i in range(3)] == [pack(tokens_of(block)) for block in (1, 2, 3)]

    def test_a_chunk_is_reblocked_and_comes_back_with_its_unknown_fields(self):
        chunk = put(Index(), [1, 2])
        chunk.reblock_into(None, None)
        assert chunk.rest is None, "what leaves as it came takes no room"
        chunk.rest = Rest({"novelty": b"\x01"})
        chunk.reblock_into([10, 11, 20, 21], 9)
        assert chunk.reblocked() == ([10, 11, 20, 21], 2)
        assert (chunk.out_parent, chunk.extras) == (9, {"novelty": b"\x01"})
        chunk.reblock_into(None, None)
        assert chunk.reblocked() == ([], 0)
        assert (chunk.derived, chunk.out_parent, chunk.extras) == (None, None, {"novelty": b"\x01"})


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

    def test_routers_know_a_reblocked_block_by_its_derived_hashes_only(self):
        index = Index()
        put(index, [1])
        put(index, [2]).reblock_into([20, 21], None)
        index.table(None, "GPU").refs.update({20: 1, 21: 1})
        assert [name for name in (1, 2, 20, 21, 3) if index.announces(None, "GPU", name)] == [1, 20, 21]
        assert not index.announces(None, "CPU", 1)
        assert not index.announces(0, "GPU", 1)
        assert sorted(index.names()) == [1, 20, 21]


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

    def test_a_meta_with_long_texts_is_weighed_and_not_kept_for_others(self):
        index = Index()
        fits, long = (stored(store([1], lora_name="x" * size)) for size in (MAX_SHARED, MAX_SHARED + 1))
        assert index.meta(fits) is index.meta(fits)
        assert index.meta(fits).weight == 0
        assert index.meta(long) is not index.meta(long)
        assert index.meta(long).weight == MAX_SHARED + 1

    def test_fields_go_in_and_come_out_as_they_were(self):
        assert raw_or_unset(None) is UNSET
        assert bytes(raw_or_unset(b"\xc0")) == b"\xc0"
        assert bytes(slice_array(bytes(encode_value([1, [2], None, b"x"])), 1, 3)) == bytes(encode_value([[2], None]))


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

    def test_empty_tables_are_dropped_and_numbered_groups_with_them(self):
        index = Index()
        put(index, [1])
        for medium in ("GPU", "CPU"):
            index.table(1, medium)
        assert index.grouped
        index.drop_empty(["GPU"])
        assert (set(index.tables), index.grouped) == ({(None, "GPU"), (1, "CPU")}, True)
        index.drop_empty(["GPU", "CPU"])
        assert (set(index.tables), index.grouped) == ({(None, "GPU")}, False)
        assert index.media_names == {"GPU"}

    def test_a_frozen_copy_keeps_one_group(self):
        index = Index()
        for group in (None, 0, 1):
            put(index, [1], group=group)
        copy = index.copy()
        copy.keep_group(0)
        assert announced(copy) == [((0, "GPU"), [1])]
        assert copy.find(1, 1) is None
        assert len(announced(index)) == 3

    def test_blocks_that_were_not_counted_are_counted_anew(self):
        index = Index()
        put(index, [1, 2])
        chunk = put(index, [3, 4], medium="CPU")
        expected = index.size.bytes
        index.table(None, "CPU").remove(3)
        index.count()
        assert (len(index), index.size.bytes) == (3, expected), "the last block of a chunk holds all of its bytes"
        index.table(None, "CPU").remove(4)
        index.count()
        assert (len(index), index.size.bytes) == (2, expected - chunk_bytes(chunk))

    def test_an_index_that_is_given_up_leaves_its_tables_to_another(self):
        index = Index()
        put(index, [1, 2])
        put(index, [3], group=1)
        before, last = announced(index), index.given_up()
        index.clear()
        assert announced(index) == []
        assert (announced(last), last.grouped, last.media_names) == (before, True, {"GPU"})

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
