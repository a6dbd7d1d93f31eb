"""Tests for the client library's sequencing of batches.

There is one test for each rule about the updates that the application gets.
"""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from kvbus.client.sequence import Output, Replace, Sequence, Timing
from kvbus.client.updates import Conflict, Gap, Lost, Rejected, Restarted, Synced
from kvbus.core.sequencing.actions import Ask, AskSnapshot, Deliver, LostReason, RestartReason, Stop
from kvbus.core.types import Reason
from kvbus.core.wire.frames import END_SEQ
from tests.doubles.payloads import cleared, payload, store

QUICK = Timing(idle_s=1.0, answer_s=10.0, snapshot_s=5.0, attempts=2, overlap_s=2.0, confirm_s=0.5, rebuild_s=5.0)


def ask(start: int) -> str:
    return f"ask from {start}"


ASK_SNAPSHOT = "ask for a snapshot"


class Stream:
    """The client's sequencing state machine with a simulated clock, and short methods for its inputs."""

    def __init__(self, *, epoch="a", timing=QUICK, **options):
        self.sequence = Sequence(timing=timing, **options)
        self.now = 100.0
        self.epoch = epoch
        self.ids = False
        self.opened = self.follow(self.sequence.open(self.now))

    def follow(self, outputs: list[Output]) -> list[Any]:
        """Handle the outputs of the sequence under test: tell it that each request among them was sent.

        Return the updates first, and then the requests in a short form.
        """
        said: list[Any] = []
        asked: list[str] = []
        for output in outputs:
            if isinstance(output, Ask | AskSnapshot):
                self.sequence.sent(output.request, self.now)
                asked.append(ask(output.start) if isinstance(output, Ask) else ASK_SNAPSHOT)
            elif isinstance(output, Deliver):
                payload: Any = output.payload
                said.append(f"{output.seq}: {payload.decode(errors='replace')}" + " replayed" * payload.replayed)
            elif not isinstance(output, Stop):
                said.append(output)
        return said + asked

    def frame(self, seq):
        return seq.to_bytes(8, "big") + (self.epoch.encode() * 16 if self.ids else b"")

    def payload(self, seq):
        return f"{self.epoch}{seq}".encode()

    def live(self, *seqs):
        return [
            said
            for seq in seqs
            for said in self.follow(self.sequence.live([b"t", self.frame(seq), self.payload(seq)], self.now))
        ]

    def replayed(self, *seqs):
        return [
            said
            for seq in seqs
            for said in self.follow(self.sequence.replayed([b"", self.frame(seq), self.payload(seq)], self.now))
        ]

    def end(self):
        return self.follow(self.sequence.replayed([b"", END_SEQ, b""], self.now))

    def connected(self):
        return self.follow(self.sequence.connected(self.now))

    def interrupted(self):
        return self.follow(self.sequence.interrupted(self.now))

    def due(self):
        """Set the clock to the state machine's deadline, and return the resulting updates and requests."""
        self.now = self.sequence.deadline
        assert self.now < inf
        return self.follow(self.sequence.tick(self.now))

    def delivered(self, *seqs, replayed=False):
        return [f"{seq}: {self.epoch}{seq}" + " replayed" * replayed for seq in seqs]


def synced(upto=3, **options):
    """Return a stream that has replayed the batches 0 to upto-1 and is synced."""
    stream = Stream(**options)
    assert stream.connected() == [ask(0)]
    stream.replayed(*range(upto))
    assert stream.end() == [Synced(upto - 1)]
    return stream


def test_a_client_requests_a_replay_even_if_no_connection_is_reported():
    stream = Stream()
    assert stream.follow(stream.sequence.tick(stream.now)) == []
    assert stream.due() == [ask(0)]


def test_a_client_requests_a_gap_from_the_last_batch():
    stream = synced()
    assert stream.live(5) == [Gap(3, 4), ask(2)]
    assert stream.live(6) == []
    assert stream.replayed(2, 3, 4, 5) == stream.delivered(3, 4, 5, replayed=True)
    assert stream.end() == [*stream.delivered(6), Synced(6)]


