"""The bytes of an index: right after any order of removals, near what the process grows by, and a limit that holds."""

import random
import sys
import time
import tracemalloc

import pytest

from kvbus.core.types import Reason
from tests.core.dsl import Bench, Script, live, up
from tests.doubles.accounting import size_is_true
from tests.doubles.payloads import cleared, payload, removed, store
from tests.typed import well_formed


def test_a_chunk_counts_until_its_last_block_has_gone():
    bench = Bench(block_size=16)
    bench.feed(store([1, 2, 3]))
    whole = bench.normalizer.index_bytes
    bench.feed(removed([1]))
    bench.feed(removed([3]))
    assert bench.normalizer.index_bytes == whole
    bench.feed(removed([2]))
    assert bench.normalizer.index_bytes == 0


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_stores_and_removals_is_counted(seed):
    rng = random.Random(seed)
    bench = Bench(block_size=16)
    known: list[int] = []
    for n in range(600):
        if known and rng.random() < 0.5:
            gone = rng.sample(known, min(len(known), rng.randint(1, 6)))
            bench.feed(removed(gone))
            known = [block for block in known if block not in gone]
        else:
            first = rng.choice([8 * n, *known])
            blocks = list(range(first, first + rng.randint(1, 5)))
            bench.feed(store(blocks, medium=rng.choice(["GPU", "GPU", "CPU"])))
            known = sorted({*known, *blocks})
        if rng.random() < 0.01:
            bench.feed(cleared())
    size_is_true(bench.normalizer)


def test_bytes_are_about_what_the_process_grows_by():
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


def test_at_the_limit_stores_are_refused_and_removals_make_room():
    bench = Bench(block_size=16, max_index_bytes=20_000)
    for n in range(100):
        bench.feed(store([n]))
        assert bench.normalizer.index_bytes <= 20_000
    refused = bench.rejected[Reason.INDEX_FULL]
    assert 20 < refused < 80
    assert bench.normalizer.full
    bench.feed(removed([0]))
    bench.feed(store([200]))
    assert 200 in bench.live
    assert bench.rejected[Reason.INDEX_FULL] == refused
    bench.feed(cleared())
    assert not bench.normalizer.full
    assert bench.normalizer.index_bytes == 0


def test_few_large_blocks_are_bounded_too():
    bench = Bench(block_size=100_000, max_index_bytes=2_000_000)
    for n in range(20):
        bench.feed(store([n], block_size=100_000, tokens=[1] * 100_000))
    assert bench.normalizer.index_bytes <= 2_000_000
    assert bench.rejected[Reason.INDEX_FULL] == 1


def test_a_source_at_its_limit_of_groups_is_partial():
    script = Script(max_groups=1)
    script.after(up(), live(0, store([1], group=0)), live(1, store([2], group=1)))
    assert script.stats.rejected == {Reason.TOO_MANY_GROUPS: 1}
    assert script.source.partial


def _calls(bench, payload_):
    """Calls that one batch makes."""
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
def test_what_an_event_costs_does_not_grow_with_the_tables(event):
    """Hundreds of groups and media, whose blocks stay: no event looks at each of them."""
    media = ["CPU", "DISK", "FS", "NVME", "OBJ", "SHARED", "REMOTE", "NETWORK"]
    costs = []
    for groups in (2, 64):
        bench = Bench(block_size=16)
        for group in range(groups):
            bench.feed(*(store([n + 10 * group], group=group, medium=medium) for n, medium in enumerate(media)))
        costs.append(_calls(bench, payload(*[event] * 50)))
    assert costs[1] < costs[0] * 1.5 + 200, costs


def test_clears_do_not_look_at_every_coarse_block_that_stays():
    costs = []
    for many in (20, 20_000):
        bench = Bench(block_size=16)
        bench.feed(store([1, 2], medium="CPU"))
        bench.feed(*(store([10 + n], medium="CPU", block_size=32) for n in range(many)))
        begun = time.process_time()
        for _ in range(20):
            bench.normalizer.apply(well_formed(payload(*[cleared(), store([5])] * 20)))
        costs.append(time.process_time() - begun)
    assert costs[1] < costs[0] * 4 + 0.05, costs


def test_a_chunk_that_goes_as_a_whole_takes_what_it_carries_with_it():
    bench = Bench(block_size=16)
    bench.feed(store([1, 2, 3]), store([4, 5], extra_keys=[["a" * 100], None]), store([6], mm_keys=[["b"]]))
    held = bench.normalizer.index_bytes
    bench.feed(removed([2]), removed([5, 4]), removed([6]))
    size_is_true(bench.normalizer)
    assert 0 < bench.normalizer.index_bytes < held - 100
    bench.feed(removed([1]), removed([3]))
    assert bench.normalizer.index_bytes == 0
