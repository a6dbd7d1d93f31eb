"""The sequence machine, one rule at a time."""

from __future__ import annotations

import pytest

from kvbus.client.outputs import Ask, AskSnapshot, Deliver, Malformed, Replace, StopAsking
from kvbus.client.sequence import Sequence
from kvbus.client.timeouts import BufferLimits, Timing
from kvbus.client.updates import Gap, Lost, LostReason, Restarted, RestartReason, Synced
from kvbus.core.types import Reason
from tests.typed import there

QUICK = Timing(idle_s=1.0, answer_s=10.0, snapshot_s=5.0, retry_s=0.1, attempts=2, overlap_s=2.0, confirm_s=0.5)


class Stream:
    """The machine with a clock, and short words for what happens to it."""

    def __init__(self, *, life="a", **options):
        self.sequence = Sequence(timing=QUICK, **options)
        self.now = 100.0
        self.life = life
        self.ids = False
        self.opened = self.sequence.open(self.now)

    def frame(self, seq):
        return seq.to_bytes(8, "big") + (self.life.encode() * 16 if self.ids else b"")

    def payload(self, seq):
        return f"{self.life}{seq}".encode()

    def live(self, *seqs):
        return [out for seq in seqs for out in self.sequence.live(b"t", self.frame(seq), self.payload(seq), self.now)]

    def replayed(self, *seqs):
        return [
            out for seq in seqs for out in self.sequence.replayed(b"", self.frame(seq), self.payload(seq), self.now)
        ]

    def end(self):
        return self.sequence.replay_ended(self.now)

    def connected(self):
        return self.sequence.connected(self.now)

    def interrupted(self):
        return self.sequence.interrupted()

    def due(self):
        """Jump to the deadline."""
        self.now = there(self.sequence.deadline)
        return self.sequence.tick(self.now)

    def delivered(self, *seqs, replayed=False):
        topic = b"" if replayed else b"t"
        return [Deliver(seq, topic, self.payload(seq), replayed) for seq in seqs]


def synced(upto=3, **options):
    """A stream that has replayed batches 0 to upto-1 and is in step."""
    stream = Stream(**options)
    assert stream.connected() == [Ask(0)]
    stream.replayed(*range(upto))
    assert stream.end() == [Synced(upto - 1)]
    return stream


def test_it_asks_from_zero_once_the_subscription_stands():
    stream = Stream()
    assert stream.opened == []
    assert stream.connected() == [Ask(0)]


def test_it_asks_anyway_when_the_connection_is_not_reported():
    stream = Stream()
    assert stream.sequence.tick(stream.now) == []
    assert stream.due() == [Ask(0)]


def test_live_batches_wait_for_the_end_of_the_replay_and_come_once():
    stream = Stream()
    stream.connected()
    assert stream.live(2, 3) == []
    assert stream.replayed(0, 1, 2) == stream.delivered(0, 1, 2, replayed=True)
    assert stream.end() == [*stream.delivered(3), Synced(3)]
    assert stream.sequence.held == 0


def test_a_compacted_replay_counts_over_live_batches_of_the_same_seq():
    stream = Stream()
    stream.connected()
    stream.live(0, 1)
    stream.life = "snapshot"
    answer = stream.replayed(0, 1)
    assert answer == stream.delivered(0, 1, replayed=True)
    assert stream.end() == [Synced(1)]
    # the live copy of what the answer had, arriving late
    stream.life = "a"
    assert stream.live(1) == []
    assert stream.live(2) == stream.delivered(2)


def test_the_last_batch_is_asked_for_again_if_the_stream_is_silent_after_a_connection():
    stream = synced()
    assert stream.due() == [Ask(2)]
    stream.replayed(2)
    assert stream.end() == []
    assert stream.sequence.deadline is None


def test_a_live_batch_confirms_the_connection():
    stream = synced()
    assert stream.live(3) == stream.delivered(3)
    assert stream.sequence.deadline is None


def test_a_gap_is_asked_for_from_the_last_batch():
    stream = synced()
    assert stream.live(5) == [Gap(3, 4), Ask(2)]
    assert stream.live(6) == []
    assert stream.replayed(2, 3, 4, 5) == stream.delivered(3, 4, 5, replayed=True)
    assert stream.end() == [*stream.delivered(6), Synced(6)]


