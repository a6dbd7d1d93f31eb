"""A follower against a log's random history: doubles, fenced writers, holes, refreshed states."""

import itertools
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from kvbus.parts.log.follower import LEASE, LEASE_TTL, SILENCE, Follower, Holds
from kvbus.parts.log.record import Kind, read
from kvbus.parts.outputs.appending import ASK_AGAIN
from tests.log.reading import Reading
from tests.log.records import batch, clear, gone, lease, record, state


def test_a_state_and_the_batches_behind_it():
    reading = Reading()
    assert reading.take(clear(1, 0, 1, more=True)) == {1}
    assert reading.follower.holds is Holds.PART
    assert reading.take(state(1, 1, 2, more=True), state(1, 2, 3)) == {1, 2, 3}
    assert reading.follower.holds is Holds.ALL
    assert reading.take(batch(1, 3, 4), lease(1, 4)) == {1, 2, 3, 4}
    assert not reading.follower.counts


def test_a_lower_epoch_counts_after_a_silence():
    reading = Reading()
    assert reading.take(clear(7, 0, 1), batch(7, 1, 2)) == {1, 2}
    assert reading.take(clear(1, 0, 9), now=LEASE_TTL - 0.1) == {1, 2}
    assert reading.take(batch(1, 1, 8), now=LEASE_TTL) == set()
    assert reading.take(clear(1, 2, 3), batch(1, 3, 4), now=LEASE_TTL) == {3, 4}
    assert reading.follower.counts == {"old_epoch": 1, "expired": 1, "clock_set_back": 1, "unusable": 1}


def test_who_begins_in_the_middle_waits_for_a_state_and_has_lost_nothing():
    reading = Reading()
    assert reading.take(batch(3, 70, 1), lease(3, 71), batch(3, 72, 2)) == set()
    assert dict(reading.follower.counts) == {"unusable": 2}
    assert reading.take(clear(3, 73, 2)) == {2}


def test_a_batch_inside_a_state_is_a_defect_of_the_writer_and_is_not_believed():
    reading = Reading()
    assert reading.take(clear(1, 0, 1, more=True), batch(1, 1, 2), state(1, 2, 3)) == set()
    assert reading.follower.counts["unusable"] == 2


def test_the_end_of_a_stream_clears_it_and_another_writer_may_begin_it_again():
    reading = Reading()
    assert reading.take(clear(1, 0, 1), gone(1, 1)) == set()
    assert not reading.follower.expire(10 * LEASE_TTL)
    assert reading.take(clear(2, 0, 3)) == {3}


def test_a_writer_that_is_silent_for_too_long_is_void_and_counts_again_with_a_state():
    reading = Reading()
    reading.take(clear(1, 0, 1), now=100.0)
    reading.take(lease(1, 1), now=110.0)
    assert not reading.follower.expire(110.0 + LEASE_TTL - 0.1)
    assert reading.follower.expire(110.0 + LEASE_TTL)
    assert not reading.follower.expire(200.0)
    assert reading.take(batch(1, 2, 2), now=201.0) == set()
    assert reading.follower.stranded
    assert reading.take(clear(1, 3, 1, 2), now=202.0) == {1, 2}
    assert reading.follower.counts["expired"] == 1


def below(seconds):
    return st.integers(0, int(seconds * 1024) - 1).map(lambda ms: ms / 1024)


SPARE = LEASE_TTL - 2 * SILENCE


@given(st.lists(st.tuples(below(SILENCE), st.sampled_from([0, 0.25, 1]), below(SPARE)), min_size=2, max_size=12))
def test_a_live_writer_is_never_void_however_slow_it_and_its_reader_are(appends):
    reading, answered, heard = Reading(), 0.0, 0.0
    for seq, (took, part, late) in enumerate(appends):
        heard = max(heard, answered + part * took + late)  # it is in the log between the answer before and its own
        assert seq == 0 or not reading.follower.expire(heard)
        reading.take(lease(1, seq) if seq else clear(1, 0, 1), now=heard)
        answered += took
    assert reading.follower.holds is Holds.ALL


def test_a_writer_that_is_answered_at_once_is_not_silent():
    assert LEASE + ASK_AGAIN < SILENCE


def test_an_epoch_that_was_given_up_never_goes_on_and_the_next_one_does():
    reading = Reading()
    reading.take(clear(1, 0, 1))
    reading.follower.give_up()
    assert reading.take(batch(1, 1, 2), clear(1, 2, 3), gone(1, 3)) == set()
    assert reading.take(clear(2, 0, 4)) == {4}
    assert dict(reading.follower.counts) == {"expired": 1, "late": 3}


