"""Tests by example for the sequencer, which delivers one publisher's batches in order and requests missing ones.

``tests/properties`` has tests with random streams.
"""

from collections import deque
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.sequencing.actions import Ask, Deliver, Lost
from kvbus.core.sequencing.epoch import FIRST_PAUSE, MAX_EPOCHS
from kvbus.core.sequencing.fingerprints import RING
from kvbus.core.sequencing.phases import State
from kvbus.core.sequencing.request import OVERLAP
from kvbus.core.sequencing.sequencer import Sequencer
from kvbus.core.source_spec import ATTEMPTS
from kvbus.core.stats import SourceStats
from tests.core.dsl import (
    ask,
    ask_snapshot,
    cancel,
    down,
    live,
    replay_aborted,
    replay_end,
    replayed,
    snapshot,
    tick,
    unread,
    up,
)
from tests.core.sequencing.script import SequencerScript, deliver, in_sync, lost, new_epoch, synced


def has_replay_request(done):
    """Return whether the sequencer's actions contain a replay request."""
    return any(isinstance(action, Ask) for action in done)


def delivered(done):
    """Return the seqs of the batches that the sequencer delivers by these actions."""
    return [action.seq for action in done if isinstance(action, Deliver)]


class TestGaps:
    def test_a_replay_decides_between_two_batches_with_the_same_seq(self):
        script = in_sync(3)
        script.after(live(5))
        script.epoch = 1  # a second publisher at the endpoint sends the next batch
        assert script >> live(5)
        script.epoch = 0
        assert script.after(*map(replayed, range(3, 6))) == [*deliver(3, 4, 5), cancel()]
        assert script.delivered == [script.payload(seq) for seq in range(6)]

    def test_one_far_too_high_seq_is_rejected_and_three_are_a_new_epoch(self):
        """A single batch whose seq is much too high is rejected.

        If the engine continues from this seq, it is in a new epoch.
        """
        script = in_sync(3, probe_interval=0.0)
        assert script >> live(2**63 - 4)
        assert script.stats.rejected == {"seq_range": 1}
        assert script.missing == (0, 0, 0, 0)
        assert script >> live(3) << deliver(3)
        assert script.after(live(2**62), live(2**62 + 1)) == []
        assert script.after(live(2**62 + 2))[:2] == [new_epoch(), ask(0)]
        assert script.after(replayed(2**62), replayed(2**62 + 1)) == [
            *deliver(2**62, 2**62 + 1, 2**62 + 2),
            cancel(),
            synced(),
        ]
        assert script.missing == (0, 0, 0, 0)

    def test_a_far_too_high_seq_before_the_history_is_rejected(self):
        script = SequencerScript()
        script.after(up())
        script.after(live(2**62))
        assert script.after(replayed(0), replayed(1)) == deliver(0, 1)
        assert script >> replay_end() << cancel() << synced()
        assert script.stats.rejected == {"seq_range": 1}
        assert script.missing == (0, 0, 0, 0)
        assert script >> live(2) << deliver(2)

    def test_a_far_too_high_seq_in_a_replay_answer_is_rejected(self):
        script = in_sync(3)
        script.after(live(4))
        assert script >> replayed(2**62)
        assert script >> replayed(3) << deliver(3, 4) << cancel()
        assert script.stats.rejected == {"seq_range": 1}


class TestBackfill:
    """Tests for batches that count as lost because a request got no answer, and that a later answer still contains."""

    def given_up(self, count=3):
        script = in_sync(count, replay_timeout=2.0, probe_interval=0.0)
        script.after(live(count + 2))
        said = script.after(tick(2.0), tick(2.0))
        assert lost(2) in said
        assert script.sequencer.partial
        return script, said

    def test_a_backfill_is_requested_ever_more_rarely_until_the_engine_answers(self):
        script, _ = self.given_up()
        asked = [second for second in range(1000) if ask(0) in script.after(tick(1.0))]
        pauses = [later - sooner for sooner, later in pairwise(asked)]
        assert pauses == sorted(pauses)
        assert pauses[-1] == 16
        assert script >> live(6) << deliver(6)

    def test_a_backfill_stays_pending_after_a_restart_of_kvbus(self):
        script, _ = self.given_up()
        again = Sequencer(script.sequencer.spec, SourceStats())
        again.load(script.sequencer.dump())
        assert again.dump() == script.sequencer.dump()