def test_one_request_at_a_time():
    stream = synced()
    stream.live(5)
    assert stream.live(9) == []
    stream.replayed(2, 3, 4)
    assert stream.end() == stream.delivered(5)
    assert stream.due() == [Ask(5)]


def test_a_hole_that_no_replay_fills_is_lost_after_bounded_attempts():
    stream = synced()
    stream.live(5)
    stream.replayed(2, 5)
    assert stream.end() == []
    assert stream.due() == [Ask(2)]
    stream.replayed(2, 5)
    assert stream.end() == [Lost(3, 4, LostReason.HOLE), *stream.delivered(5), Synced(5)]
    assert stream.live(6) == stream.delivered(6)


def test_a_trimmed_replay_is_a_loss_at_once():
    stream = Stream()
    stream.connected()
    assert stream.replayed(7, 8) == [
        Lost(0, 6, LostReason.TRIMMED),
        *stream.delivered(7, 8, replayed=True),
    ]
    assert stream.end() == [Synced(8)]


def test_silence_is_a_loss_after_bounded_attempts():
    stream = synced()
    stream.live(5)
    assert stream.due() == [StopAsking(), Ask(2)]
    assert stream.due() == [StopAsking(), Lost(3, 4, LostReason.NO_ANSWER), *stream.delivered(5)]


def test_whoever_answers_after_such_a_loss_is_asked_for_everything():
    stream = synced()
    stream.live(5)
    stream.due()
    stream.due()
    assert stream.live(6, 7) == stream.delivered(6, 7)
    # still nobody
    assert stream.due() == [Ask(7)]
    assert stream.due() == [StopAsking(), Ask(7)]
    assert stream.due() == [StopAsking()]
    # now somebody does, and what was lost is no hole any more
    assert stream.due() == [Ask(7)]
    stream.replayed(7)
    assert stream.end() == [Restarted(1, RestartReason.REBUILT), Ask(0)]
    assert stream.replayed(*range(8)) == stream.delivered(*range(8), replayed=True)
    assert stream.end() == [Synced(7)]
    assert stream.live(8) == stream.delivered(8)


def test_a_gap_that_is_answered_after_such_a_loss_is_answered_from_the_beginning():
    stream = synced()
    stream.live(5)
    stream.due()
    stream.due()
    assert stream.live(9) == [Gap(6, 8), Ask(5)]
    stream.replayed(5, 6, 7, 8, 9)
    assert stream.end() == [Restarted(1, RestartReason.REBUILT), Ask(0)]


def test_nobody_there_at_the_start():
    stream = Stream()
    assert stream.due() == [Ask(0)]
    assert stream.due() == [StopAsking(), Ask(0)]
    assert stream.due() == [StopAsking(), Lost(0, None, LostReason.NO_ANSWER)]
    assert stream.connected() == [Ask(0)]


def test_a_lost_end_is_asked_for_again_and_then_done_without():
    stream = Stream()
    stream.connected()
    stream.replayed(0, 1)
    assert stream.due() == [StopAsking(), Ask(1)]
    stream.replayed(1)
    assert stream.due() == [StopAsking(), Ask(1)]
    stream.replayed(1)
    assert stream.due() == [StopAsking(), Synced(1)]


def test_an_answer_without_end_in_sight_is_cut_off():
    stream = Stream()
    stream.connected()
    for _ in range(12):
        stream.replayed(0, 1)
        stream.now += 0.9
    assert stream.sequence.tick(stream.now) == [StopAsking(), Ask(1)]
    assert stream.sequence.duplicates > 0


def test_without_replay_a_gap_is_lost_at_once():
    stream = Stream(replay=False)
    assert stream.live(4) == stream.delivered(4)
    assert stream.live(7) == [Gap(5, 6), Lost(5, 6, LostReason.NO_REPLAY), *stream.delivered(7)]


def test_without_replay_a_restart_goes_on_where_the_new_life_is_seen():
    stream = Stream(replay=False)
    stream.live(4, 5)
    stream.life = "b"
    assert stream.live(1) == [
        Restarted(1, RestartReason.WENT_BACK),
        Lost(0, 0, LostReason.NO_REPLAY),
        *stream.delivered(1),
    ]


def test_beginning_live_asks_for_nothing_before_the_first_gap():
    stream = Stream(from_start=False)
    assert stream.connected() == []
    assert stream.live(40) == stream.delivered(40)
    assert stream.live(42) == [Gap(41, 41), Ask(40)]


