"""One publisher's batches put in order, by example; the state machine in tests/properties has the rest."""

from itertools import pairwise

import pytest

from kvbus.core.sequencing.fingerprints import RING
from kvbus.core.sequencing.replay_requests import ATTEMPTS, OVERLAP
from kvbus.core.sequencing.sequencer import Sequencer
from kvbus.core.sequencing.settings import State
from kvbus.core.stats import SourceStats
from tests.core.sequencing.line import Line, synced


class TestStart:
    def test_history_first_then_the_live_stream(self):
        line = Line()
        assert line.state is State.CONNECTING
        assert line.up() == ["ask 0"]
        assert line.state is State.SYNCING
        assert line.replayed(0, 1, 2) == [0, 1, 2]
        assert line.end() == ["stop", "synced"]
        assert line.state is State.LIVE
        assert line.live(3) == [3]
        assert line.missing == (0, 0, 0, 0)
        assert not line.sequencer.partial

    def test_live_batches_wait_for_the_history(self):
        line = Line()
        line.up()
        assert line.live(5, 6) == []
        assert line.replayed(3, 4) == [3, 4, 5, 6, "stop", "synced"]
        assert line.sequencer.partial

    def test_an_answer_that_never_ends_is_over_when_it_has_caught_up(self):
        line = Line()
        line.up()
        assert line.live(2) == []
        assert line.replayed(0, 1) == [0, 1, 2, "stop", "synced"]
        assert line.live(3) == [3]

    def test_a_live_stream_that_begins_at_the_beginning_needs_no_history(self):
        line = Line()
        line.up()
        assert 0 in line.live(0)
        assert line.state is State.LIVE

    def test_an_engine_that_has_said_nothing_yet(self):
        line = Line()
        line.up()
        assert line.end() == ["stop", "synced"]
        assert line.live(0, 1) == [0, 1]

    def test_a_trimmed_history_is_partial_and_not_missing(self):
        line = Line()
        line.up()
        assert line.replayed(1000, 1001) == [1000, 1001]
        line.end()
        assert line.sequencer.partial
        assert line.missing == (0, 0, 0, 0)

    def test_without_replay_it_begins_where_it_is(self):
        line = Line(replay=False)
        line.up()
        assert line.live(7, 8) == ["synced", 7, 8]
        assert line.sequencer.partial

    def test_a_hole_in_the_history_is_asked_for_and_then_lost(self):
        line = Line()
        line.up()
        assert line.replayed(0, 2) == [0]
        assert line.end() == ["stop", "synced", "ask 0"]
        assert line.replayed(0) + line.end() == ["stop", "ask 0"]
        assert line.replayed(0) + line.end() == ["stop", "lost 1", 2]
        assert line.missing == (1, 0, 1, 0)

    def test_a_dead_replay_endpoint_delays_and_does_not_stop(self):
        line = Line(replay_timeout=2.0)
        line.up()
        line.live(5, 6)
        said = [said for _ in range(20) for said in line.later(2.0)]
        assert [seq for seq in said if isinstance(seq, int)] == [5, 6]
        assert line.live(7) == [7]


