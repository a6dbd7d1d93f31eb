"""Blocks that are followed, by example: what counts as stored, removed and stored again, and from when on ages are known."""

from __future__ import annotations

import random
import tracemalloc
from math import exp

import pytest

from kvbus.core.analytics import LIMIT, WINDOW, Analytics, shares
from kvbus.core.blocks.index import Index
from kvbus.core.commands import RequestSnapshot
from kvbus.core.events import BatchReceived, SnapshotReceived, SourceDown, SourceUp, Tick
from kvbus.core.normalizing.rules import Rules
from kvbus.core.relay import Relay
from kvbus.core.sequencing.settings import Settings
from kvbus.core.source_spec import SourceSpec
from kvbus.core.source_stats import SourceStats
from kvbus.core.wire.schema import BlockRemoved, BlockStored
from kvbus.telemetry.readings import read_sources
from tests.doubles.payloads import batch, cleared, payload, removed, store


class Followed:
    """A relay with one source whose blocks are followed, and an engine that publishes at the times it is given."""

    def __init__(self, *, snapshot: bool = False, on_lost="clear", **rules) -> None:
        settings = Settings(replay=snapshot, snapshot=snapshot, probe_interval=0.0)
        self.relay = Relay([SourceSpec("engine", 0, settings, Rules(**rules), on_lost, analytics=LIMIT)], [])
        self.seq = 0

    def at(self, ts: float, *events) -> Followed:
        self.relay.handle(BatchReceived(0, batch(self.seq, *events, ts=ts)), 0.0)
        self.seq += 1
        return self

    @property
    def analytics(self) -> Analytics:
        (source,) = self.relay.sources
        assert source.analytics is not None
        return source.analytics

    @property
    def counts(self):
        """Live, stored, removed, stored again, and the lifetimes known: how many, and their sum."""
        reading = self.analytics.reading(0.0)
        lifetimes = reading.lifetimes
        return (
            (reading.live, reading.stored, reading.removed, reading.stored_again),
            (sum(lifetimes.counts), lifetimes.total),
        )


def test_a_block_lives_from_its_store_to_its_removal_by_the_engines_clock():
    followed = Followed().at(100.0, store([1, 2, 3])).at(107.5, removed([3, 2])).at(110.0, store([2], 1))
    assert followed.counts == ((2, 4, 2, 1), (2, 15.0))


def test_a_clock_that_goes_back_makes_no_negative_age():
    assert Followed().at(100.0, store([1])).at(40.0, removed([1])).counts == ((0, 1, 1, 0), (1, 0.0))


@pytest.mark.parametrize(
    "moves",
    [
        [[store([1, 2], medium="CPU")], [removed([2, 1])]],
        [[removed([2, 1]), store([1, 2], medium="CPU")]],
        [[store([1, 2], medium="CPU"), removed([2, 1])]],
    ],
    ids=["stored first", "removed first", "one batch"],
)
def test_a_block_that_moves_to_another_tier_was_not_removed(moves):
    followed = Followed().at(0.0, store([1, 2]))
    for events in moves:
        followed.at(5.0, *events)
    assert followed.counts == ((2, 2, 0, 0), (0, 0.0))
    assert followed.at(9.0, removed([2, 1], medium="CPU")).counts == ((0, 2, 2, 0), (2, 18.0))


def test_a_block_on_three_tiers_stays_until_the_last_one_evicts_it():
    followed = Followed().at(0.0, *(store([1], medium=tier) for tier in ("GPU", "CPU", "DISK")))
    for ts, tier in ((1.0, "CPU"), (2.0, "GPU"), (3.0, "DISK")):
        assert followed.counts == ((1, 1, 0, 0), (0, 0.0))
        followed.at(ts, removed([1], medium=tier))
    assert followed.counts == ((0, 1, 1, 0), (1, 3.0))


def test_a_move_that_is_spread_over_batches_is_a_removal_and_a_store_of_the_same_block():
    followed = Followed().at(0.0, store([1, 2, 3]), store([8, 9]))
    followed.at(1.0, removed([3])).at(2.0, store([3], 2, medium="CPU"))
    assert followed.counts == ((5, 6, 1, 1), (1, 1.0))


def test_copies_are_one_block():
    followed = Followed().at(0.0, store([1, 2])).at(1.0, store([1, 2])).at(2.0, removed([2]))
    assert followed.counts == ((2, 2, 0, 0), (0, 0.0))


