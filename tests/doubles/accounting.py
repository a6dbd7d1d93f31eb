"""Invariants that hold at every moment of every test: each missing batch is counted, and so is each block."""

from __future__ import annotations

from typing import Protocol

from kvbus.core.normalizing.normalizer import Normalizer
from kvbus.core.sequencing.sequencer import Sequencer
from kvbus.core.stats import SourceStats


class Counted(Protocol):
    """A source, or a test's substitute for one."""

    stats: SourceStats
    sequencer: Sequencer


def all_accounted_for(source: Counted) -> None:
    """Check that each missing batch is recovered, lost or pending, and that the pending ones are exactly the holes."""
    stats, sequencer = source.stats, source.sequencer
    pending = sequencer.pending
    waiting = sum(sequencer.next <= seq < sequencer.tracker.log_end for seq in sequencer.held)
    holes = sequencer.tracker.log_end - sequencer.next - waiting if sequencer.tracker.synced else 0
    assert pending == holes >= 0, f"{pending} pending, {holes} holes"
    counted = stats.recovered + stats.lost
    assert stats.missing == counted + pending, f"{stats.missing} missing, {counted} decided, {pending} pending"


def size_is_true(normalizer: Normalizer) -> None:
    """Check that an index's counters of blocks and bytes match its tables."""
    for index in normalizer.indexes:
        tables = index.tables.values()
        held = {id(chunk): chunk.memory for table in tables for chunk in table.blocks.values()}
        assert index.blocks == sum(len(table.blocks) for table in tables)
        assert index.bytes == sum(held.values())