def test_a_duplicate_is_left_out():
    stream = synced()
    stream.live(3, 4)
    assert stream.live(3, 4) == []
    assert stream.sequence.duplicates == 2


def test_another_payload_under_a_known_seq_is_a_restart():
    stream = synced()
    stream.live(3)
    stream.life = "b"
    assert stream.live(3) == [Restarted(1, RestartReason.PAYLOAD), Ask(0)]
    assert stream.replayed(0, 1, 2) == stream.delivered(0, 1, 2, replayed=True)
    assert stream.end() == [*stream.delivered(3), Synced(3)]
    assert stream.sequence.epoch == 1


def test_a_seq_from_before_memory_is_looked_into():
    stream = synced(limits=BufferLimits(recent=1))
    stream.live(3, 4)
    stream.now += QUICK.overlap_s
    assert stream.live(0) == [Ask(4)]
    # the publisher has nothing as new as 4 any more
    assert stream.end() == [Restarted(1, RestartReason.WENT_BACK), Ask(0)]


def test_a_restart_that_has_passed_the_old_mark_is_seen_in_the_answer():
    stream = synced()
    stream.life = "b"
    assert stream.live(9) == [Gap(3, 8), Ask(2)]
    assert stream.replayed(2) == [Restarted(1, RestartReason.PAYLOAD), Ask(0)]


def test_after_a_reconnection_nothing_is_delivered_unchecked():
    stream = synced()
    stream.live(3)
    stream.interrupted()
    stream.life = "b"
    assert stream.connected() == [Ask(3)]
    assert stream.live(4) == []  # exactly the next number, and yet of another life
    assert stream.replayed(3) == [Restarted(1, RestartReason.PAYLOAD), Ask(0)]


def test_a_reconnection_to_the_same_publisher_changes_nothing():
    stream = synced()
    stream.live(3)
    stream.interrupted()
    assert stream.connected() == [Ask(3)]
    assert stream.replayed(3, 4) == stream.delivered(4, replayed=True)
    assert stream.end() == [Synced(4)]
    assert stream.sequence.epoch == 0


def test_a_changed_publisher_id_is_a_restart_whatever_the_seq():
    stream = Stream()
    stream.ids = True
    stream.connected()
    stream.replayed(0, 1)
    stream.end()
    stream.live(2)
    stream.life = "b"
    assert stream.live(3) == [Restarted(1, RestartReason.PUBLISHER_ID), Ask(0)]
    assert stream.replayed(0) == stream.delivered(0, replayed=True)


def test_an_unchanged_publisher_id_makes_any_old_batch_a_duplicate():
    stream = Stream(limits=BufferLimits(recent=1))
    stream.ids = True
    stream.connected()
    stream.end()
    stream.live(0, 1, 2)
    stream.now += 60
    assert stream.live(0) == []
    assert stream.sequence.duplicates == 1


@pytest.mark.parametrize(
    ("frame", "reason"),
    [(b"", Reason.SEQ_WIDTH), (b"\0" * 9, Reason.SEQ_WIDTH), (b"\xff" * 8, Reason.SEQ_RANGE)],
)
def test_a_sequence_frame_that_is_none(frame, reason):
    stream = synced()
    assert stream.sequence.live(b"t", frame, b"", stream.now) == [Malformed(b"t", reason)]
    assert stream.live(3) == stream.delivered(3)


def test_what_does_not_fit_is_asked_for_again():
    stream = Stream(limits=BufferLimits(held_batches=2))
    stream.connected()
    stream.live(0, 1, 2, 3)
    assert stream.sequence.held == 2
    assert stream.sequence.overflowed == 2
    assert stream.end() == [*stream.delivered(0, 1), Ask(1)]
    assert stream.replayed(1, 2, 3) == stream.delivered(2, 3, replayed=True)
    assert stream.end() == [Synced(3)]


def test_a_batch_bigger_than_the_buffer_does_not_block_the_stream():
    stream = Stream(limits=BufferLimits(held_bytes=1))
    stream.connected()
    stream.end()
    stream.live(3)
    assert stream.end() == []
    stream.due()
    assert stream.end() == [Lost(0, 2, LostReason.HOLE), *stream.delivered(3), Synced(3)]