class TestGaps:
    def test_a_gap_is_asked_for_and_recovered(self):
        line = synced(3)
        assert line.live(5) == ["ask 0"]
        assert line.state is State.GAP
        assert line.missing == (2, 0, 0, 2)
        assert line.replayed(3) == [3]
        assert line.missing == (2, 1, 0, 1)
        assert line.replayed(4) == [4, 5, "stop"]
        assert line.state is State.LIVE
        assert line.missing == (2, 2, 0, 0)
        assert line.stats.gaps == 1

    def test_batches_behind_the_gap_are_held_back(self):
        line = synced(3)
        line.live(5)
        assert line.live(6, 8, 7) == []
        assert line.missing == (2 + 1, 1, 0, 2)
        assert line.replayed(3, 4) == [3, 4, 5, 6, 7, 8, "stop"]

    def test_a_late_batch_fills_the_gap_itself(self):
        line = synced(3)
        assert line.live(4) == ["ask 0"]
        assert line.live(3)[:2] == [3, 4]
        assert line.missing == (1, 1, 0, 0)
        assert 5 in line.live(5)

    def test_what_no_replay_brings_is_lost_after_the_last_attempt(self):
        line = synced(3)
        assert line.live(5) == ["ask 0"]
        for _ in range(ATTEMPTS - 1):
            assert line.replayed(0, 1, 2) + line.end() == ["stop", "ask 0"]
        assert line.replayed(0, 1, 2) + line.end() == ["stop", "lost 2", 5]
        assert line.missing == (2, 0, 2, 0)
        assert line.sequencer.partial

    def test_a_permanent_hole_costs_only_itself(self):
        line = synced(3)
        line.live(6)
        said = line.replayed(3, 5)
        while "ask 0" in said or 3 in said:  # once again, in case it was the answer that was cut short
            said = line.replayed(5) + line.end()
        assert said == ["stop", "lost 1", 5, 6]
        assert line.missing == (3, 2, 1, 0)

    def test_answers_to_an_old_request_do_not_mix_in(self):
        line = synced(3)
        old = line.request
        line.live(5)
        assert line.replayed(3, request=old) == []
        assert line.end(request=old) == []
        assert line.stats.stale_replies == 2
        assert line.missing == (2, 0, 0, 2)

    def test_an_answer_that_stalls_is_given_up(self):
        line = synced(3, replay_timeout=2.0, probe_interval=0.0)
        line.live(5)
        assert line.later(1.9) == []
        assert line.later(0.2) == ["stop", "ask 0"]
        assert line.replayed(3) == [3]
        assert line.later(1.9) == []
        assert line.stats.replay_timeouts == 1

    def test_an_answer_that_trickles_for_ever_is_given_up_too(self):
        line = synced(1, replay_timeout=2.0, replay_total_timeout=10.0, probe_interval=0.0)
        line.live(1000)
        said = []
        for seq in range(1, 12):
            line.replayed(seq)
            said += line.later(1.0)
        assert "stop" in said

    def test_batches_seen_twice_are_counted_and_delivered_once(self):
        line = synced(3)
        assert line.live(2, 3, 3) == [3]
        line.live(5)
        assert line.live(5) == []
        assert line.stats.duplicates == 3
        line.replayed(3, 4)
        assert line.delivered == [line.batch(seq) for seq in range(6)]

    def test_two_batches_of_one_number_are_a_matter_for_the_replay(self):
        line = synced(3)
        line.live(5)
        line.life = 1  # somebody else on the endpoint
        assert line.live(5) == []
        line.life = 0
        assert line.replayed(3, 4, 5) == [3, 4, 5, "stop"]
        assert line.delivered == [line.batch(seq) for seq in range(6)]

    def test_holding_back_is_bounded(self):
        line = synced(1, reorder_batches=3, probe_interval=0.0)
        line.live(2, 3, 4, 5, 6)
        assert len(line.sequencer.held) == 3
        assert line.stats.held_overflow == 2
        assert line.missing == (3, 0, 0, 3)
        assert [seq for seq in line.replayed(*range(1, 7)) if seq != "stop"] == [1, 2, 3, 4, 5, 6]
        assert line.stats.pending == 0
        assert line.stats.lost == 0

    def test_a_seq_from_nowhere_does_not_take_for_ever(self):
        """One number from further ahead than any gap costs its batch; an engine that goes on from there is another."""
        line = synced(3, probe_interval=0.0)
        assert line.live(2**63 - 4) == []
        assert line.stats.rejected == {"seq_range": 1}
        assert line.missing == (0, 0, 0, 0)
        assert line.live(3) == [3]
        assert line.live(2**62, 2**62 + 1) == []
        assert line.live(2**62 + 2)[:2] == ["new epoch", "ask 0"]
        assert line.replayed(2**62, 2**62 + 1) == [2**62, 2**62 + 1, 2**62 + 2, "stop", "synced"]
        assert line.missing == (0, 0, 0, 0)

    def test_a_gap_as_wide_as_any_is_a_gap(self):
        line = synced(3, probe_interval=0.0)
        line.live(2**32 + 2)
        assert line.missing == (2**32 - 1, 0, 0, 2**32 - 1)
        while line.state is State.GAP:
            line.end()
        assert line.missing == (2**32 - 1, 0, 2**32 - 1, 0)

    def test_a_seq_from_nowhere_before_the_history(self):
        line = Line()
        line.up()
        line.live(2**62)
        assert line.replayed(0, 1) == [0, 1]
        assert line.end() == ["stop", "synced"]
        assert line.stats.rejected == {"seq_range": 1}
        assert line.missing == (0, 0, 0, 0)
        assert line.live(2) == [2]

    def test_a_seq_from_nowhere_in_an_answer(self):
        line = synced(3)
        line.live(4)
        assert line.replayed(2**62) == []
        assert line.replayed(3) == [3, 4, "stop"]
        assert line.stats.rejected == {"seq_range": 1}