class TestEpochs:
    @given(
        st.lists(
            st.one_of(
                st.tuples(st.just("live"), st.integers(0, 1), st.integers(0, 30)),
                st.sampled_from([("down",), ("up",), ("tick",)]),
            ),
            max_size=80,
        ),
        st.sampled_from([2, 1000]),
    )
    def test_each_live_batch_is_counted_by_its_outcome(self, steps, room):
        script = SequencerScript(replay=False, reorder_batches=room)
        sent = 0
        for step in steps:
            if step[0] == "live":
                _, script.epoch, seq = step
                script.after(live(seq))
                sent += 1
            elif step[0] == "tick":
                script.after(tick(0.5))
            else:
                script.after(down() if step[0] == "down" else up())
            stats, sequencer = script.stats, script.sequencer
            dropped = stats.duplicates + stats.held_overflow + sum(stats.rejected.values())
            waiting = len(sequencer.reorder_buffer) + len(sequencer.current.unverified.stale)
            assert sent == len(script.delivered) + waiting + dropped + stats.filtered["old_epoch"]

    def test_an_engine_that_returns_in_a_new_epoch_with_a_trimmed_history_is_partial(self):
        script = in_sync(5)
        script.after(down())
        script.epoch = 1
        script.after(up())
        assert new_epoch() in script.after(replayed(400))
        script.after(replayed(400), replayed(401))
        script.after(replay_end())
        assert script.delivered[-1] == script.payload(401)
        assert script.sequencer.partial


