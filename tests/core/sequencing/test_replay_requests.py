"""What is asked, from where, and what an answer says about the epoch it is of."""

from collections import deque

import pytest

from kvbus.core.sequencing.actions import Action, Ask, AskSnapshot, Stop
from kvbus.core.sequencing.gap_tracker import GapTracker
from kvbus.core.sequencing.reorder_buffer import ReorderBuffer
from kvbus.core.sequencing.replay_requests import OVERLAP, OpenRequest, Purpose, ReplayClient, start_of
from kvbus.core.sequencing.settings import Settings
from kvbus.core.source_stats import SourceStats


def body(seq):
    return b"batch %d" % seq


def tracker_at(end, *held):
    tracker = GapTracker(ReorderBuffer(1000, 10**6), SourceStats(), deque())
    tracker.open()
    for seq in range(end):
        tracker.live_in_order(seq, body(seq))
    for seq in held:
        tracker.live_later(seq, body(seq))
    return tracker


class Asking:
    def __init__(self, **settings):
        self.actions: deque[Action] = deque()
        self.stats = SourceStats()
        self.client = ReplayClient(Settings(**settings), self.stats, self.actions)

    def said(self):
        found = list(self.actions)
        self.actions.clear()
        return found


def asked(purpose=Purpose.PROBE, start=0, last=-1):
    return OpenRequest(1, purpose, start, last, True, 0, 0)


class TestWhereItBegins:
    @pytest.mark.parametrize("purpose", [Purpose.SYNC, Purpose.SNAPSHOT])
    def test_a_beginning_at_what_is_next(self, purpose):
        assert start_of(purpose, tracker_at(30)) == (30, -1)

    def test_the_history_at_the_very_first(self):
        assert start_of(Purpose.HISTORY, tracker_at(30)) == (0, -1)

    @pytest.mark.parametrize("purpose", [Purpose.GAP, Purpose.PROBE, Purpose.VERIFY])
    def test_what_goes_on_reaches_back_over_what_was_delivered(self, purpose):
        assert start_of(purpose, tracker_at(30)) == (30 - OVERLAP, 29)
        assert start_of(purpose, tracker_at(3)) == (0, 2)

    def test_a_gap_does_not_reach_back_over_a_loss(self):
        tracker = tracker_at(30)
        tracker.skip_lost()
        assert start_of(Purpose.GAP, tracker) == (31, -1)
        assert start_of(Purpose.PROBE, tracker) == (30 - OVERLAP, 29)
        tracker.live_in_order(31, body(31))
        assert start_of(Purpose.GAP, tracker) == (31, 31)

    def test_with_nothing_known_a_probe_asks_for_the_newest(self):
        tracker = tracker_at(0)
        tracker.begin_at(7)
        assert start_of(Purpose.PROBE, tracker) == (6, -1)
        assert start_of(Purpose.GAP, tracker) == (7, -1)


class TestTheQuestion:
    def test_one_takes_the_place_of_another(self):
        one = Asking()
        one.client.ask(Purpose.PROBE, tracker_at(0))
        one.client.ask(Purpose.SNAPSHOT, tracker_at(0))
        assert one.said() == [Ask(1, 0), Stop(1), AskSnapshot(2)]
        assert one.stats.replays == 2

    def test_whether_an_empty_answer_says_something(self):
        one = Asking()
        one.client.ask(Purpose.SYNC, tracker_at(5))
        assert one.client.open is not None
        assert not one.client.open.expects_batches
        one.client.ask(Purpose.SYNC, tracker_at(5, 7))
        assert one.client.open.expects_batches
        assert one.client.open.log_end == 8

    def test_an_answer_to_an_old_one_is_counted(self):
        one = Asking()
        assert one.client.match(1) is None
        one.client.ask(Purpose.SYNC, tracker_at(0))
        assert one.client.match(1) is one.client.open
        one.client.ask(Purpose.SYNC, tracker_at(0))
        assert one.client.match(1) is None
        assert one.stats.stale_replies == 2

    def test_its_time_runs_from_when_it_is_sent(self):
        one = Asking(replay_timeout=2.0, replay_total_timeout=5.0)
        one.client.ask(Purpose.SYNC, tracker_at(0))
        assert one.client.timed_out(1e9) is None
        one.client.sent(7, 0.0)  # another one
        assert one.client.timed_out(1e9) is None
        one.client.sent(1, 10.0)
        assert one.client.timed_out(11.9) is None
        timed_out = one.client.timed_out(12.0)
        assert timed_out is not None
        assert timed_out.id == 1
        assert one.said() == [Ask(1, 0), Stop(1)]
        assert one.stats.replay_timeouts == 1
        assert one.client.timed_out(1e9) is None

    def test_progress_does_not_help_for_ever(self):
        one = Asking(replay_timeout=2.0, replay_total_timeout=5.0)
        one.client.ask(Purpose.SYNC, tracker_at(0))
        one.client.sent(1, 0.0)
        assert one.client.open is not None
        one.client.open.deadline = 100.0
        assert one.client.timed_out(4.9) is None
        assert one.client.timed_out(5.0) is not None

    def test_an_answer_that_waits_to_be_read_is_not_late(self):
        one = Asking(replay_timeout=2.0, replay_total_timeout=5.0)
        one.client.unread(1, 0.0)  # nothing is asked
        one.client.ask(Purpose.SYNC, tracker_at(0))
        one.client.sent(1, 0.0)
        one.client.unread(7, 4.0)  # another one
        assert one.client.open is not None
        assert (one.client.open.deadline, one.client.open.hard_deadline) == (2.0, 5.0)
        one.client.unread(1, 1.0)
        assert (one.client.open.deadline, one.client.open.hard_deadline) == (3.0, 5.0)
        one.client.unread(1, 4.0)
        assert (one.client.open.deadline, one.client.open.hard_deadline) == (6.0, 6.0)
        assert one.client.timed_out(5.9) is None
        assert one.client.timed_out(6.0) is not None


