"""Tests for the most frequent events of engines, alone in a batch and together with unusual events."""

import pytest

from kvbus.core.types import Filtered
from kvbus.core.wire.codec import decode, decode_batch
from kvbus.core.wire.schema import Batch
from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, payload, plain_all, removed, store


def settled(**rules):
    """Return a normalizer for tests that knows the block size of a group, and has blocks 1 to 20 in one chain."""
    bench = Bench(**rules)
    for first in range(1, 20, 2):
        bench.feed(store([first, first + 1], first - 1 or None, lora_id=None, lora_name=None))
    return bench


def full_store(hashes, parent=None, **fields):
    return store(hashes, parent, lora_id=None, lora_name=None, **fields)


@pytest.mark.parametrize(
    "odd",
    [
        full_store([50, 51], extra_keys=[None]),
        full_store([50], session_id=5),
        full_store([50], lookahead_token_ids=[[-1]]),
        full_store([50]) | {"lora_name": 5},
    ],
    ids=["keys", "session", "lookahead", "adapter"],
)
def test_a_store_with_an_odd_field_keeps_its_position_in_the_batch(odd):
    bench = settled()
    events = [full_store([30], 20), odd, full_store([31], 30)]
    assert bench.feed(*events) == plain_all(events)
    assert (bench.rejected, bench.filtered) == ({}, {"odd_field": 1})


def without(event, *names):
    return {name: value for name, value in event.items() if name not in names}


def test_a_block_inactive_event_does_not_change_other_events_of_its_batch():
    """A BlockInactive with the fields of vllm#50732 and one unknown field does not change how the other events are
    handled.
    """
    idle = {"type": "BlockInactive", "block_hashes": [1], "medium": "GPU", "group_idx": 0, "later": 1}
    bench = Bench()
    bench.feed(store([1], group=0), store([2], 1, group=0))
    out = bench.feed(idle, store([3], 2, group=0), idle, removed([3], group=0))
    assert out == plain_all([store([3], 2, group=0), removed([3], group=0)])
    assert bench.feed(cleared(), idle, store([4])) == plain_all([cleared(), store([4])])
    assert bench.filtered == {Filtered.INACTIVE: 3}
    assert bench.rejected == {}
    batch = decode(payload(idle, store([3], 2, group=0)))
    assert isinstance(batch, Batch)
    assert batch.unknown is None


def test_decoded_batches_contain_no_block_inactive_events():
    batch = decode_batch(payload({"type": "BlockInactive", "block_hashes": [1]}, store([1])))
    assert isinstance(batch, Batch)
    assert plain_all(batch.events) == plain_all([store([1])])