class TestHistoryThatIsOwed:
    """What was given up without an answer may still be had: the publisher was stuck, or its replay was away."""

    def given_up(self, count=3):
        line = synced(count, replay_timeout=2.0, probe_interval=0.0)
        line.live(count + 2)
        said = [*line.later(2.0), *line.later(2.0)]
        assert "lost 2" in said
        assert line.sequencer.partial
        return line, said

    def test_it_is_asked_for_from_the_beginning_and_taken_if_there_is_more(self):
        line, said = self.given_up()
        assert said[-1] == "ask 0"
        assert line.replayed(0) == ["stop", "new epoch", "ask 0"]
        assert line.replayed(0, 1, 2, 3, 4, 5)[:6] == [0, 1, 2, 3, 4, 5]
        assert not line.sequencer.partial
        assert line.end() == ["stop", "synced"]
        assert line.stats.restarts == 0
        assert line.state is State.LIVE

    def test_what_has_left_the_buffer_is_not_begun_anew_for(self):
        line, _ = self.given_up()
        assert line.replayed(5) == ["stop"]
        assert line.sequencer.partial
        assert line.later(1000) == []
        assert line.live(6) == [6]

    def test_an_empty_buffer_is_an_answer(self):
        line, _ = self.given_up()
        line.end()
        assert line.later(1000) == []

    def test_it_goes_on_being_asked_more_rarely_until_it_answers(self):
        line, _ = self.given_up()
        asked = [second for second in range(1000) if "ask 0" in line.later(1.0)]
        pauses = [later - sooner for sooner, later in pairwise(asked)]
        assert pauses == sorted(pauses)
        assert pauses[-1] == 16
        assert line.live(6) == [6]

    def test_a_gap_is_more_urgent(self):
        line, _ = self.given_up()
        assert line.live(8) == ["stop", "ask 5"]
        assert line.replayed(5, 6, 7)[:3] == [6, 7, 8]
        assert line.state is State.LIVE

    def test_a_beginning_that_was_not_answered_is_owed_too(self):
        line = Line(replay_timeout=2.0, probe_interval=0.0)
        line.up()
        line.live(7)
        said = [*line.later(2.0), *line.later(2.0), *line.later(2.0)]
        assert 7 in said
        assert line.sequencer.partial
        assert line.replayed(0)[:2] == ["stop", "new epoch"]

    def test_it_is_owed_over_a_restart_of_this_process(self):
        line, _ = self.given_up()
        again = Sequencer(line.sequencer.settings, SourceStats())
        again.load(line.sequencer.dump())
        assert again.dump() == line.sequencer.dump()


class TestGapsWithoutReplay:
    def test_what_overtook_is_waited_for_a_moment(self):
        line = synced(3, replay=False, reorder_grace=0.2)
        assert line.live(4) == []
        assert line.live(3) == [3, 4]
        assert line.missing == (1, 1, 0, 0)

    def test_then_it_is_lost(self):
        line = synced(3, replay=False, reorder_grace=0.2)
        line.live(4, 6)
        assert line.later(0.19) == []
        assert line.later(0.02) == ["lost 1", 4, "lost 1", 6]
        assert line.missing == (2, 0, 2, 0)
        assert line.state is State.LIVE


