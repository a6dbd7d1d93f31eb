"""What holds at every moment, whatever has happened: no missing batch is uncounted."""

from __future__ import annotations

from typing import Protocol

from kvbus.core.sequencing.sequencer import Sequencer
from kvbus.core.stats import SourceStats


class Counted(Protocol):
    """A source, or whatever stands for one."""

    stats: SourceStats
    sequencer: Sequencer


def all_accounted_for(source: Counted) -> None:
    """Each batch found missing came after all, was given up, or is pending: exactly the holes there are."""
    stats, sequencer = source.stats, source.sequencer
    assert stats.pending >= 0
    assert stats.missing == stats.recovered + stats.lost + stats.pending
    waiting = sum(seq >= sequencer.next for seq in sequencer.held)
    holes = sequencer.log_end - sequencer.next - waiting if sequencer.synced else 0
    assert stats.pending == holes, f"{stats.pending} pending, {holes} holes"
