"""Tests for the gap tracker, which counts a batch as missing if the batch exists but has not arrived.

Each missing batch is later counted as recovered or as lost.
"""

from __future__ import annotations

from collections import deque

from kvbus.core.sequencing.actions import Action, Deliver
from kvbus.core.sequencing.gap_tracker import GapTracker, ReorderBuffer
from kvbus.core.stats import SourceStats


def test_a_missing_batch_that_arrives_live_in_order_is_recovered() -> None:
    stats, actions = SourceStats(), deque[Action]()
    tracker = GapTracker(ReorderBuffer(10, 1000), stats, actions)
    tracker.open()
    tracker.expose(2)
    assert (stats.missing, stats.recovered, stats.lost, tracker.pending) == (2, 0, 0, 2)
    for seq in range(3):
        tracker.live_in_order(seq, b"")
        assert stats.missing == stats.recovered + stats.lost + tracker.pending
    assert (stats.missing, stats.recovered, tracker.pending) == (2, 2, 0)
    assert [action.seq for action in actions if isinstance(action, Deliver)] == [0, 1, 2]