def test_a_gap_that_no_replay_fills_is_lost_after_two_requests():
    stream = synced()
    stream.live(5)
    stream.replayed(2, 5)
    assert stream.end() == [ask(2)]
    stream.replayed(2, 5)
    assert stream.end() == [Lost(3, 4, LostReason.HOLE), *stream.delivered(5, replayed=True), Synced(5)]
    assert stream.live(6) == stream.delivered(6)


def test_a_trimmed_replay_is_reported_as_a_loss_immediately():
    stream = Stream()
    stream.connected()
    assert stream.replayed(7, 8) == [
        Lost(0, 6, LostReason.TRIMMED),
        *stream.delivered(7, 8, replayed=True),
    ]
    assert stream.end() == [Synced(8)]


@pytest.mark.parametrize(
    ("events", "lost"),
    [
        ([cleared(), store([1])], []),
        ([cleared()], []),
        ([store([1]), cleared()], [Lost(0, 6, LostReason.TRIMMED)]),
        ([], [Lost(0, 6, LostReason.TRIMMED)]),
    ],
)
@pytest.mark.parametrize("unanswered", [0, 1])
def test_a_replay_that_begins_late_with_a_clear_is_not_a_loss(events, lost, unanswered):
    """If a replay answer begins later than the requested seq, and with a clear, it is a state: the client reports
    no loss.

    The clear makes all earlier batches irrelevant, also those of earlier requests without an answer.
    """
    stream = Stream()
    stream.connected()
    for _ in range(unanswered):
        assert stream.due() == [ask(0)]
    first = stream.sequence.replayed([b"", stream.frame(7), payload(*events)], stream.now)
    assert [each for each in first if not isinstance(each, Deliver)] == lost
    assert stream.replayed(8) == stream.delivered(8, replayed=True)
    assert stream.end() == [Synced(8)]


def test_a_late_state_is_applied_after_requests_without_an_answer():
    """Batches were lost, because requests got no answer. A later answer holds a state, which the client must apply.

    The state begins at a higher seq than requested. If the client treated it as a replay without its oldest batches,
    the client's view would lack the blocks of the lost batches.
    """
    stream = Stream()
    stream.connected()
    stream.live(7)
    assert stream.due() == [ask(0)]
    assert stream.due() == [Lost(0, 6, LostReason.NO_ANSWER), *stream.delivered(7), ask(0)]
    state = [b"", stream.frame(9), payload(cleared(), store([1]))]
    assert stream.follow(stream.sequence.replayed(state, stream.now)) == [
        Restarted(1, RestartReason.REBUILT),
        ask(0),
    ]
    stream.sequence.replayed(state, stream.now)
    assert stream.end() == [Synced(9)]


def test_a_live_clear_after_a_gap_is_not_a_replay_answer():
    stream = Stream(replay=False)
    stream.connected()
    stream.live(0)
    found = stream.sequence.live([b"t", stream.frame(2), payload(cleared())], stream.now)
    assert Lost(1, 1, LostReason.NO_REPLAY) in found


def test_a_client_without_a_publisher_requests_a_replay_repeatedly():
    stream = Stream()
    assert stream.due() == [ask(0)]
    assert stream.due() == [ask(0)]
    assert stream.due() == [Lost(0, None, LostReason.NO_ANSWER), ask(0)]
    assert stream.connected() == [ask(0)]


def test_a_gap_without_a_replay_endpoint_is_lost_immediately():
    stream = Stream(replay=False)
    assert stream.live(4) == stream.delivered(4)
    assert stream.live(7) == [Gap(5, 6), Lost(5, 6, LostReason.NO_REPLAY), *stream.delivered(7)]


def test_a_client_that_begins_live_requests_no_replay_before_a_gap():
    stream = Stream(from_start=False)
    assert stream.connected() == []
    assert stream.live(40) == stream.delivered(40)
    assert stream.live(42) == [Gap(41, 41), ask(40)]