class TestAfterAPause:
    """Tests for a kvbus process that was stopped or is slow.

    Batches wait in its sockets to be read. The batches before them are missing, and the publisher no longer has all of
    these.
    """

    def test_an_answer_that_begins_after_the_last_delivered_batch_proves_no_restart(self):
        script = in_sync(3, probe_interval=1.0)
        assert script >> tick(1.5) << ask(0)
        assert script >> replayed(50) << cancel()  # the buffer is trimmed; kvbus has not read batches 3 to 49
        assert script.after(*map(live, range(3, 60))) == deliver(*range(3, 60))
        assert script.sequencer.epoch == 0
        assert script.stats.restarts == 0
        assert script.missing == (0, 0, 0, 0)
        assert not script.sequencer.partial

    def asked_for(self, script, seconds, *before):
        """Answer every request of the sequencer for some seconds.

        The answers begin after the batches that the sequencer has delivered.
        """
        until = script.now + seconds
        while script.now < until:
            if has_replay_request(script.after(tick(0.5))):
                script.after(*before, replayed(50))

    def nothing_is_lost(self, script):
        assert script.after(*map(live, range(3, 60))) == deliver(*range(3, 60))
        assert script.missing == (0, 0, 0, 0)
        assert not script.sequencer.partial

    @pytest.mark.parametrize("stood", [14.0, 50.0])
    def test_batches_delayed_by_a_pause_of_kvbus_are_not_lost(self, stood):
        script = in_sync(3, probe_interval=1.0)
        script.after(tick(0.2, stood=stood))
        self.asked_for(script, stood + 1.0)
        self.nothing_is_lost(script)

    def test_batches_delayed_by_a_network_outage_are_not_lost(self):
        script = in_sync(3, probe_interval=1.0)
        (asked,) = script.after(tick(20.0))
        assert has_replay_request([asked])
        assert script.after(tick(2.0)) == [cancel(), ask(0)]  # the network delivers no message, so no answer came
        self.asked_for(script, 22.0)
        self.nothing_is_lost(script)

    def test_unread_live_batches_are_not_lost(self):
        script = in_sync(3, probe_interval=1.0)
        self.asked_for(script, 100.0, unread())
        self.nothing_is_lost(script)

    def test_an_unread_replay_answer_does_not_time_out(self):
        script = SequencerScript(replay_timeout=2.0, replay_total_timeout=10.0)
        script.after(up(), replayed(0))
        for _ in range(20):
            assert script.after(unread(answer=True), tick(1.9)) == []
        assert script.after(replayed(1), unread(answer=True), tick(1.9)) == deliver(1)
        assert script.after(tick(0.2))[:2] == [cancel(), synced()]
        assert script.stats.replay_timeouts == 1

    @pytest.mark.parametrize("deaf", [False, True])
    def test_a_state_in_a_replay_answer_waits_for_the_live_stream(self, deaf):
        """An answer with other content than the delivered batches may be a state of another kvbus, not a new epoch.

        kvbus waits for the live stream, which shows that the epoch is the same. Only without live batches (``deaf``)
        does kvbus begin a new epoch.
        """
        script = in_sync(30, probe_interval=1.0)
        script.state_at = 30 - OVERLAP
        assert script >> tick(1.5) << ask(30 - OVERLAP)
        assert not script.after(*map(replayed, range(30 - OVERLAP, 60)))
        assert script >> replay_end() << cancel()
        assert script.sequencer.epoch == 0
        said = [] if deaf else script.after(*map(live, range(30, 60)))
        while deaf and not script.sequencer.epoch:
            said += script.after(tick(0.5))
            said += script.after(*map(replayed, range(30 - OVERLAP, 60)))
            said += script.after(replay_end())
            assert script.now < 110
        assert (new_epoch() in said) is deaf
        assert delivered(said) == ([] if deaf else [*range(30, 60)])
        assert script.stats.restarts == 0

    def test_a_state_that_ends_before_the_last_delivered_batch_is_a_new_epoch(self):
        script = in_sync(30, probe_interval=1.0)
        script.state_at = 30 - OVERLAP
        script.after(tick(1.5), *map(replayed, range(30 - OVERLAP, 29)))
        assert new_epoch() in script.after(replay_end())
        assert script.stats.restarts == 1

    @pytest.mark.parametrize("ends", [tick(2.5), replay_aborted()])
    def test_an_interrupted_state_proves_no_new_epoch(self, ends):
        script = in_sync(30, probe_interval=1.0)
        script.state_at = 30 - OVERLAP
        script.after(tick(1.5), *map(replayed, range(30 - OVERLAP, 30)))
        script.after(ends)
        assert deliver(30) == script.after(live(30))[:1]
        assert (script.sequencer.epoch, script.stats.lost) == (0, 0)

    def test_a_state_after_a_snapshot_is_not_a_new_epoch(self):
        """kvbus recognizes a state in a replay answer even if it has no fingerprint for the first seq of the answer.

        It has no fingerprint because it began with a snapshot. The batches of a state have other contents than the live
        batches with the same seqs. This must not look like a new epoch.
        """
        script = SequencerScript(replay=True, snapshot=True, probe_interval=1.0)
        script.after(up(), snapshot(29))
        assert script >> tick(1.5) << ask(29)
        assert delivered(script.after(*map(live, range(30, 34)))) == [30, 31, 32, 33]
        script.state_at, script.epoch = 29, 1  # its batches differ from the live batches with these seqs
        assert not script.after(*map(replayed, range(29, 34)))
        assert script >> replay_end() << cancel()
        assert (script.sequencer.epoch, script.stats.restarts) == (0, 0)


class TestReconnectionWithoutReplay:
    def test_three_consecutive_stale_batches_are_a_new_epoch(self):
        script = in_sync(RING + 100, replay=False)
        script.epoch = 1
        assert script.after(live(20), live(21)) == []
        said = script.after(live(22))
        assert said[0] == new_epoch()
        assert delivered(said) == [20, 21, 22]


class TestConflict:
    def test_endless_epochs_cause_a_conflict_with_retries(self):
        script = in_sync(1)
        while script.state is not State.CONFLICT:
            script.epoch += 1
            script.after(live(0))
            assert script.epoch < 10
        assert script.sequencer.partial
        rejected = script.stats.rejected["conflict"]
        assert script.after(live(0), live(1)) == []
        assert script.stats.rejected["conflict"] == rejected + 2
        script.sequencer.publisher_changed(script.now)
        assert script.state is State.CONFLICT
        assert script.after(tick(FIRST_PAUSE)) == [ask(0)]
        assert script.after(replayed(0), replay_end()) == [*deliver(0), cancel(), synced()]
        assert script.state is State.LIVE