def test_what_came_back_too_late_for_a_cache_of_twice_the_size_is_a_new_block():
    followed = Followed().at(0.0, store([1, 2, 3, 4, 5, 6]))
    followed.at(1.0, removed([6, 5, 4, 3]))  # two are live, so 4 and 3 are remembered
    followed.at(2.0, store([5], 2)).at(3.0, store([4], 2))
    assert followed.counts[0] == (4, 8, 4, 1)


@pytest.mark.parametrize("clears", ["all", "device"])
def test_a_clear_evicts_nothing(clears):
    """Neither as AllBlocksCleared nor as removals, which it is where another tier keeps its blocks."""
    followed = Followed(clears=clears).at(0.0, store([1, 2, 3]), store([1], medium="CPU")).at(5.0, cleared())
    live = 0 if clears == "all" else 1
    assert followed.counts == ((live, 3, 0, 0), (0, 0.0))
    assert followed.at(6.0, store([1, 2, 3])).counts == ((3, 6 - live, 0, 0), (0, 0.0))
    assert followed.at(8.0, removed([3])).counts[1] == (1, 2.0)


def test_a_new_epoch_evicts_nothing_and_what_was_before_does_not_come_back():
    followed = Followed().at(0.0, store([1, 2])).at(1.0, store([3], 2)).at(2.0, removed([3]))
    followed.seq = 0
    followed.at(50.0, store([3])).at(51.0, store([1])).at(53.0, removed([1]))
    assert followed.relay.sources[0].sequencer.epoch == 1
    assert followed.counts == ((1, 5, 2, 0), (2, 3.0))


def test_blocks_that_get_other_names_have_no_age():
    """A rebuild: a block of two sizes was taken for one of its own, and is cut after all."""
    followed = Followed().at(0.0, store([1], block_size=32)).at(1.0, store([2], 1, block_size=16))
    assert followed.relay.sources[0].stats.rebuilds == 1
    index = followed.relay.sources[0].normalizer.index
    assert set(followed.analytics.sample(1)) == set(index.names())
    assert followed.counts == ((3, 1, 0, 0), (0, 0.0))
    followed.at(9.0, removed([2], medium="GPU"))
    assert followed.counts == ((2, 1, 1, 0), (0, 0.0))


def test_of_a_large_state_that_was_loaded_a_sample_is_followed():
    source = Followed().at(0.0, *(store([name]) for name in range(200)), store([27], medium="CPU")).relay.sources[0]
    analytics = Analytics(source.normalizer.index, source.stats, 10)
    analytics.begin()
    assert (analytics.weight, set(analytics.sample(27))) == (27, set(range(0, 200, 27)))
    analytics.see([BlockRemoved((27, 54))], 1.0, 0.0)
    assert set(analytics.sample(27)) == set(range(0, 200, 27)) - {54}


def test_an_engines_snapshot_has_no_ages_either():
    followed = Followed(snapshot=True)
    (ask,) = [each for each in followed.relay.handle(SourceUp(0), 0.0) if isinstance(each, RequestSnapshot)]
    chunk = payload(store([1, 2]), ts=50.0)
    followed.relay.handle(SnapshotReceived(0, ask.request, [(6).to_bytes(8, "big"), b"p" * 16, chunk]), 0.0)
    assert followed.counts == ((2, 0, 0, 0), (0, 0.0))


def test_rates_are_of_the_last_minutes_and_fall_while_the_engine_is_silent():
    followed = Followed().at(0.0, store([1, 2, 3])).at(WINDOW, store([4], 3), removed([4]))
    reading = followed.analytics.reading(0.0)
    stored = 3 * exp(-1) + 1
    assert reading.stored_per_second == pytest.approx(stored / WINDOW)
    assert reading.removed_per_second == pytest.approx(1 / WINDOW)
    assert reading.churn == pytest.approx((stored + 1) / WINDOW / 3)
    followed.relay.handle(Tick(0.0), 2 * WINDOW)
    assert followed.analytics.reading(0.0).stored_per_second == pytest.approx(stored * exp(-2) / WINDOW)


def test_rates_fall_while_batches_come_that_neither_store_nor_evict():
    followed = Followed().at(0.0, store([1, 2])).at(WINDOW, store([2], 1))
    assert followed.analytics.reading(0.0).stored_per_second == pytest.approx(2 * exp(-1) / WINDOW)


