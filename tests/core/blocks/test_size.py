"""Tests for the memory that kvbus computes for an index, and for the cost of an event in an index with many tables."""

import sys
import tracemalloc

import pytest

from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, payload, removed, store
from tests.typed import well_formed


def test_the_estimated_index_bytes_match_the_growth_of_the_process():
    bench = Bench(block_size=16)
    events = [[store(list(range(8 * n, 8 * n + 8)))] for n in range(2000)]
    for batch in events[:100]:
        bench.feed(*batch)
    before = bench.normalizer.index_bytes
    tracemalloc.start()
    at = tracemalloc.get_traced_memory()[0]
    for batch in events[100:]:
        bench.normalizer.apply(well_formed(payload(*batch)))
    grown = tracemalloc.get_traced_memory()[0] - at
    tracemalloc.stop()
    assert 0.6 * grown < bench.normalizer.index_bytes - before < 1.6 * grown


def _calls(bench, payload_):
    """Return the number of function calls that the normalizer makes for one batch."""
    counted = 0

    def profile(_frame, event, _argument):
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        bench.normalizer.apply(well_formed(payload_))
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.parametrize("event", [store([10**6]), cleared(), removed([1], group=0, medium="DISK")])
def test_the_cost_of_an_event_does_not_grow_with_the_number_of_tables(event):
    """The cost of an event does not depend on the number of groups and media in the index.

    The index may have hundreds of them. An event visits only the blocks of its own group and medium.
    """
    media = ["CPU", "DISK", "FS", "NVME", "OBJ", "SHARED", "REMOTE", "NETWORK"]
    costs = []
    for groups in (2, 64):
        bench = Bench(block_size=16)
        for group in range(groups):
            bench.feed(*(store([n + 10 * group], group=group, medium=medium) for n, medium in enumerate(media)))
        costs.append(_calls(bench, payload(*[event] * 50)))
    assert costs[1] < costs[0] * 1.5 + 200, costs
