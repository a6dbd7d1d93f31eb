"""Tests for the client library's Feed, which applies the events of one stream to an index of prompt prefixes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from kvbus.client import (
    BlockView,
    Conflict,
    Gap,
    Lost,
    LostReason,
    Reachable,
    Received,
    Rejected,
    Restarted,
    RestartReason,
    Snapshot,
    Status,
    Synced,
    Unreachable,
    Worker,
)
from kvbus.client.feed import Feed
from kvbus.client.prefix_index import PrefixIndex
from kvbus.core.types import Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.schema import AllBlocksCleared, Batch, BlockStored
from tests.client.blocks import batch, removed, stored, tokens
from tests.wire.captures import DATA, load


class FedIndex:
    """An index of prompt prefixes to which a Feed applies the events of one stream."""

    def __init__(self, *, copies=False):
        self.index = PrefixIndex[Worker]()
        self.feed = Feed("a", self.index, copies=copies)

    def take(self, *events, rank=0):
        decoded = decode_batch(batch(*events, rank=rank))
        assert isinstance(decoded, Batch)
        self.feed.apply(decoded)
        return self

    def held(self, *blocks):
        """For each rank, return how many of these consecutive blocks it holds, counted from the first block."""
        return {worker.rank: count for worker, count in self.index.longest_prefix(tokens(*blocks)).items()}


def test_each_rank_is_a_worker_and_a_clear_applies_to_one_rank():
    fed = FedIndex().take(stored(1, 2)).take(stored(1), rank=1).take(stored(1, 2, 3), rank=None)
    assert fed.held(1, 2, 3) == {None: 3, 0: 2, 1: 1}
    assert fed.index.workers == [Worker("a", 0), Worker("a", 1), Worker("a", None)]
    assert fed.take(AllBlocksCleared()).held(1, 2, 3) == {None: 3, 1: 1}
    fed.feed.clear()
    assert fed.held(1, 2, 3) == {}


def test_a_removal_of_a_copied_block_removes_it_unless_copies_are_counted():
    events = (stored(1, 2), stored(1, 2), stored(2, parent=1), removed(2))
    assert FedIndex().take(*events).held(1, 2) == {0: 1}
    counting = FedIndex(copies=True).take(*events)
    assert counting.held(1, 2) == {0: 2}
    assert counting.take(removed(2)).held(1, 2) == {0: 2}
    assert counting.take(removed(2)).held(1, 2) == {0: 1}
    assert counting.take(stored(1), AllBlocksCleared(), stored(1), removed(1)).held(1) == {}


def test_copies_on_different_media_are_counted_separately():
    fed = FedIndex(copies=True).take(
        stored(1), stored(1, medium="CPU"), stored(1, medium="CPU"), removed(1, medium="CPU")
    )
    assert fed.take(removed(1)).held(1) == {0: 1}
    assert fed.take(removed(1, medium="CPU")).held(1) == {}


EVENTS = st.one_of(
    st.builds(stored, st.integers(1, 3), medium=st.sampled_from(["GPU", "CPU"])),
    st.builds(removed, st.integers(1, 3), medium=st.sampled_from(["GPU", "CPU"])),
    st.sampled_from([AllBlocksCleared(), AllBlocksCleared("GPU"), AllBlocksCleared("cpu")]),
)


@given(copies=st.booleans(), said=st.lists(st.tuples(st.integers(0, 1), EVENTS), max_size=30))
def test_random_stores_removals_and_clears_match_a_simple_count(copies, said):
    fed = FedIndex(copies=copies)
    live: Counter[tuple[int, str, int]] = Counter()
    for rank, event in said:
        fed.take(event, rank=rank)
        if isinstance(event, AllBlocksCleared):
            gone = {"GPU", "CPU"} if event.medium is UNSET else {str(event.medium).upper()}
            live = Counter({key: count for key, count in live.items() if key[0] != rank or key[1] not in gone})
            continue
        key = (rank, event.medium, event.block_hashes[0])
        if isinstance(event, BlockStored):
            live[key] = live[key] + 1 if copies else 1
        else:
            live[key] = max(live[key] - 1, 0)
    held = {
        (rank, medium, block): fed.index.holds(Worker("a", rank), block, medium)
        for rank in (0, 1)
        for medium in ("GPU", "CPU")
        for block in (1, 2, 3)
    }
    assert held == {key: live[key] > 0 for key in held}
    for block in (1, 2, 3):
        ranks = {rank for (rank, _, each), there in held.items() if there and each == block}
        assert fed.held(block) == dict.fromkeys(ranks, 1)


def test_a_feed_indexes_the_first_group_with_full_attention():
    window: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    full: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    other: dict[str, Any] = {"group_idx": 2, "kv_cache_spec_kind": "full_attention"}
    fed = FedIndex().take(stored(1, **window), stored(1, 2, **full), stored(1, 2, 3, **other))
    assert fed.held(1, 2, 3) == {0: 2}
    assert fed.take(removed(1, group_idx=0), removed(1, group_idx=2)).held(1, 2, 3) == {0: 2}
    assert fed.take(removed(2, group_idx=1)).held(1, 2, 3) == {0: 1}
    fed.feed.clear()
    assert fed.take(stored(1, 2, 3, **other)).held(1, 2, 3) == {0: 3}


def test_a_feed_chooses_the_indexed_group_for_each_rank():
    fed = FedIndex().take(stored(1)).take(stored(1, 2, group_idx=0), rank=1)
    assert fed.held(1, 2) == {1: 2, 0: 1}
    assert fed.take(removed(2, group_idx=0), rank=1).held(1, 2) == {0: 1, 1: 1}


def test_a_cleared_worker_may_begin_with_another_group():
    fed = FedIndex().take(stored(1)).take(AllBlocksCleared(), stored(1, 2, group_idx=0))
    assert fed.held(1, 2) == {0: 2}


def test_a_store_without_tokens_does_not_choose_the_group():
    placeholder = stored(7, medium="CPU")
    placeholder.token_ids, placeholder.block_size = msgspec.Raw(b"\x90"), 0
    fed = FedIndex().take(placeholder, stored(1, group_idx=0))
    assert fed.held(1) == {0: 1}


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored(1, medium="MARS"), Reason.UNKNOWN_MEDIUM),
        (stored(1, 1), Reason.DUPLICATE_HASH),
        (removed(1, medium="MARS"), Reason.UNKNOWN_MEDIUM),
    ],
)
def test_a_bad_event_is_skipped_and_counted(event, reason):
    fed = FedIndex().take(event, stored(5))
    assert fed.feed.status.refused == {reason: 1}
    assert fed.held(5) == {0: 1}


def test_unreadable_events_are_counted_as_refused():
    fed = FedIndex()
    batch = Batch(1.0, [], 0)
    batch.rejects.append(Reason.NOT_MSGPACK)
    fed.feed.apply(batch)
    fed.feed.status.note(Rejected(7, b"", Reason.NOT_MSGPACK))
    assert fed.feed.status.refused == {Reason.NOT_MSGPACK: 2}


def test_a_store_without_blocks_or_tokens_changes_nothing():
    fed = FedIndex().take(stored(), stored(1))
    none = stored(9)
    none.token_ids = msgspec.Raw(b"\x90")
    assert fed.take(none).held(1) == {0: 1}
    assert fed.feed.status.refused == {}


EMPTY = Batch(1.0, [], 0)


def test_the_status_of_a_stream_follows_its_updates():
    status = Status()
    assert not status.settled
    course: list[tuple[Any, str, bool, int]] = [
        (Received(0, b"", EMPTY, replayed=True), "connecting", False, 0),
        (Synced(0), "live", False, 0),
        (Received(1, b"", EMPTY), "live", False, 1),
        (Gap(2, 3), "gap", False, 1),
        (Received(2, b"", EMPTY, replayed=True), "gap", False, 2),
        (Lost(3, 3, LostReason.HOLE), "gap", True, 2),
        (Received(4, b"", EMPTY), "live", True, 4),
        (Synced(4), "live", True, 4),
        (Restarted(1, RestartReason.WENT_BACK), "connecting", False, -1),
        (Lost(0, 8, LostReason.TRIMMED), "connecting", True, -1),
        (Snapshot(9, ()), "connecting", False, 9),
        (Conflict(), "conflict", False, 9),
        (Restarted(2, RestartReason.REBUILT), "connecting", False, -1),
        (Received(0, b"", EMPTY), "live", False, 0),
    ]
    for update, state, partial, seq in course:
        status.note(update)
        assert (status.state, status.partial, status.seq) == (state, partial, seq), update
        assert status.settled == (state != "connecting" or partial)
    status.note(Unreachable("tcp://a:1", "because"))
    assert (status.state, status.unreachable, status.settled) == ("live", "because", True)
    status.note(Reachable("tcp://a:1"))
    assert status.unreachable == ""


@pytest.mark.parametrize("name", sorted(path.name.removesuffix(".truth.json") for path in DATA.glob("*.truth.json")))
def test_a_feed_ends_a_capture_with_the_same_blocks_as_a_view(name):
    index = PrefixIndex[Worker]()
    feed, view = Feed("a", index, copies=True), BlockView(copies=True)
    last = -1
    for message in load(name):
        if message.seq <= last:
            feed.clear()
            view.clear()
        last = message.seq
        decoded = decode_batch(message.payload)
        assert isinstance(decoded, Batch)
        feed.apply(decoded)
        view.apply_batch(decoded)
    # The index leaves out groups without prefix caching. Of the groups with prefix caching, it needs only one.
    counted = {
        (block.rank, block.medium, block.hash)
        for block in view
        if index.holds(Worker("a", block.rank), block.hash, block.medium)
    }
    assert len(counted) == len(index)
    groups = {block.group_idx for block in view}
    if len(groups) == 1:
        assert len(index) == len(view) > 0


def test_a_feed_has_separate_workers_for_each_topic() -> None:
    fed = FedIndex()
    one, two = fed.feed.of(b"kv@1"), fed.feed.of(b"kv@2")
    assert fed.feed.of(b"kv@1") is one
    for number, part in enumerate((one, two)):
        decoded = decode_batch(batch(stored(number + 1), rank=0))
        assert isinstance(decoded, Batch)
        part.apply(decoded)
    assert fed.feed.names == ["a", "a/kv@1", "a/kv@2"]
    assert len(fed.index) == 2
    one.clear()
    assert len(fed.index) == 1
    fed.feed.clear()
    assert len(fed.index) == 0