class TestLostTails:
    def test_an_idle_stream_is_asked_for_more(self):
        line = synced(3, probe_interval=1.0)
        assert line.later(0.5) == []
        (asked,) = line.later(0.6)
        assert asked in ("ask 2", "ask 0")
        line.replayed(*([2] if asked == "ask 0" else []), 3, 4)
        line.end()
        assert line.delivered[-1] == line.batch(4)
        assert line.missing == (2, 2, 0, 0)

    def test_asking_gets_rarer_while_nothing_happens(self):
        line = synced(3, probe_interval=1.0)
        asked = 0
        for _ in range(100):
            if any(str(said).startswith("ask") for said in line.later(1.0)):
                asked += 1
                line.replayed(2)
                line.end()
        assert 3 <= asked <= 10


class TestLives:
    def test_numbers_from_the_beginning_are_a_new_life(self):
        line = synced(5)
        line.life = 1
        said = line.live(0, 1)
        assert said[0] == "new epoch"
        assert [seq for seq in said if isinstance(seq, int)] == [0, 1]
        assert line.delivered[-2:] == [line.batch(0), line.batch(1)]
        assert (line.sequencer.epoch, line.stats.restarts) == (1, 1)

    def test_low_numbers_with_other_content_are_one_too(self):
        line = synced(5)
        line.life = 1
        assert line.live(3) == ["new epoch", "ask 0"]
        assert line.replayed(0, 1, 2)[:4] == [0, 1, 2, 3]

    def test_low_numbers_with_the_same_content_are_late_copies(self):
        line = synced(5)
        assert line.live(0, 3, 4) == []
        assert (line.stats.duplicates, line.stats.restarts) == (3, 0)

    def test_beyond_the_fingerprints_the_publisher_is_asked(self):
        line = synced(RING + 100, probe_interval=0.0)
        assert line.live(50) == [f"ask {RING + 100 - OVERLAP}"]
        line.replayed(RING + 99)
        line.end()
        assert line.stats.restarts == 0
        assert line.stats.duplicates == 1

    def test_and_if_it_does_not_have_the_batch_it_is_in_a_new_life(self):
        line = synced(RING + 100, probe_interval=0.0)
        line.life = 1
        line.live(50)
        said = line.end()
        assert "new epoch" in said
        line.replayed(*range(50))
        assert line.delivered[-1] == line.batch(50)
        assert line.missing == (0, 0, 0, 0)

    def test_what_was_pending_in_the_old_life_is_lost(self):
        line = synced(3)
        line.live(9)
        assert line.missing == (6, 0, 0, 6)
        line.life = 1
        line.live(0)
        assert line.missing == (6, 0, 6, 0)

    def test_back_in_the_same_life(self):
        line = synced(5)
        line.down()
        assert line.state is State.CONNECTING
        assert line.up() == ["ask 0"]
        assert [seq for seq in line.replayed(4, 5, 6) + line.end() if isinstance(seq, int)] == [5, 6]
        assert line.stats.restarts == 0
        assert line.state is State.LIVE

    def test_back_in_another_life_that_is_younger(self):
        line = synced(5)
        line.down()
        line.life = 1
        line.up()
        said = line.end()
        while "new epoch" not in said:  # it may ask once more before it believes it
            assert any(str(word).startswith("ask") for word in said)
            said = line.end()
        line.replayed(0, 1)
        line.end()
        assert line.delivered[-2:] == [line.batch(0), line.batch(1)]

    def test_back_in_another_life_that_has_passed_the_old_mark(self):
        line = synced(5)
        line.down()
        line.life = 1
        line.up()
        assert "new epoch" in line.replayed(4)
        line.replayed(*range(10))
        line.end()
        assert line.delivered[-1] == line.batch(9)
        assert line.stats.restarts == 1

    def test_back_in_another_life_whose_history_was_trimmed_past_it(self):
        line = synced(5)
        line.down()
        line.life = 1
        line.up()
        assert "new epoch" in line.replayed(400)
        line.replayed(400, 401)
        line.end()
        assert line.delivered[-1] == line.batch(401)
        assert line.sequencer.partial

    def test_a_quiet_engine_whose_new_life_is_shorter_than_the_old_but_trimmed(self):
        """The answer begins before the fingerprints kept, and nothing live will ever settle the question."""
        line = synced(RING + 100)
        line.down()
        line.life = 1
        line.up()
        said = line.end()
        while line.stats.restarts == 0:
            assert any(str(word).startswith("ask") for word in said), "a dead life is believed to go on"
            said = line.replayed(20, 21) + line.end()
        line.replayed(20, 21)
        line.end()
        assert line.delivered[-1] == line.batch(21)

    def test_lost_stays_lost_until_it_is_back(self):
        line = synced(5)
        line.down()
        line.sequencer.expire()
        assert line.state is State.LOST
        line.up()
        line.replayed(4)
        line.end()
        assert line.state is State.LIVE

    @pytest.mark.parametrize("replay", [True, False])
    def test_up_twice_is_up_once(self, replay):
        line = synced(2, replay=replay)
        assert line.up() == []