def test_one_bad_time_does_not_stop_the_clock():
    followed = Followed().at(1e300, store([1])).at(0.0, store([2])).at(WINDOW, store([3]))
    assert followed.analytics.reading(0.0).stored_per_second == pytest.approx((2 * exp(-1) + 1) / WINDOW)


def seen(blocks, limit=LIMIT):
    analytics = Analytics(Index(), SourceStats(), limit)
    analytics.see([BlockStored(tuple(blocks), None)], 0.0, 0.0)
    return analytics


@pytest.mark.parametrize("step", [1, 2, 64, 4096, 2**40])
def test_a_sample_is_one_of_all_blocks_however_they_are_named(step):
    reading = seen(range(0, 100_000 * step, step)).reading(0.0)
    assert reading.weight == 27
    assert reading.followed <= LIMIT
    assert reading.live == pytest.approx(100_000, rel=0.001)


def test_a_sample_tells_what_following_all_would_within_its_error():
    """With 1,000 to 4,000 blocks followed, three standard errors of a share are below 5 %."""
    draw = random.Random(5)
    small, exact = (Analytics(Index(), SourceStats(), limit) for limit in (LIMIT, 10**6))
    live: list[int] = []
    evicted: list[int] = []
    for ts in range(4000):
        gone = [live.pop(draw.randrange(len(live) // 2)) for _ in range(24 * (len(live) >= 20_000))]
        back, evicted = evicted[:6], gone
        new = [*back, *(draw.getrandbits(64) for _ in range(24 - len(back)))]
        live += new
        for analytics in (small, exact):
            analytics.see([BlockRemoved(tuple(gone)), BlockStored(tuple(new), None)], float(ts), 0.0)
    estimated, true = small.reading(0.0), exact.reading(0.0)
    assert (true.weight, estimated.weight) == (1, 9)
    for name in ("live", "stored", "removed"):
        assert getattr(estimated, name) == pytest.approx(getattr(true, name), rel=0.05), name
    assert estimated.stored_again / estimated.stored == pytest.approx(true.stored_again / true.stored, abs=0.05)
    counts = [sum(reading.lifetimes.counts) for reading in (estimated, true)]
    assert counts == [estimated.removed, true.removed]
    spans = [reading.lifetimes.total / sum(reading.lifetimes.counts) for reading in (estimated, true)]
    assert spans[0] == pytest.approx(spans[1], rel=0.05)


def test_shared_blocks_are_those_that_another_source_holds():
    assert shares([seen([1, 2, 3, 4]), seen([3, 4]), seen([])]) == [0.5, 1.0, 0.0]
    assert shares([]) == []


def test_sources_are_compared_by_the_smallest_sample():
    draw = random.Random(6)
    names = [draw.getrandbits(64) for _ in range(30_000)]
    large, small = seen(names), seen(names[:3000])
    assert (large.weight, small.weight) == (9, 1)
    of_large, of_small = shares([large, small])
    assert of_large == pytest.approx(0.1, abs=0.02)
    assert of_small == 1.0


def test_a_source_that_expired_shares_nothing():
    specs = [SourceSpec(name, 0, Settings(replay=False), Rules(), timeout=5.0, analytics=LIMIT) for name in "ab"]
    relay = Relay(specs, [])
    for slot in (0, 1):
        relay.handle(SourceUp(slot), 0.0)
        relay.handle(BatchReceived(slot, batch(0, store([1, 2]))), 0.0)
    assert [read.analytics.shared for _, read in read_sources(relay) if read.analytics] == [1.0, 1.0]
    relay.handle(SourceDown(1), 0.0)
    relay.handle(Tick(0.0), 6.0)
    assert [read.analytics.shared for _, read in read_sources(relay) if read.analytics] == [0.0, 0.0]


def test_blocks_that_come_and_go_within_one_batch_are_bounded_too():
    analytics = Analytics(Index(), SourceStats(), 10)
    names = [(name,) for name in range(1000)]
    events = [event for name in names for event in (BlockStored(name, None), BlockRemoved(name))]
    analytics.see(events, 0.0, 0.0)
    assert analytics.weight >= 81


def test_it_takes_no_more_memory_however_large_the_cache_is():
    analytics = Analytics(Index(), SourceStats(), LIMIT)
    draw = random.Random(7)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for at in range(3000):
        names = tuple(draw.getrandbits(64) for _ in range(100))
        analytics.see([BlockStored(names, None), BlockRemoved(names[: 50 * (at > 2000)])], float(at), 0.0)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert held < 2**20