def test_each_seq_that_a_reader_can_stand_at_is_named():
    follower = Follower()
    log = (batch(1, 3, 1), lease(1, 4), clear(1, 5, 1), lease(1, 6), clear(1, 7, more=True), state(1, 8, 1), gone(1, 9))
    steps = [follower.follow(each, 0.0) for each in log]
    assert [step and (step.record.seq, step.known) for step in steps] == [
        None,
        None,
        (5, False),
        (6, True),
        (7, True),
        (8, True),
        (9, False),
    ]


def test_what_is_no_record_is_counted():
    reading = Reading()
    reading.take(clear(1, 0, 1), b"\xc1", record(Kind.BATCH, 1, 1)[:-1], batch(1, 1, 2))
    assert (reading.blocks, reading.follower.counts["malformed"]) == ({1, 2}, 2)


def damaged(data):
    return bytes([data[0] ^ 1]) + data[1:]


def test_a_damaged_record_is_refused_and_counted_and_nothing_counts_behind_it_before_the_next_state():
    reading = Reading()
    assert reading.take(clear(1, 0, 1, 2, more=True), damaged(state(1, 1, 3, more=True)), state(1, 2, 4)) == set()
    assert reading.take(batch(1, 3, 5)) == set()
    assert reading.take(clear(1, 4, 6), damaged(batch(1, 5, 7))) == {6}
    assert reading.take(lease(1, 6)) == set()
    assert reading.follower.stranded
    assert reading.take(clear(1, 7, 6, 7), batch(1, 8, 9)) == {6, 7, 9}
    assert dict(reading.follower.counts) == {"damaged": 2, "lost": 2, "unusable": 2}


# -- random histories --------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A record of a history, and what is true behind it; None within a state that everybody has to read."""

    data: bytes
    blocks: frozenset[int] | None

    @property
    def number(self):
        record = read(self.data)
        return record.epoch, record.seq


@st.composite
def histories(draw):
    """A log as writers leave it: they are fenced at any record, refresh their state, break one off, and append twice."""
    log: list[Written] = []
    blocks = set(draw(st.sets(st.integers(1, 9), max_size=5)))
    names = itertools.count(10)
    for epoch in range(1, draw(st.integers(1, 3)) + 1):
        turn: list[Written] = []
        known = False
        for _ in range(draw(st.integers(1, 6))):
            what = draw(st.sampled_from(["batch", "state", "spill"])) if known else "state"
            if what == "batch":
                blocks.add(block := next(names))
                turn.append(Written(batch(epoch, len(turn), block), frozenset(blocks)))
            elif what == "spill":
                blocks.add(next(names))
                known = False
            else:
                known = _state(draw, turn, epoch, blocks, known=known)
                if not known:
                    blocks.add(next(names))
        log += turn[: draw(st.integers(1, len(turn)))]
        again = draw(st.integers(0, min(3, len(log))))
        log += log[len(log) - again :]
    return log


def _state(draw, turn, epoch, blocks, *, known):
    """Write a state, or its beginning; whether it is whole."""
    pieces = [sorted(blocks)[at : at + 2] for at in range(0, len(blocks), 2)] or [[]]
    count = draw(st.integers(1, len(pieces)))
    for at, piece in enumerate(pieces[:count]):
        seq, more = len(turn), at + 1 < len(pieces)
        data = state(epoch, seq, *piece, more=more)
        if not at:
            data = clear(epoch, seq, *piece, more=more, resync=not known)
        turn.append(Written(data, frozenset(blocks) if known or not more else None))
    return count == len(pieces)


@given(histories(), st.data())
def test_whoever_begins_at_any_state_holds_what_is_true(log, data):
    start = data.draw(st.sampled_from([at for at, each in enumerate(log) if read(each.data).kind is Kind.CLEAR]))
    _check(log, range(start, len(log)))


@given(histories(), st.data())
def test_whoever_misses_records_never_takes_a_wrong_set_for_a_whole_one(log, data):
    _check(log, data.draw(st.lists(st.sampled_from(range(len(log))), unique=True).map(sorted)))


def _check(log, read_ones):
    reading = Reading()
    true = {each.number: each.blocks for each in log}
    for at in read_ones:
        reading.take(log[at].data)
        follower = reading.follower
        blocks = true.get((follower.epoch, follower.seq - 1))
        if follower.holds is Holds.ALL and blocks is not None:
            assert reading.blocks == blocks, at
    assert reading.view.violations == []