def test_a_changed_publisher_id_is_a_restart_for_any_seq():
    stream = Stream()
    stream.ids = True
    stream.connected()
    stream.replayed(0, 1)
    stream.end()
    stream.live(2)
    stream.epoch = "b"
    assert stream.live(3) == [Restarted(1, RestartReason.PUBLISHER_ID), ask(0)]
    assert stream.replayed(0) == stream.delivered(0, replayed=True)


def test_publishers_that_alternate_on_an_endpoint_are_a_conflict():
    stream = synced()
    stream.ids = True
    seen: list[object] = []
    for epoch in "bcbcbc":
        stream.epoch = epoch
        stream.now += 0.1
        seen += stream.live(0)
    assert [type(each) for each in seen].count(Restarted) == 5
    assert seen[-1] == Conflict()
    assert stream.live(1) == []
    assert stream.due() == [ask(0)]
    stream.replayed(0)
    assert stream.end() == [Synced(0)]


def test_an_old_batch_with_an_unchanged_publisher_id_is_a_duplicate():
    stream = Stream()
    stream.ids = True
    stream.connected()
    stream.replayed(0, 1, 2)
    stream.end()
    stream.now += 60
    stream.epoch = "a"
    assert stream.follow(stream.sequence.live([b"t", stream.frame(1), b"not compacted"], stream.now)) == []
    assert stream.sequence.stats.duplicates == 1


@pytest.mark.parametrize(
    ("frame", "reason"),
    [(b"", Reason.SEQ_WIDTH), (b"\0" * 9, Reason.SEQ_WIDTH), (b"\xff" * 8, Reason.SEQ_RANGE)],
)
def test_a_malformed_sequence_frame_is_rejected(frame, reason):
    stream = synced()
    assert stream.follow(stream.sequence.live([b"t", frame, b""], stream.now)) == [Rejected(None, b"t", reason)]
    assert stream.live(3) == stream.delivered(3)


# -- snapshots


def with_snapshots(*, replay=True, **options):
    stream = Stream(replay=replay, snapshot=True, **options)
    stream.ids = True
    return stream


def snapshot(stream, seq, *chunks, epoch=None):
    publisher = (epoch or stream.epoch).encode() * 16
    return stream.follow(
        stream.sequence.snapshot([seq.to_bytes(8, "big", signed=True), publisher, *chunks], stream.now)
    )


def test_a_snapshot_replaces_the_replay_from_seq_0():
    stream = with_snapshots()
    assert stream.connected() == [ASK_SNAPSHOT]
    assert stream.live(6, 7, 9) == []
    assert snapshot(stream, 6, b"x", b"y") == [Replace(6, (b"x", b"y")), *stream.delivered(7), ask(7)]
    assert stream.replayed(7, 8, 9) == stream.delivered(8, 9, replayed=True)
    assert stream.end() == [Synced(9)]
    assert stream.live(10) == stream.delivered(10)


def test_a_client_fills_gaps_by_snapshots_if_it_has_no_replay():
    stream = with_snapshots(replay=False)
    stream.connected()
    stream.live(6, 7)
    assert snapshot(stream, 6, b"x") == [Replace(6, (b"x",)), *stream.delivered(7), Synced(7)]
    assert stream.sequence.deadline == inf
    assert stream.live(9) == [Gap(8, 8), ASK_SNAPSHOT]
    assert snapshot(stream, 9, b"y") == [Replace(9, (b"y",)), Synced(9)]


@pytest.mark.parametrize("frames", [[(-2).to_bytes(8, "big", signed=True), bytes(16)], [b"?"], []])
def test_a_client_requests_a_replay_if_no_snapshot_is_available(frames):
    stream = with_snapshots()
    stream.connected()
    stream.live(1)
    assert stream.follow(stream.sequence.snapshot(frames, stream.now)) == [ask(0)]
    stream.replayed(0, 1)
    assert stream.end() == [Synced(1)]
    assert stream.live(3) == [Gap(2, 2), ask(1)]


def test_batches_are_lost_if_neither_snapshot_nor_replay_is_available():
    stream = with_snapshots(replay=False)
    stream.connected()
    stream.live(4)
    assert snapshot(stream, -2) == [Lost(0, 3, LostReason.UNAVAILABLE), *stream.delivered(4)]