class TestRestartOfThisProcess:
    """Tests for the sequencer of a new kvbus process that loads a checkpoint and the write-ahead log.

    It has no connection at first.
    """

    def restarted(self, script):
        again = SequencerScript(epoch=script.epoch)
        again.sequencer.load(script.sequencer.dump())
        return again

    def test_a_restarted_sequencer_continues_after_its_last_batch(self):
        script = in_sync(5)
        again = self.restarted(script)
        for seq in (5, 6):
            again.sequencer.current.restore_batch(seq, again.payload(seq))
        again.sequencer.recovery_finished()
        assert again.state is State.CONNECTING
        assert again >> up() << ask(0)
        assert delivered(again.after(*map(replayed, range(9)), replay_end())) == [7, 8]
        assert again.stats.restarts == 0
        assert not again.sequencer.partial

    def test_a_restarted_sequencer_continues_the_epoch_of_the_write_ahead_log(self):
        again = self.restarted(in_sync(5))
        again.sequencer.restore_epoch(partial=False)
        again.sequencer.current.restore_batch(3, again.payload(3))
        again.sequencer.recovery_finished()
        assert (again.sequencer.epoch, again.sequencer.next) == (1, 4)
        assert again.sequencer.partial
        assert again.sequencer.history.first == 3
        assert again.sequencer.history.pending  # the log does not say why the epoch began at batch 3

    def test_a_loss_in_the_write_ahead_log_makes_a_restarted_source_partial(self):
        again = self.restarted(in_sync(5))
        again.sequencer.current.restore_loss(2)
        assert (again.sequencer.partial, again.sequencer.history.first) == (True, 7)

    def test_a_sequencer_restarted_before_its_first_batch_counts_no_missing_batches(self):
        script = in_sync(0)
        again = self.restarted(script)
        again.sequencer.recovery_finished()
        again.after(up(), replayed(9), replay_end())
        assert again.missing == (0, 0, 0, 0)
        assert (again.sequencer.partial, again.sequencer.history.first) == (True, 9)

    def test_a_restored_snapshot_ends_partial(self):
        again = self.restarted(in_sync(5))
        again.sequencer.current.restore_batch(9, again.payload(9))
        again.sequencer.current.restore_snapshot(20)
        assert (again.sequencer.next, again.sequencer.history.first) == (21, 0)
        assert not again.sequencer.partial


class TestCompletion:
    """Tests for the end of the state ``partial`` when the engine's cache was emptied.

    Then kvbus knows every block again.
    """

    def partial(self):
        script = SequencerScript()
        script.after(up(), replayed(5), replay_end())
        assert (script.sequencer.partial, script.sequencer.history.first) == (True, 5)
        return script

    @pytest.mark.parametrize(("certain", "first"), [(True, 0), (False, 5)])
    def test_completion_ends_partial(self, certain, first):
        script = self.partial()
        script.sequencer.complete(certain=certain)
        assert (script.sequencer.partial, script.sequencer.history.first) == (False, first)

    def test_completion_does_not_end_partial_if_a_loss_follows(self):
        script = self.partial()
        script.sequencer.actions.append(Lost(1))
        script.sequencer.complete(certain=True)
        assert script.sequencer.partial


COMPACTED: dict[str, Any] = {"compacted": True, "on_lost": "keep", "probe_interval": 0.0}


class TestAnswersThatMayBeCompacted:
    def test_many_gaps_that_only_states_fill_are_no_conflict(self):
        script = in_sync(3, **COMPACTED)
        for gap in range(2 * MAX_EPOCHS):
            script.after(live(script.sequencer.next + 1))
            script.epoch += 1  # the answer's batches have other content than the delivered ones
            assert new_epoch() in script.after(replayed(script.sequencer.next - 1))
            script.after(*map(replayed, range(5 + gap)), replay_end())
            assert script.state is State.LIVE