class TestAfterAPause:
    """The process was stopped, or is behind: batches wait to be read while the publisher trims its buffer beyond them."""

    def test_an_answer_from_beyond_the_tip_proves_no_restart(self):
        line = synced(3, probe_interval=1.0)
        assert line.later(1.5) == ["ask 0"]
        assert line.replayed(50) == ["stop"]  # trimmed: 3 to 49 still wait to be read
        assert line.live(*range(3, 60)) == list(range(3, 60))
        assert line.sequencer.epoch == 0
        assert line.stats.restarts == 0
        assert line.missing == (0, 0, 0, 0)
        assert not line.sequencer.partial

    def test_what_was_delivered_meanwhile_makes_the_answer_an_ordinary_one(self):
        line = synced(3, probe_interval=1.0)
        line.later(1.5)
        assert line.live(*range(3, 60)) == list(range(3, 60))
        line.replayed(*range(50, 62))
        assert line.delivered[-2:] == [line.batch(60), line.batch(61)]
        assert line.stats.restarts == 0

    def test_a_live_stream_that_brings_nothing_more_has_lost_what_was_trimmed(self):
        line = synced(3, probe_interval=1.0)
        line.later(1.5)
        assert line.replayed(50) == ["stop"]
        said = []
        while line.sequencer.next == 3:
            said += line.later(1.0)
            said += line.replayed(50, 51)
            said += line.end()
            assert line.now < 60
        assert "lost 47" in said
        assert "new epoch" not in said
        assert line.delivered[-2:] == [line.batch(50), line.batch(51)]
        assert line.stats.lost == 47
        assert line.sequencer.partial

    def test_batches_that_come_between_two_probes_are_waited_for_again(self):
        line = synced(3, probe_interval=1.0)
        for upto in (5, 7):
            while not any(str(word).startswith("ask") for word in line.later(0.5)):
                pass
            assert line.replayed(50) == ["stop"]
            line.live(*range(line.sequencer.next, upto))
        assert line.sequencer.next == 7
        assert line.missing == (0, 0, 0, 0)

    def test_suspects_are_no_restart_of_a_publisher_that_is_far_ahead(self):
        line = synced(RING + 50)
        (asked,) = line.live(3)  # older than every fingerprint that is kept
        assert asked.startswith("ask ")
        assert "new epoch" not in line.replayed(RING + 5000)
        assert line.stats.restarts == 0
        assert line.live(RING + 50) == [RING + 50]

    def test_after_an_absence_nobody_knows_the_epoch_and_what_is_gone_is_counted(self):
        line = synced(3)
        line.down()
        line.up()
        said = line.replayed(50)
        assert "new epoch" in said
        assert line.stats.restarts == 0  # nothing proves one
        assert (line.stats.missing, line.stats.lost) == (47, 47)
        line.replayed(50, 51)
        line.end()
        assert line.sequencer.next == 52
        assert line.sequencer.partial

    def test_the_time_of_a_question_runs_from_the_moment_it_is_sent(self):
        line = synced(3)
        line.sends = False
        line.live(9)
        for _ in range(5):
            assert line.later(1.0) == []  # it waits behind a backlog
        line.sequencer.sent(line.request, line.now)
        assert line.later(1.9) == []
        assert line.replayed(3, 4, 5, 6, 7, 8) == [3, 4, 5, 6, 7, 8, 9, "stop"]
        assert line.stats.replay_timeouts == 0
        assert line.stats.lost == 0
