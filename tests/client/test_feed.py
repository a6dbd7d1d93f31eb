"""One stream's events in an index of prefixes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

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
from kvbus.core.blocks.prefix_index import PrefixIndex
from kvbus.core.types import Reason
from kvbus.core.wire.codec import Batch, decode_batch
from kvbus.core.wire.schema import AllBlocksCleared
from tests.client.blocks import batch, removed, stored, tokens
from tests.wire.captures import DATA, load


class Fed:
    """An index with one stream."""

    def __init__(self, *, copies=False):
        self.index = PrefixIndex[Worker]()
        self.feed = Feed("a", self.index, copies=copies)

    def take(self, *events, rank=0):
        decoded = decode_batch(batch(*events, rank=rank))
        assert isinstance(decoded, Batch)
        self.feed.apply(decoded)
        return self

    def held(self, *blocks):
        """How much of the chain of these blocks each rank holds."""
        return {worker.rank: count for worker, count in self.index.longest_prefix(tokens(*blocks)).items()}


def test_each_rank_is_a_worker_and_is_cleared_alone():
    fed = Fed().take(stored(1, 2)).take(stored(1), rank=1).take(stored(1, 2, 3), rank=None)
    assert fed.held(1, 2, 3) == {None: 3, 0: 2, 1: 1}
    assert fed.index.workers == [Worker("a", 0), Worker("a", 1), Worker("a", None)]
    assert fed.take(AllBlocksCleared()).held(1, 2, 3) == {None: 3, 1: 1}
    fed.feed.clear()
    assert fed.held(1, 2, 3) == {}


def test_one_removal_removes_unless_copies_are_counted():
    events = (stored(1, 2), stored(1, 2), stored(2, parent=1), removed(2))
    assert Fed().take(*events).held(1, 2) == {0: 1}
    counting = Fed(copies=True).take(*events)
    assert counting.held(1, 2) == {0: 2}
    assert counting.take(removed(2)).held(1, 2) == {0: 2}
    assert counting.take(removed(2)).held(1, 2) == {0: 1}
    assert counting.take(stored(1), AllBlocksCleared(), stored(1), removed(1)).held(1) == {}


def test_copies_on_two_media_are_counted_apart():
    fed = Fed(copies=True).take(stored(1), stored(1, medium="CPU"), stored(1, medium="CPU"), removed(1, medium="CPU"))
    assert fed.take(removed(1)).held(1) == {0: 1}
    assert fed.take(removed(1, medium="CPU")).held(1) == {}


def test_of_several_groups_the_first_with_prefixes_counts():
    window: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    full: dict[str, Any] = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    other: dict[str, Any] = {"group_idx": 2, "kv_cache_spec_kind": "full_attention"}
    fed = Fed().take(stored(1, **window), stored(1, 2, **full), stored(1, 2, 3, **other))
    assert fed.held(1, 2, 3) == {0: 2}
    assert fed.take(removed(1, group_idx=0), removed(1, group_idx=2)).held(1, 2, 3) == {0: 2}
    assert fed.take(removed(2, group_idx=1)).held(1, 2, 3) == {0: 1}
    fed.feed.clear()
    assert fed.take(stored(1, 2, 3, **other)).held(1, 2, 3) == {0: 3}


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored(1, medium="MARS"), Reason.UNKNOWN_MEDIUM),
        (stored(1, 1), Reason.DUPLICATE_HASH),
        (stored(1, extra_keys=msgspec.Raw(b"\x07")), Reason.WRONG_TYPE),
        (removed(1, medium="MARS"), Reason.UNKNOWN_MEDIUM),
    ],
)
def test_a_bad_event_is_left_out_and_counted(event, reason):
    fed = Fed().take(event, stored(5))
    assert fed.feed.status.refused == {reason: 1}
    assert fed.held(5) == {0: 1}


def test_events_that_could_not_be_read_are_counted():
    fed = Fed()
    fed.feed.apply(Batch(1.0, [], 0, rejects=[Reason.NOT_MSGPACK]))
    fed.feed.status.note(Rejected(7, b"", Reason.NOT_MSGPACK))
    assert fed.feed.status.refused == {Reason.NOT_MSGPACK: 2}


def test_a_store_without_blocks_or_tokens():
    fed = Fed().take(stored(), stored(1))
    none = stored(9)
    none.token_ids = msgspec.Raw(b"\x90")
    assert fed.take(none).held(1) == {0: 1}
    assert fed.feed.status.refused == {}


EMPTY = Batch(1.0, [], 0)


def test_how_a_stream_stands():
    status = Status()
    assert not status.settled
    course: list[tuple[Any, str, int]] = [
        (Received(0, b"", EMPTY, replayed=True), "connecting", 0),
        (Synced(0), "live", 0),
        (Received(1, b"", EMPTY), "live", 1),
        (Gap(2, 3), "gap", 1),
        (Lost(2, 3, LostReason.HOLE), "lost", 1),
        (Received(4, b"", EMPTY), "lost", 4),
        (Synced(4), "live", 4),
        (Restarted(1, RestartReason.WENT_BACK), "connecting", -1),
        (Snapshot(9, ()), "connecting", 9),
        (Conflict(), "conflict", 9),
        (Restarted(2, RestartReason.REBUILT), "connecting", -1),
        (Received(0, b"", EMPTY), "live", 0),
    ]
    for update, state, seq in course:
        status.note(update)
        assert (status.state, status.seq) == (state, seq), update
    status.note(Unreachable("tcp://a:1", "because"))
    assert (status.state, status.unreachable, status.settled) == ("live", "because", True)
    status.note(Reachable("tcp://a:1"))
    assert status.unreachable == ""


@pytest.mark.parametrize("name", sorted(path.name.removesuffix(".truth.json") for path in DATA.glob("*.truth.json")))
def test_a_capture_ends_with_the_blocks_of_a_view_that_counts_copies(name):
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
    # groups without prefixes are left out, and of those with prefixes one is enough
    counted = {
        (block.rank, block.medium, block.hash)
        for block in view
        if index.holds(Worker("a", block.rank), block.hash, block.medium)
    }
    assert len(counted) == len(index)
    groups = {block.group_idx for block in view}
    if len(groups) == 1:
        assert len(index) == len(view) > 0
