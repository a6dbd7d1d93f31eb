"""The account of one epoch's numbers: after every step ``missing == recovered + lost + pending``, and pending is the holes."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.sequencing.actions import Action, Deliver, Lost, LostReason
from kvbus.core.sequencing.gap_tracker import GapTracker
from kvbus.core.sequencing.reorder_buffer import ReorderBuffer
from kvbus.core.source_stats import SourceStats


class Tracked:
    def __init__(self, *, at=0, batches=100, synced=True):
        self.stats = SourceStats()
        self.actions: deque[Action] = deque()
        self.tracker = GapTracker(ReorderBuffer(batches, 10**6), self.stats, self.actions)
        if at:
            self.tracker.begin_at(at)
        if synced:
            self.tracker.open()

    def live(self, *seqs):
        """As the sequencer does it."""
        tracker = self.tracker
        for seq in seqs:
            if seq == tracker.next and not tracker.held:
                tracker.live_in_order(seq, b"%d" % seq)
            else:
                tracker.live_later(seq, b"%d" % seq)
                tracker.drain()
        return self

    def said(self):
        found: list[int | str] = []
        for each in self.actions:
            if isinstance(each, Deliver):
                found.append(each.seq)
            else:
                assert isinstance(each, Lost)
                found.append(f"lost {each.count}")
        self.actions.clear()
        return found

    def counted(self):
        stats, tracker = self.stats, self.tracker
        holes = tracker.log_end - tracker.next - sum(seq >= tracker.next for seq in tracker.held)
        assert tracker.pending == (holes if tracker.synced else 0)
        assert stats.missing == stats.recovered + stats.lost + tracker.pending
        return stats.missing, stats.recovered, stats.lost


def test_in_order():
    tracked = Tracked().live(0, 1, 2)
    assert tracked.said() == [0, 1, 2]
    assert tracked.counted() == (0, 0, 0)
    assert tracked.tracker.complete
    assert tracked.tracker.caught_up


def test_the_shortest_way_is_the_same():
    tracked = Tracked()
    fingerprint = tracked.tracker.accept_next(0, b"x")
    other = Tracked()
    other.tracker.live_in_order(0, b"x")
    (delivered,) = other.actions
    assert isinstance(delivered, Deliver)
    assert fingerprint == delivered.fingerprint
    assert tracked.tracker.next == tracked.tracker.log_end == tracked.tracker.live_end == 1


def test_one_that_overtook_waits_and_the_gap_is_counted():
    tracked = Tracked().live(0, 3)
    assert tracked.said() == [0]
    assert tracked.counted() == (2, 0, 0)
    assert not tracked.tracker.complete
    tracked.live(1, 2)
    assert tracked.said() == [1, 2, 3]
    assert tracked.counted() == (2, 2, 0)


def test_a_replay_fills_a_gap():
    tracked = Tracked().live(0, 3)
    for seq in (1, 2):
        tracked.tracker.replayed(seq, b"r")
    assert tracked.said() == [0, 1, 2, 3]
    assert tracked.counted() == (2, 2, 0)


def test_a_replay_shows_what_nobody_knew_of():
    tracked = Tracked().live(0)
    tracked.tracker.replayed(1, b"r")
    tracked.tracker.replayed(4, b"r")
    assert tracked.said() == [0, 1]
    assert tracked.counted() == (4, 2, 0)


def test_before_the_history_is_in_nothing_is_missing():
    tracked = Tracked(synced=False).live(5)
    assert tracked.stats.missing == 0
    for seq in (2, 3):
        tracked.tracker.replayed(seq, b"r")
    tracked.tracker.begin_at(2)
    tracked.tracker.drain()
    assert tracked.said() == [2, 3]
    tracked.tracker.open()
    assert tracked.counted() == (1, 0, 0)  # 4


def test_given_up():
    tracked = Tracked().live(0, 3)
    tracked.tracker.give_up(LostReason.HOLE)
    assert tracked.said() == [0, "lost 2", 3]
    assert tracked.counted() == (2, 0, 2)


def test_given_up_with_nothing_behind_the_gap():
    tracked = Tracked().live(0)
    tracked.tracker.expose(4)
    assert tracked.counted() == (3, 0, 0)
    tracked.tracker.give_up(LostReason.HOLE)
    assert tracked.said() == [0, "lost 3"]
    assert tracked.counted() == (3, 0, 3)
    assert tracked.tracker.complete


def test_one_that_exists_and_cannot_be_had():
    tracked = Tracked().live(0, 2)
    tracked.tracker.skip_lost()
    assert tracked.said() == [0, "lost 1", 2]
    assert tracked.counted() == (1, 0, 1)
    tracked.tracker.skip_lost()  # of a number that nothing had shown
    assert tracked.counted() == (2, 0, 2)


def test_over_the_limit_the_newest_is_let_go_and_missing_again():
    tracked = Tracked(batches=2).live(0, 2, 3, 4)
    assert tracked.stats.held_overflow == 1
    assert tracked.counted() == (2, 0, 0)  # 1 and 4
    tracked.tracker.replayed(1, b"r")
    assert tracked.said() == [0, 1, 2, 3]
    tracked.tracker.replayed(4, b"r")
    assert tracked.counted() == (2, 2, 0)


def test_over_the_limit_an_older_one_takes_the_newest_ones_place():
    tracked = Tracked(batches=2).live(0, 4, 5, 2)
    assert list(tracked.tracker.held) == [2, 4]
    assert tracked.counted() == (4, 1, 0)  # 1, 3, and 5 again; 2 has come


@pytest.mark.parametrize(("payload", "contested"), [(b"3", False), (b"other", True)])
def test_another_batch_of_the_same_number(payload, contested):
    tracked = Tracked().live(0, 2, 3, 4)
    assert tracked.tracker.contest(3, payload) is contested
    assert list(tracked.tracker.held) == ([2] if contested else [2, 3, 4])
    assert tracked.counted() == (1 + 2 * contested, 0, 0)


def test_what_waits_behind_a_gap_that_is_too_wide():
    tracked = Tracked(synced=False).live(2, 3, 50, 51)
    assert tracked.tracker.drop_far(10) == 2
    assert list(tracked.tracker.held) == [2, 3]
    assert tracked.tracker.live_end == tracked.tracker.log_end == 4
    assert tracked.tracker.drop_far(10) == 0


def test_a_snapshot_says_all_before_it():
    tracked = Tracked().live(0, 2, 5, 9)
    tracked.tracker.jump(7)
    tracked.tracker.drain()
    assert tracked.said() == [0]
    assert tracked.tracker.next == 7
    assert tracked.counted() == (6, 0, 4)  # 1, 3, 4 and 6 will not come; 7 and 8 may


def test_all_that_is_pending_is_written_off():
    tracked = Tracked().live(0, 5)
    tracked.tracker.write_off()
    assert tracked.stats.lost == 4


def test_after_a_restart_it_goes_on_behind_what_was_delivered():
    tracked = Tracked(synced=False)
    tracked.tracker.restore_batch(7, b"7")
    tracked.live(8)
    assert tracked.said() == [8]
    assert tracked.counted() == (0, 0, 0)
    assert tracked.tracker.fingerprints.matches(7, b"7", 9)


@given(st.permutations(range(12)), st.sets(st.integers(0, 11)), st.integers(1, 12))
def test_in_any_order_each_is_delivered_or_lost_once(order, dropped, room):
    tracked = Tracked(batches=room)
    for seq in order:
        if seq not in dropped and seq >= tracked.tracker.next and seq not in tracked.tracker.held:
            tracked.live(seq)
            tracked.counted()
    tracked.tracker.expose(12)
    while not tracked.tracker.complete:
        tracked.tracker.give_up(LostReason.HOLE)
        tracked.counted()
    delivered = [each.seq for each in tracked.actions if isinstance(each, Deliver)]
    assert delivered == sorted(set(delivered))
    assert len(delivered) + tracked.stats.lost == 12


def test_a_compacted_answer_is_delivered_and_what_has_come_live_waits():
    tracked = Tracked(at=3)
    for seq in (5, 8):
        tracked.tracker.live_later(seq, b"live")
    for seq in (3, 4, 5, 7):
        tracked.tracker.compacted(seq, b"answered")
    assert tracked.said() == [3, 4, 5]
    assert list(tracked.tracker.held) == [7, 8]
    assert tracked.tracker.answered_end == 8
    assert tracked.counted() == (4, 3, 0)


def test_what_waits_is_replaced_by_what_the_answer_says():
    tracked = Tracked(at=3)
    tracked.tracker.live_later(5, b"live")
    tracked.tracker.compacted(5, b"answered")
    assert tracked.tracker.held.get(5) == b"answered"
    assert tracked.said() == []


def test_what_lies_ahead_is_forgotten():
    tracked = Tracked(at=3)
    tracked.tracker.live_later(5, b"live")
    tracked.tracker.write_off()
    tracked.tracker.forget_ahead()
    assert (tracked.tracker.next, tracked.tracker.log_end, len(tracked.tracker.held)) == (3, 3, 0)
    assert tracked.counted() == (2, 0, 2)