def test_answers_nobody_asked_for_are_ignored():
    stream = synced()
    assert stream.replayed(3) == []
    assert stream.end() == []
    assert stream.live(3) == stream.delivered(3)


# -- snapshots


def with_snapshots(*, replay=True, **options):
    stream = Stream(replay=replay, snapshot=True, **options)
    stream.ids = True
    return stream


def snapshot(stream, seq, *chunks, life=None):
    publisher = (life or stream.life).encode() * 16
    return stream.sequence.snapshot([seq.to_bytes(8, "big", signed=True), publisher, *chunks], stream.now)


def test_a_snapshot_takes_the_place_of_the_replay_from_zero():
    stream = with_snapshots()
    assert stream.connected() == [AskSnapshot()]
    assert stream.live(6, 7, 9) == []
    assert snapshot(stream, 6, b"x", b"y") == [Replace(6, (b"x", b"y")), *stream.delivered(7), Ask(7)]
    assert stream.replayed(7, 8, 9) == stream.delivered(8, 9, replayed=True)
    assert stream.end() == [Synced(9)]
    assert stream.live(10) == stream.delivered(10)


def test_what_was_published_after_the_snapshot_is_replayed_though_nothing_comes_live():
    stream = with_snapshots()
    stream.connected()
    assert snapshot(stream, 6, b"x") == [Replace(6, (b"x",)), Ask(7)]
    assert stream.replayed(7) == stream.delivered(7, replayed=True)
    assert stream.end() == [Synced(7)]


def test_a_snapshot_without_a_replay():
    stream = with_snapshots(replay=False)
    stream.connected()
    stream.live(6, 7)
    assert snapshot(stream, 6, b"x") == [Replace(6, (b"x",)), *stream.delivered(7), Synced(7)]
    assert stream.sequence.deadline is None
    assert stream.live(9) == [Gap(8, 8), AskSnapshot()]
    assert snapshot(stream, 9, b"y") == [Replace(9, (b"y",)), Synced(9)]


def test_snapshots_that_never_pass_over_the_gap():
    stream = with_snapshots(replay=False)
    stream.connected()
    snapshot(stream, 6)
    stream.live(9)
    assert snapshot(stream, 6) == []
    assert stream.due() == [AskSnapshot()]
    assert snapshot(stream, 6) == [Lost(7, 8, LostReason.HOLE), *stream.delivered(9), Synced(9)]


def test_nothing_published_yet():
    stream = with_snapshots()
    stream.connected()
    assert snapshot(stream, -1) == [Ask(0)]
    assert stream.end() == [Synced(-1)]
    assert stream.live(0) == stream.delivered(0)


@pytest.mark.parametrize("frames", [[(-2).to_bytes(8, "big", signed=True), bytes(16)], [b"?"], []])
def test_where_there_is_no_snapshot_the_replay_stands_in(frames):
    stream = with_snapshots()
    stream.connected()
    stream.live(1)
    assert stream.sequence.snapshot(frames, stream.now) == [Ask(0)]
    stream.replayed(0, 1)
    assert stream.end() == [Synced(1)]
    assert stream.live(3) == [Gap(2, 2), Ask(1)]


def test_where_there_is_neither_snapshot_nor_replay():
    stream = with_snapshots(replay=False)
    stream.connected()
    stream.live(4)
    assert snapshot(stream, -2) == [Lost(0, 3, LostReason.UNAVAILABLE), *stream.delivered(4)]


def test_nobody_answers_the_snapshot_request():
    stream = with_snapshots()
    stream.connected()
    stream.now += QUICK.idle_s
    assert stream.sequence.tick(stream.now) == []  # one message takes longer than a replay is silent
    assert stream.due() == [StopAsking(), Ask(0)]
    alone = with_snapshots(replay=False)
    alone.connected()
    assert alone.due() == [StopAsking(), AskSnapshot()]
    assert alone.due() == [StopAsking(), Lost(0, None, LostReason.NO_ANSWER)]


def caught_up(**options):
    """In step at seq 6 by a snapshot."""
    stream = with_snapshots(**options)
    stream.connected()
    snapshot(stream, 6, b"x")
    stream.end()
    return stream


def test_a_replay_that_is_silent_after_a_snapshot_loses_nothing():
    stream = with_snapshots()
    stream.connected()
    snapshot(stream, 6, b"x")
    assert stream.due() == [StopAsking(), Ask(7)]
    assert stream.due() == [StopAsking(), Synced(6)]


