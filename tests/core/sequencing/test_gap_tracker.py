"""The account of one epoch's numbers: after every step ``missing == recovered + lost + pending``, and pending is the holes."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.sequencing.actions import Action, Deliver, Lost
from kvbus.core.sequencing.gap_tracker import GapTracker
from kvbus.core.sequencing.reorder_buffer import ReorderBuffer
from kvbus.core.stats import SourceStats


class Line:
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
        assert stats.pending == holes
        assert stats.missing == stats.recovered + stats.lost + stats.pending
        return stats.missing, stats.recovered, stats.lost


def test_in_order():
    line = Line().live(0, 1, 2)
    assert line.said() == [0, 1, 2]
    assert line.counted() == (0, 0, 0)
    assert line.tracker.complete
    assert line.tracker.caught_up


def test_the_shortest_way_is_the_same():
    line = Line()
    mark = line.tracker.accept_next(0, b"x")
    other = Line()
    other.tracker.live_in_order(0, b"x")
    (delivered,) = other.actions
    assert isinstance(delivered, Deliver)
    assert mark == delivered.fingerprint
    assert line.tracker.next == line.tracker.log_end == line.tracker.live_end == 1


def test_one_that_overtook_waits_and_the_gap_is_counted():
    line = Line().live(0, 3)
    assert line.said() == [0]
    assert line.counted() == (2, 0, 0)
    assert not line.tracker.complete
    line.live(1, 2)
    assert line.said() == [1, 2, 3]
    assert line.counted() == (2, 2, 0)


def test_a_replay_fills_a_gap():
    line = Line().live(0, 3)
    for seq in (1, 2):
        line.tracker.replayed(seq, b"r")
    assert line.said() == [0, 1, 2, 3]
    assert line.counted() == (2, 2, 0)


def test_a_replay_shows_what_nobody_knew_of():
    line = Line().live(0)
    line.tracker.replayed(1, b"r")
    line.tracker.replayed(4, b"r")
    assert line.said() == [0, 1]
    assert line.counted() == (4, 2, 0)


def test_before_the_history_is_in_nothing_is_missing():
    line = Line(synced=False).live(5)
    assert line.stats.missing == 0
    for seq in (2, 3):
        line.tracker.replayed(seq, b"r")
    line.tracker.begin_at(2)
    line.tracker.drain()
    assert line.said() == [2, 3]
    line.tracker.open()
    assert line.counted() == (1, 0, 0)  # 4


def test_given_up():
    line = Line().live(0, 3)
    line.tracker.give_up()
    assert line.said() == [0, "lost 2", 3]
    assert line.counted() == (2, 0, 2)


def test_given_up_with_nothing_behind_the_gap():
    line = Line().live(0)
    line.tracker.expose(4)
    assert line.counted() == (3, 0, 0)
    line.tracker.give_up()
    assert line.said() == [0, "lost 3"]
    assert line.counted() == (3, 0, 3)
    assert line.tracker.complete


def test_one_that_exists_and_cannot_be_had():
    line = Line().live(0, 2)
    line.tracker.skip_lost()
    assert line.said() == [0, "lost 1", 2]
    assert line.counted() == (1, 0, 1)
    line.tracker.skip_lost()  # of a number that nothing had shown
    assert line.counted() == (2, 0, 2)


def test_over_the_limit_the_newest_is_let_go_and_missing_again():
    line = Line(batches=2).live(0, 2, 3, 4)
    assert line.stats.held_overflow == 1
    assert line.counted() == (2, 0, 0)  # 1 and 4
    line.tracker.replayed(1, b"r")
    assert line.said() == [0, 1, 2, 3]
    line.tracker.replayed(4, b"r")
    assert line.counted() == (2, 2, 0)


def test_over_the_limit_an_older_one_takes_the_newest_ones_place():
    line = Line(batches=2).live(0, 4, 5, 2)
    assert list(line.tracker.held) == [2, 4]
    assert line.counted() == (4, 1, 0)  # 1, 3, and 5 again; 2 has come


@pytest.mark.parametrize(("payload", "contested"), [(b"3", False), (b"other", True)])
def test_another_batch_of_the_same_number(payload, contested):
    line = Line().live(0, 2, 3, 4)
    assert line.tracker.contest(3, payload) is contested
    assert list(line.tracker.held) == ([2] if contested else [2, 3, 4])
    assert line.counted() == (1 + 2 * contested, 0, 0)


def test_what_waits_behind_a_gap_that_is_too_wide():
    line = Line(synced=False).live(2, 3, 50, 51)
    assert line.tracker.drop_far(10) == 2
    assert list(line.tracker.held) == [2, 3]
    assert line.tracker.live_end == line.tracker.log_end == 4
    assert line.tracker.drop_far(10) == 0


def test_a_snapshot_says_all_before_it():
    line = Line().live(0, 2, 5, 9)
    line.tracker.jump(7)
    line.tracker.drain()
    assert line.said() == [0]
    assert line.tracker.next == 7
    assert line.counted() == (6, 0, 4)  # 1, 3, 4 and 6 will not come; 7 and 8 may


def test_all_that_is_pending_is_written_off():
    line = Line().live(0, 5)
    line.tracker.write_off()
    assert line.stats.lost == 4
    assert line.stats.pending == 0


def test_after_a_restart_it_goes_on_behind_what_was_delivered():
    line = Line(synced=False)
    line.tracker.restore_batch(7, b"7")
    line.live(8)
    assert line.said() == [8]
    assert line.counted() == (0, 0, 0)
    assert line.tracker.fingerprints.matches(7, b"7", 9)


@given(st.permutations(range(12)), st.sets(st.integers(0, 11)), st.integers(1, 12))
def test_in_any_order_each_is_delivered_or_lost_once(order, dropped, room):
    line = Line(batches=room)
    for seq in order:
        if seq not in dropped and seq >= line.tracker.next and seq not in line.tracker.held:
            line.live(seq)
            line.counted()
    line.tracker.expose(12)
    while not line.tracker.complete:
        line.tracker.give_up()
        line.counted()
    delivered = [each.seq for each in line.actions if isinstance(each, Deliver)]
    assert delivered == sorted(set(delivered))
    assert len(delivered) + line.stats.lost == 12
