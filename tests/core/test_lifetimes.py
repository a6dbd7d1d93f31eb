"""Tests for blocks on a medium whose removals an engine never announces: they expire if no event has named them for
some time.
"""

import collections
import sys

import pytest

from kvbus.core import lifetimes
from kvbus.core.blocks.index import Index
from kvbus.core.events import BatchReceived, SourceDown, Tick
from kvbus.core.lifetimes import Lifetimes
from kvbus.core.types import Filtered
from tests.core.dsl import Script
from tests.doubles.payloads import batch, removed, store

CPU = {"medium": "CPU"}


class Engine:
    """An engine that announces the blocks that it stores on the CPU, but not their removal.

    A router reads its events through kvbus.
    """

    def __init__(self, **rules):
        self.script = Script(expiring_media=frozenset({"CPU"}), expire_after=60.0, source_timeout=30.0, **rules)
        self.seq = 0

    def sends(self, *events):
        self.script.handle(BatchReceived(0, batch(self.seq, *events)))
        self.seq += 1

    def waits(self, seconds):
        self.script.now += seconds
        self.script.handle(Tick(0.0))

    @property
    def live(self):
        assert self.script.router.violations == []
        return {(medium, block) for _, medium, block in self.script.router.blocks}

    @property
    def outlived(self):
        return self.script.stats.filtered[Filtered.OUTLIVED]


@pytest.fixture
def engine():
    engine = Engine()
    engine.sends(store([1, 2], **CPU), store([1, 2]))
    return engine


@pytest.mark.parametrize("event", [store([1, 2], **CPU), store([3], 2, **CPU)], ids=["it", "one behind it"])
def test_a_repeated_store_or_a_new_child_restarts_the_lifetime_of_a_block(engine, event):
    engine.waits(40)
    engine.sends(event)
    engine.waits(40)
    assert {("CPU", 1), ("CPU", 2)} < engine.live
    engine.waits(40)
    assert not {medium for medium, _ in engine.live} - {"GPU"}


def test_a_block_expires_later_if_it_was_stored_with_a_child(engine):
    engine.waits(40)
    engine.sends(store([3], 1, **CPU))
    engine.waits(40)
    assert engine.live == {("GPU", 1), ("GPU", 2), ("CPU", 1), ("CPU", 3)}


@pytest.mark.parametrize("duplicates", ["count", "last", "ignore"])
def test_copies_expire_with_their_block(duplicates):
    """If a block expires, all its copies expire too, because the engine will not announce the removal of any of them."""
    engine = Engine(duplicates=duplicates)
    engine.sends(*[store([1], **CPU)] * 3)
    engine.waits(61)
    assert (engine.live, engine.outlived) == (set(), 1)
    engine.sends(store([1], **CPU))
    assert engine.live == {("CPU", 1)}


def test_many_blocks_expire_in_slices(monkeypatch):
    monkeypatch.setattr(lifetimes, "SLICE", 2)
    engine = Engine()
    engine.sends(store([1, 2, 3], **CPU))
    engine.waits(61)
    assert len(engine.live) == 1
    engine.waits(0.1)
    assert engine.live == set()


def test_the_blocks_of_a_disconnected_engine_expire(engine):
    engine.script.handle(SourceDown(0))
    engine.waits(31)
    assert engine.live == set()
    engine.waits(31)
    assert engine.outlived == 2
    assert engine.script.source.normalizer.index.media() == {"CPU": 0, "GPU": 2}


def test_a_cycle_of_parents_does_not_loop_for_ever():
    engine = Engine()
    engine.sends(store([1], 2, **CPU))
    engine.sends(store([2], 1, **CPU))
    engine.waits(30)
    engine.sends(store([3], 2, **CPU))
    engine.waits(31)
    assert engine.live == {("CPU", 1), ("CPU", 2), ("CPU", 3)}


def test_lifetimes_begin_again_after_a_restart_of_kvbus(engine):
    again = Lifetimes(frozenset({"CPU"}), 60.0, engine.script.source.normalizer.index)
    again.begin(100.0)
    assert (len(again), again.due(159.0)) == (2, [])
    assert {(medium, block) for _, medium, _, _, block in again.due(160.0)} == {("CPU", 1), ("CPU", 2)}
    assert not Lifetimes(frozenset({"CPU"}), 60.0, Index()).due(1e9)


def test_refused_blocks_have_no_lifetime():
    engine = Engine(max_blocks=2)
    engine.sends(store([1, 2, 3], **CPU), store([1], medium="HBM"))
    engine.sends(store([4], 9, **CPU), store([5], tokens=[1], **CPU), store([6, 7], **CPU))
    assert len(engine.script.source.lifetimes) == len(engine.live)
    engine.sends(removed([6, 6, 8], **CPU))
    assert len(engine.script.source.lifetimes) == len(engine.live)
    engine.waits(61)
    assert engine.live == set()


def test_storing_a_block_does_not_walk_its_complete_chain():
    """A conversation of many blocks grows block by block. The cost of a new block must not grow with their number."""
    engine = Engine()
    calls: collections.Counter[str] = collections.Counter()

    def count(frame, event, _):
        calls[event] += frame.f_code.co_filename == lifetimes.__file__

    sys.setprofile(count)
    try:
        engine.sends(store([1], **CPU))
        for block in range(2, 1001):
            engine.script.now += 0.001
            engine.sends(store([block], block - 1, **CPU))
    finally:
        sys.setprofile(None)
    assert calls["call"] < 10 * 1000
    engine.waits(40)
    engine.sends(store([1001], 1000, **CPU))
    engine.waits(40)
    assert len(engine.live) == 1001