class TestFloodedStart:
    """Tests for an engine that publishes more than its replay buffer holds while kvbus reads its history.

    None of this may look like a restart of the engine.
    """

    @pytest.mark.parametrize("replay", [True, False])
    def test_batch_0_after_a_later_live_batch_begins_a_new_epoch(self, replay):
        script = SequencerScript(replay=replay)
        script.after(up(), live(4), *([replayed(3), replayed(4), replay_end()] if replay else []))
        assert new_epoch() in script.after(live(0))
        assert script.stats.restarts == 1

    @pytest.mark.parametrize("room", [2, 12])
    def test_a_flooded_start_in_random_order_counts_no_restart(self, room):
        assert [seed for seed in range(500) if flooded(Random(seed), room).stats.restarts] == []


def flooded(choose, room):
    """Run one epoch of a publisher that keeps ``room`` batches, with live stream and answers in order but at random
    speeds.
    """
    script = SequencerScript()
    streamed: deque[Any] = deque()
    asked: deque[Ask] = deque()
    answered: deque[Any] = deque()
    published = choose.choice([0, 3, 3 * room])

    def happens(*what):
        asked.extend(said for said in script.after(*what) if isinstance(said, Ask))

    happens(up())
    for _ in range(25):
        count = choose.choice([1, 1, 2, room, 3 * room])
        match choose.choice(["publish", "publish", "live", "live", "ask", "answer", "answer", "tick"]):
            case "publish":
                streamed.extend(live(seq) for seq in range(published, published + count))
                published += count
            case "live":
                happens(*(streamed.popleft() for _ in range(min(count, len(streamed)))))
            case "ask" if asked:
                question = asked.popleft()
                kept = range(max(published - room, question.start), published)
                answered.extend(replayed(seq, request=question.request) for seq in kept)
                answered.append(replay_end(request=question.request))
            case "answer":
                happens(*(answered.popleft() for _ in range(min(count, len(answered)))))
            case "tick":
                happens(tick(0.05))
    return script


class TestSnapshots:
    def test_a_snapshot_older_than_the_received_batches_is_of_a_new_epoch(self):
        script = SequencerScript(snapshot=True)
        script.after(up(), snapshot(41))
        assert script >> live(50) << ask(42)
        assert script.after(*[replay_end()] * ATTEMPTS)[-1] == ask_snapshot()
        assert new_epoch() in script.after(snapshot(45))

    def test_batches_missing_after_a_reconnection_without_a_snapshot_count_as_lost(self):
        script = SequencerScript(replay=False, snapshot=True)
        script.after(up(), snapshot(-1), live(0), live(1), down(), up())
        script.after(live(5), live(6))
        assert script.missing == (3, 0, 0, 3)
        assert lost(3) in script.after(snapshot(-2))
        assert script.missing == (3, 0, 3, 0)
        assert script.sequencer.next == 7

    def test_a_live_batch_that_arrives_before_the_snapshot_waits_for_it(self):
        """The snapshot may be older than a live batch, because the publisher sends it on another connection.

        It must not undo a batch that kvbus has delivered.
        """
        script = SequencerScript(replay=False, snapshot=True)
        script.after(up(), snapshot(-1), live(0), live(1), down(), up())
        script >> live(2) >> snapshot(1) << cancel() << synced() << deliver(2)
        assert script.missing == (0, 0, 0, 0)

    def test_a_snapshot_without_delivered_batches_makes_them_missing_again(self):
        """A gap may be filled by late batches while kvbus waits for a snapshot, and a later gap follows."""
        script = SequencerScript(replay=False, snapshot=True)
        script.after(up(), snapshot(-1), live(0), live(2))
        script.after(live(4), live(1))
        assert script.sequencer.next == 3
        script.after(snapshot(2), live(6), live(3), live(8), live(5))
        assert script.sequencer.next == 7
        script.after(snapshot(4))
        assert script.sequencer.next == 5
        script.after(snapshot(8))
        assert script.sequencer.next == 9
        assert script.missing[3] == 0