def test_a_gap_is_asked_of_the_replay_first():
    stream = caught_up()
    assert stream.live(8) == [Gap(7, 7), Ask(7)]
    assert stream.replayed(7, 8) == stream.delivered(7, 8, replayed=True)
    assert stream.end() == [Synced(8)]


@pytest.mark.parametrize("how", ["trimmed", "hole", "silence"])
def test_a_gap_that_no_replay_fills_is_passed_over_by_a_snapshot(how):
    stream = caught_up()
    stream.live(7, 10)
    if how == "trimmed":
        assert stream.replayed(10) == [AskSnapshot()]
    elif how == "hole":
        stream.replayed(7, 10)
        stream.end()
        stream.due()
        stream.replayed(7, 10)
        assert stream.end() == [AskSnapshot()]
    else:
        stream.due()
        assert stream.due() == [StopAsking(), AskSnapshot()]
    assert snapshot(stream, 9, b"y") == [Replace(9, (b"y",)), *stream.delivered(10), Ask(10)]
    stream.replayed(10)
    assert stream.end() == [Synced(10)]


def test_what_neither_replay_nor_snapshot_brings_is_lost():
    stream = caught_up()
    stream.live(7, 10)
    assert stream.replayed(10) == [AskSnapshot()]
    assert snapshot(stream, 6, b"x") == [Ask(7)]
    assert stream.replayed(10) == [Lost(8, 9, LostReason.TRIMMED), *stream.delivered(10, replayed=True)]
    assert stream.end() == [Synced(10)]
    # and the next gap has a snapshot's chance again
    stream.live(12)
    assert stream.replayed(12) == [AskSnapshot()]


def test_another_publisher_id_on_the_live_stream_is_a_restart():
    stream = caught_up()
    stream.life = "b"
    assert stream.live(7) == [Restarted(1, RestartReason.PUBLISHER_ID), AskSnapshot()]
    assert snapshot(stream, 6, b"y") == [Replace(6, (b"y",)), *stream.delivered(7), Ask(7)]


def test_another_publisher_id_on_a_snapshot_is_a_restart_with_its_state():
    stream = caught_up()
    stream.interrupted()
    assert stream.connected() == [AskSnapshot()]
    stream.live(7)
    stream.life = "b"
    assert snapshot(stream, 9, b"y") == [
        Restarted(1, RestartReason.PUBLISHER_ID),
        Replace(9, (b"y",)),
        Ask(10),
    ]


def test_after_a_reconnection_a_snapshot_of_the_same_life_that_is_not_newer_changes_nothing():
    stream = caught_up()
    stream.interrupted()
    assert stream.connected() == [AskSnapshot()]
    assert snapshot(stream, 5, b"older") == [Ask(7)]
    assert stream.end() == [Synced(6)]
    assert stream.sequence.epoch == 0


def test_a_snapshot_that_was_under_way_when_the_connection_broke_is_asked_for_again():
    stream = with_snapshots()
    stream.connected()
    stream.interrupted()
    assert snapshot(stream, 6, b"perhaps another life's") == [AskSnapshot()]
    assert stream.connected() == [AskSnapshot()]
    assert snapshot(stream, 7, b"x") == [Replace(7, (b"x",)), Ask(8)]


def test_a_snapshot_behind_a_stream_without_ids_is_another_life():
    stream = with_snapshots()
    stream.ids = False
    stream.connected()
    snapshot(stream, -2)
    stream.replayed(0, 1, 2)
    stream.end()
    stream.live(5)
    assert stream.replayed(4) == [AskSnapshot()]
    assert snapshot(stream, 0, b"x") == [Restarted(1, RestartReason.WENT_BACK), Replace(0, (b"x",)), Ask(1)]


def test_beginning_live_asks_for_a_snapshot_only_where_nothing_else_helps():
    stream = with_snapshots(replay=False, from_start=False)
    assert stream.connected() == []
    assert stream.live(40) == stream.delivered(40)
    assert stream.live(42) == [Gap(41, 41), AskSnapshot()]


def test_snapshots_nobody_asked_for_are_ignored():
    stream = caught_up()
    assert snapshot(stream, 9, b"x") == []
    stream.live(9)
    assert snapshot(stream, 9, b"x") == []
