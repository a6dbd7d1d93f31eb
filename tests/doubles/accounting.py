"""Checks of a source's invariants for tests: kvbus counts each missing batch, and its index has the size that it
reports.
"""

from __future__ import annotations

from typing import Protocol

from kvbus.core.normalizing.normalizer import Normalizer
from kvbus.core.sequencing.sequencer import Sequencer
from kvbus.core.stats import SourceStats


class Counted(Protocol):
    """Protocol of the objects that `all_accounted_for` checks: a source of the relay, or a test's substitute for a
    source.
    """

    stats: SourceStats
    sequencer: Sequencer


def all_accounted_for(source: Counted) -> None:
    """Check that each missing batch is counted as recovered, lost or pending.

    Also check that the number of pending batches equals the number of batches that the sequencer really lacks.
    """
    stats, sequencer = source.stats, source.sequencer
    pending = sequencer.pending
    waiting = sum(sequencer.next <= seq < sequencer.tracker.log_end for seq in sequencer.reorder_buffer)
    holes = sequencer.tracker.log_end - sequencer.next - waiting if sequencer.tracker.synced else 0
    assert pending == holes >= 0, f"{pending} pending, {holes} holes"
    counted = stats.recovered + stats.lost
    assert stats.missing == counted + pending, f"{stats.missing} missing, {counted} decided, {pending} pending"


def size_is_true(normalizer: Normalizer) -> None:
    """Check that the block count and byte count of each index of a normalizer match the contents of the index's
    tables.
    """
    for index in normalizer.indexes:
        tables = index.tables.values()
        held = {id(chunk): chunk.memory for table in tables for chunk in table.blocks.values()}
        assert index.blocks == sum(len(table.blocks) for table in tables)
        assert index.bytes == sum(held.values())