class TestTheAnswer:
    def test_only_what_is_new_is_progress(self):
        request = asked(last=4)
        assert [request.take(seq) for seq in (3, 4, 4, 3, 6)] == [True, True, False, False, True]
        assert (request.items, request.first, request.last) == (5, 3, 6)
        assert request.saw_last_delivered

    def contradiction(self, request, *batches, end=10):
        tracker = tracker_at(end)
        for seq, payload in batches:
            if request.contradicts(seq, payload, tracker):
                return seq
            request.take(seq)
        return None

    @pytest.mark.parametrize("purpose", [Purpose.GAP, Purpose.PROBE, Purpose.VERIFY])
    def test_the_same_epoch_goes_on(self, purpose):
        request = asked(purpose, 2, 9)
        assert self.contradiction(request, *((seq, body(seq)) for seq in range(2, 13))) is None
        assert not request.lacks_last_delivered

    def test_another_content_is_of_another_epoch(self):
        assert self.contradiction(asked(Purpose.GAP, 2, 9), (2, body(2)), (3, b"other")) == 3
        assert self.contradiction(asked(Purpose.SYNC, 2), (3, b"other")) == 3

    def test_a_publisher_leaves_out_nothing_of_its_own(self):
        assert self.contradiction(asked(Purpose.PROBE, 2, 9), (2, body(2)), (4, body(4))) == 4

    def test_it_has_what_came_before_the_newest_and_not_the_newest(self):
        batches = [(seq, body(seq)) for seq in range(2, 9)]
        assert self.contradiction(asked(Purpose.PROBE, 2, 9), *batches, (10, body(10))) == 10
        request = asked(Purpose.PROBE, 2, 9)
        assert self.contradiction(request, *batches) is None
        assert request.lacks_last_delivered

    def test_one_that_was_trimmed_may_be_of_any(self):
        request = asked(Purpose.PROBE, 2, 9)
        assert request.begins_beyond(12)
        assert not request.begins_beyond(9)
        assert not asked(Purpose.GAP, 2, 9).begins_beyond(12)
        assert self.contradiction(request, (12, body(12)), (13, body(13))) is None
        assert not request.begins_beyond(14)
        assert not request.lacks_last_delivered

    def test_with_nothing_to_know_it_by(self):
        assert self.contradiction(asked(Purpose.VERIFY), (12, body(12))) == 12
        assert self.contradiction(asked(Purpose.PROBE), (12, body(12))) is None


@pytest.mark.parametrize(
    ("purpose", "seqs", "early"),
    [
        (Purpose.VERIFY, range(2, 5), True),
        (Purpose.VERIFY, range(2, 6), False),
        (Purpose.VERIFY, (), False),
        (Purpose.PROBE, range(2, 5), False),
    ],
)
def test_an_answer_that_lacks_what_was_sent_before_the_question(purpose, seqs, early):
    request = OpenRequest(1, purpose, 2, 2, True, 3, 6)
    for seq in seqs:
        request.take(seq)
    assert request.ends_early is early
