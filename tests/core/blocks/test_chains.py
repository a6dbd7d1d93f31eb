"""Tests for store events that have one block each: if each block follows the previous one, kvbus joins them into one
event, which keeps the fields of each block.
"""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.blocks import live_order as module
from kvbus.core.blocks.announce import blocks_in, runs, slices, store_of
from kvbus.core.blocks.index import MAX_RUN
from kvbus.core.blocks.live_order import FEW, PAUSE, WINDOW, chains
from kvbus.core.wire.encoding import block_by_block, encode_batch
from tests.core.dsl import Bench
from tests.doubles.payloads import plain, plain_all, removed, store, tokens_of
from tests.doubles.router import PlainSetRouter

LANES = 8


def index_of(*events, **rules):
    bench = Bench(**rules)
    bench.feed(*events)
    return bench.normalizer.index


def lanes(count, **more):
    """Return one store per block, for ``LANES`` requests that decode in parallel.

    Their blocks alternate, so the parent of each block is the block ``LANES`` stores earlier.
    """
    return [store([at], at - LANES if at > LANES else None, **more) for at in range(1, count + 1)]


def announced(index, size=10**9):
    return [event for events in slices(index, size) for event in plain_all(events)]


def lengths(events):
    return [len(event["block_hashes"]) for event in events]


def each_alone(index):
    """Return one store event for each block of the index, in the order of the index."""
    return [store_of(index, chunk, at, at + 1) for _, chunk, first, end in runs(index) for at in range(first, end)]


def canonical(events):
    return Counter(repr(sorted(plain(event).items())) for event in events)


def test_interleaved_requests_are_announced_as_one_chain_per_request():
    events = announced(index_of(*lanes(40 * LANES)))
    assert lengths(events) == [40] * LANES
    assert events[0]["block_hashes"] == list(range(1, 40 * LANES, LANES))
    assert events[0]["token_ids"] == [token for block in events[0]["block_hashes"] for token in tokens_of(block)]
    assert [event.get("parent_block_hash") for event in events] == [None] * LANES


def test_an_announced_event_is_not_longer_than_a_run():
    chain = [store([block], block - 1 or None) for block in range(1, MAX_RUN + 11)]
    first, second = announced(index_of(*chain))
    assert (len(first["block_hashes"]), second["block_hashes"][0]) == (MAX_RUN, MAX_RUN + 1)
    assert second["parent_block_hash"] == MAX_RUN


def test_the_blocks_of_a_small_table_are_not_joined():
    chain = [store([block], block - 1 or None) for block in range(1, FEW + 1)]
    assert lengths(announced(index_of(*chain[:-1]))) == [1] * (FEW - 1)
    assert lengths(announced(index_of(*chain))) == [FEW]


@pytest.mark.parametrize(
    ("odd", "size"),
    [
        ({"lora_id": 3}, 16),
        ({"extra_keys": [["a"]]}, 16),
        ({"extra_keys": []}, 16),
        ({"lookahead_token_ids": [[1, 2]]}, 16),
        ({"new_field": 1}, 16),
        ({"tokens": [[at, at + 1] for at in range(16)]}, 16),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_block_with_different_fields_is_announced_in_a_separate_event(odd, size):
    chain = [store([block], block - 1 or None, block_size=size) for block in range(1, 101)]
    chain[49] = store([50], 49, block_size=size, **odd)
    index = index_of(*chain)
    assert lengths(announced(index)) == [49, 1, 50]
    assert (
        canonical(event for events in slices(index, 10**9) for event in events)[
            repr(sorted(plain(each_alone(index)[49]).items()))
        ]
        == 1
    )


def test_joining_chains_reads_a_bounded_window_and_pauses():
    index = index_of(*[store([block]) for block in range(1, WINDOW + 2 * PAUSE)])
    most = read = 0

    def counted():
        nonlocal read
        for run in runs(index):
            read += 1
            yield run

    left = 0
    pauses = 0
    for chain in chains(index, counted()):
        left += len(chain)
        pauses += not chain
        most = max(most, read - left)
    assert most == WINDOW + 1
    assert pauses == (WINDOW + 2 * PAUSE - 1) // PAUSE


def test_blocks_with_derived_hashes_are_not_joined():
    chain = [store([block], block - 1 or None, block_size=32) for block in range(1, 101)]
    assert lengths(announced(index_of(*chain, block_size=16))) == [2] * 100


BLOCKS = st.integers(1, 40)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("store"),
            BLOCKS,
            st.one_of(st.none(), BLOCKS),
            st.integers(1, 3),
            st.sampled_from(["GPU", "CPU"]),
            st.sampled_from(
                [{}, {"extra_keys": None}, {"extra_keys": [None]}, {"extra_keys": [["a"]]}, {"lora_id": 1}]
            ),
        ),
        st.tuples(st.just("removed"), BLOCKS, st.sampled_from(["GPU", "CPU"])),
    ),
    max_size=120,
)


@given(STEPS, st.integers(1, 50), st.integers(1, 30))
def test_the_announced_events_describe_exactly_the_index(steps, size, window):
    """Announcing an index sends every block once, unchanged and after its parent.

    The index has random chains, forks, holes and cycles of parents.
    """
    events: list[Any] = []
    for step in steps:
        if step[0] == "removed":
            events.append(removed([step[1]], medium=step[2]))
            continue
        _, block, parent, count, medium, more = step
        keys = {"extra_keys": more["extra_keys"] * count} if more.get("extra_keys") else {}
        events.append(store(list(range(block, block + count)), parent, medium=medium, **(more | keys)))
    index = index_of(*events)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FEW", 0)
        patch.setattr(module, "WINDOW", window)
        found = [events for events in slices(index, size) if events]
    assert all(blocks_in(events) == size for events in found[:-1])
    alone = [block for events in found for event in events for block in block_by_block(event)]
    assert canonical(alone) == canonical(each_alone(index))
    router = PlainSetRouter()
    for seq, events in enumerate(found):
        router.apply(seq, encode_batch(events, 1.0, 0))
    order = [(event.get("medium"), block) for event in plain_all(alone) for block in event["block_hashes"]]
    before = {
        key: at
        for at, (_, chunk, a, b) in enumerate(runs(index))
        for key in ((chunk.meta.medium, block) for block in chunk.hashes[a:b])
    }
    place = {key: at for at, key in enumerate(order)}
    for event in plain_all(alone):
        key, parent = (
            (event.get("medium"), event["block_hashes"][0]),
            (event.get("medium"), event.get("parent_block_hash")),
        )
        if parent in place and before[parent] < before[key]:
            assert place[parent] < place[key]
