"""A set by identity: exact, whatever the addresses, and small."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.blocks.chunk_set import ChunkSet
from kvbus.core.blocks.index import Index, set_of_chunks
from kvbus.core.blocks.live_order import in_order
from tests.core.blocks.chunks import put

COUNT = 100_000


class Thing:
    """Something with an address, and no equality but its identity."""


@given(st.lists(st.integers(0, 300), max_size=400))
def test_it_is_a_set_by_identity(picks):
    things = [Thing() for _ in range(301)]
    found, known = ChunkSet(), set()
    for pick in picks:
        assert found.add(things[pick]) is (pick not in known)
        known.add(pick)


def test_neighbours_in_memory_are_told_apart():
    things = [Thing() for _ in range(COUNT)]
    found = ChunkSet()
    assert all(found.add(thing) for thing in things)
    assert not any(found.add(thing) for thing in things)


def test_walking_a_large_index_takes_little_memory():
    """Not the eighty bytes a chunk of a set of numbers: a state snapshot of a million blocks has to fit."""
    index = Index()
    for block in range(1, COUNT):
        put(index, [block], block - 1 or None)
    table = index.table(None, "GPU")
    tracemalloc.start()
    try:
        for walk in (in_order(index), set_of_chunks(table)):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            assert sum(1 for _ in walk) == COUNT - 1
            assert tracemalloc.get_traced_memory()[1] - before < 20 * COUNT
    finally:
        tracemalloc.stop()


def test_what_was_added_is_in_it():
    chunks = [object() for _ in range(1000)]
    seen = ChunkSet()
    for chunk in chunks[::3]:
        seen.add(chunk)
    assert [chunk in seen for chunk in chunks] == [at % 3 == 0 for at in range(1000)]
