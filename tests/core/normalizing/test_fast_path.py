"""The short way: what it takes, what it leaves alone, and that nothing is different for it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbus.core.normalizing.block_size import YOUNG
from kvbus.core.normalizing.normalizer import Normalizer, Rules
from kvbus.core.stats import SourceStats
from kvbus.core.wire import codec
from tests.typed import well_formed

SIZE = 4


def store(hashes: list[Any], parent: Any = None, tokens: Any = None, **fields: Any) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(range(SIZE * len(hashes))) if tokens is None else tokens,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return {name: value for name, value in {**event, **fields}.items() if value is not ...}


def removed(*hashes: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **fields}


def batch(*events: dict[str, Any], ts: Any = 1.0, rank: Any = 0) -> bytes:
    return msgspec.msgpack.encode([ts, events, rank])


def byte_hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Source:
    """A normalizer whose block size is proven, with blocks 1 to 40 in one chain."""

    def __init__(self, **rules: Any) -> None:
        self.stats = SourceStats()
        self.normalizer = Normalizer(Rules(**rules), self.stats)
        for at in range(2 * (YOUNG + 1)):
            first = 4 * at + 1
            self.long(batch(store([first, first + 1, first + 2, first + 3], first - 1 or None)))

    def long(self, payload: bytes) -> list[Any]:
        decoded = codec.decode_batch(payload)
        assert isinstance(decoded, codec.Batch)
        return self.normalizer.apply(decoded)

    def short(self, payload: bytes) -> bool:
        return self.normalizer.fast_path(payload) is not None

    @property
    def live(self) -> set[Any]:
        return {block for table in self.normalizer.index.tables.values() for block in table.blocks}


@pytest.fixture
def source() -> Source:
    return Source()


class TestTakes:
    @pytest.mark.parametrize(
        "events",
        [
            [store([50])],
            [store([50], 40)],
            [store([50, 51, 52], 7)],
            [store([50], 40), store([51], 50)],
            [removed(40)],
            [removed(40, 39, 38)],
            [removed(40), removed(39), removed(38)],
            [removed(40), store([40], 39)],
            [removed(40), store([50], 40 - 1), removed(50)],
            [store([50], tokens=[0, 127, 128, 255]), store([51], tokens=[256, 65535, 65536, 2**32 - 1])],
        ],
    )
    def test_what_needs_no_change(self, source, events):
        before = source.stats.stored, source.stats.removed
        assert source.short(batch(*events))
        stores = sum(event["type"] == "BlockStored" for event in events)
        assert (source.stats.stored, source.stats.removed) == (before[0] + stores, before[1] + len(events) - stores)

    def test_the_payload_is_whole_with_every_field_kvbus_sends(self, source):
        assert source.normalizer.fast_path(batch(store([50])))[1]
        assert source.normalizer.fast_path(batch(removed(50)))[1]

    def test_a_field_that_was_not_sent_is_filled_in(self, source):
        """SGLang sends no lora_name."""
        taken = source.normalizer.fast_path(batch(store([50], lora_name=...), store([51])))
        assert taken is not None
        events, whole = taken[0].events, taken[1]
        assert not whole
        assert all(b"lora_name" in msgspec.msgpack.encode(event) for event in events)

    def test_byte_hashes(self):
        stats = SourceStats()
        normalizer = Normalizer(Rules(), stats)
        chain = [byte_hash(n) for n in range(64)]
        for at in range(0, 48, 4):
            payload = batch(store(chain[at : at + 4], chain[at - 1] if at else None))
            if at < 4 * (YOUNG + 1):
                assert normalizer.fast_path(payload) is None
                normalizer.apply(well_formed(payload))
            else:
                assert normalizer.fast_path(payload) is not None
        assert normalizer.bytes_hashes
        assert len(normalizer.index) == 48

    @pytest.mark.parametrize("keys", [None, [None, None], [], [["salt"], None]])
    def test_extra_keys_stay_with_their_blocks_each_time(self, source, keys):
        for first in (50, 60, 70):
            assert source.short(batch(store([first, first + 1], extra_keys=keys)))
        chunks = source.normalizer.index.tables[None, "GPU"].blocks
        assert [chunks[block].extra_keys for block in (51, 61, 71)] == [msgspec.msgpack.encode(keys)] * 3

    def test_blocks_removed_in_any_order_within_a_batch_are_counted_once(self, source):
        """First the block in the middle goes, so the chunk is one that is watched; the rest leaves it later."""
        source.long(batch(store([50, 51, 52, 53], 40)))
        source.long(batch(removed(50)))
        held = source.normalizer.index.size.bytes
        for block in (53, 52):
            assert source.short(batch(removed(block)))
            assert source.normalizer.index.size.bytes == held
        assert source.short(batch(removed(51)))
        assert len(source.normalizer.index) == 40
        assert source.normalizer.index.size.bytes < held

    def test_other_tables_parents_count(self, source):
        source.long(batch(store([60, 61], None, medium="CPU"), store([62, 63], 61, medium="CPU")))
        assert source.short(batch(store([70], 61)))


LAST = {"parent": 39, "tokens": list(range(12, 16))}
"""Block 40, as it was stored."""


class TestCopies:
    def test_are_counted_and_not_told(self, source):
        for count in (1, 2):
            taken = source.normalizer.fast_path(batch(store([40], **LAST)))
            assert taken is not None
            assert (taken[0].events, taken[1]) == ([], False)
            assert source.stats.filtered == {"copy": count}
        for left in (1, 0):
            taken = source.normalizer.fast_path(batch(removed(40, 39)) if not left else batch(removed(40)))
            assert taken is not None
            assert [event.block_hashes for event in taken[0].events] == ([] if left else [(39,)])
        assert source.live == {*range(1, 39), 40}
        assert source.short(batch(removed(40)))
        assert source.live == set(range(1, 39))

    def test_of_a_whole_event(self, source):
        assert source.short(batch(store([37, 38, 39, 40], 36), removed(40, 39, 38, 37)))
        assert source.live == set(range(1, 41))
        assert source.short(batch(removed(40, 39, 38, 37)))
        assert source.live == set(range(1, 37))

    def test_are_as_if_they_had_not_been_where_they_do_not_count(self):
        source = Source(duplicates="ignore")
        assert source.short(batch(store([40], **LAST)))
        assert source.short(batch(removed(40)))
        assert source.live == set(range(1, 40))

    def test_are_taken_back_with_the_rest_of_the_batch(self, source):
        assert source.short(batch(store([40], **LAST)))
        assert not source.short(batch(removed(40), removed(40), store([40], **LAST), removed(39), removed(99)))
        assert not source.short(batch(store([40], **LAST), removed(99)))
        assert source.normalizer.index.tables[None, "GPU"].copies == {40: 1}
        assert source.live == set(range(1, 41))


LEFT = {
    "no events": [],
    "a clear": [{"type": "AllBlocksCleared"}],
    "clears around what is in order": [{"type": "AllBlocksCleared"}, store([50]), {"type": "AllBlocksCleared"}],
    "a copy with other tokens": [store([50]), store([40])],
    "a copy among new ones": [store([50, 40])],
    "a copy of an event with other tokens": [store([37, 38, 39, 40], 36, tokens=[7] * 4 * SIZE)],
    "extra keys of another number of blocks": [store([50, 51], extra_keys=[None])],
    "an adapter's name too long to be kept": [store([50], lora_name="x" * 2000)],
    "a hash twice": [store([50, 50])],
    "its own parent": [store([50], 50)],
    "an unknown parent": [store([50], 49)],
    "a parent that comes later": [store([51], 50), store([50])],
    "no hashes": [store([])],
    "no tokens": [store([50], tokens=[])],
    "too few tokens": [store([50], tokens=[1, 2, 3])],
    "too many tokens": [store([50], tokens=[1, 2, 3, 4, 5])],
    "a negative token": [store([50], tokens=[1, 2, 3, -1])],
    "a token out of range": [store([50], tokens=[1, 2, 3, 2**32])],
    "a float token": [store([50], tokens=[1, 2, 3, 4.0])],
    "pairs": [store([50], tokens=[[1, 2]] * 4)],
    "another block size": [store([50], tokens=list(range(8)), block_size=8)],
    "block size nought": [store([50], block_size=0)],
    "an unknown medium": [store([50], medium="TAPE")],
    "a medium in small letters": [store([50], medium="gpu")],
    "an unknown field": [store([50], novel=1)],
    "a carried field": [store([50], cache_salt="x")],
    "hashes of two kinds": [store([50, b"x"])],
    "the other kind of hash": [store([b"x"])],
    "a parent of the other kind": [store([50], b"x")],
    "a group without prefixes": [store([50], kv_cache_spec_kind="sliding_window")],
    "extra keys that are no list": [store([50], extra_keys=7)],
    "an unknown block removed": [removed(99)],
    "a known and an unknown one": [removed(40, 99)],
    "one twice": [removed(40, 40)],
    "a parent before its child": [removed(39, 40)],
    "a parent before its child, apart": [removed(39), removed(40)],
    "removed from another group": [removed(40, group_idx=3)],
    "removed without a medium": [{"type": "BlockRemoved", "block_hashes": [40]}],
    "an unknown event": [{"type": "BlockMoved"}],
    "good, then bad": [store([50], 40), removed(50), store([51, 52], 40), removed(99)],
    "removed in part, then bad": [removed(40, 39), store([40], 39), removed(38, 99)],
}


class TestLeaves:
    @pytest.mark.parametrize("events", LEFT.values(), ids=LEFT.keys())
    def test_what_is_for_the_long_way_changes_nothing(self, source, events):
        before = [{**table.blocks} for table in source.normalizer.index.tables.values()]
        counts = msgspec.structs.asdict(source.stats)
        assert not source.short(batch(*events))
        after = [table.blocks for table in source.normalizer.index.tables.values()]
        assert [table for table in after if table] == [table for table in before if table]
        assert msgspec.structs.asdict(source.stats) == counts

    @pytest.mark.parametrize("ts", [float("nan"), float("inf"), 1, "x", None])
    def test_a_time_that_is_none(self, source, ts):
        assert not source.short(batch(store([50]), ts=ts))

    def test_no_rank(self, source):
        assert not source.short(batch(store([50]), rank=None))
        assert not source.short(msgspec.msgpack.encode([1.0, [store([50])]]))
        assert not source.short(msgspec.msgpack.encode([1.0, [store([50])], 0, 0]))

    @pytest.mark.parametrize("payload", [b"", b"\x93", b"\x93\xcb", b"\x93\xcb" + b"\xff" * 40, b"\x91" * 100_000])
    def test_no_batch(self, source, payload):
        assert not source.short(payload)

    def test_a_stream_that_has_not_proven_its_block_size(self):
        normalizer = Normalizer(Rules(), SourceStats())
        assert normalizer.fast_path(batch(store([1, 2]))) is None

    def test_a_full_index(self):
        source = Source(max_blocks=41)
        assert source.short(batch(store([50])))
        assert not source.short(batch(store([51])))
        assert not source.short(batch(removed(50), store([51, 52])))
        assert source.live == {*range(1, 41), 50}
        assert source.short(batch(removed(50), store([51])))

    def test_an_index_that_is_full_of_bytes_that_have_gone_has_room(self):
        probe = Source()
        source = Source(max_index_bytes=probe.normalizer.index.size.bytes)
        assert not source.short(batch(store([50])))
        assert source.short(batch(removed(40, 39, 38, 37)))
        assert source.short(batch(store([50])))
        assert source.short(batch(store([51, 52])))
        assert not source.short(batch(store([53])))
        assert source.live == {*range(1, 37), 50, 51, 52}

    def test_coarse_blocks_are_remembered(self, source):
        source.long(batch(store([90], tokens=list(range(8)), block_size=8)))
        assert not source.short(batch(removed(40)))


class TestAfterwards:
    def test_what_the_long_way_learns_counts_at_once(self, source):
        assert source.short(batch(store([50, 51])))
        for at in range(20):  # the engine really has blocks of another size
            source.long(batch(store([100 + 2 * at, 101 + 2 * at], tokens=list(range(16)), block_size=8)))
        assert not source.short(batch(store([200])))

    def test_a_clear_is_followed_by_a_beginning(self, source):
        assert source.short(batch(store([50])))
        source.long(batch({"type": "AllBlocksCleared"}))
        assert source.short(batch(store([1, 2], None)))
        assert source.live == {1, 2}

    def test_another_life_has_to_prove_itself(self, source):
        assert source.short(batch(store([50])))
        source.normalizer.reset()
        assert not source.short(batch(store([50, 51])))
        assert source.live == set()
