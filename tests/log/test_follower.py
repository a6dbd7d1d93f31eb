"""Tests for the follower of a log's stream with random histories.

They contain repeated records, fenced writers, gaps, and repeated states.
"""

import itertools
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from kvbus.parts.log.follower import LEASE, LEASE_TTL, SILENCE, Follower, Holds
from kvbus.parts.log.record import Kind, read
from kvbus.parts.outputs.appending import ASK_AGAIN
from tests.log.reading import Reading
from tests.log.records import batch, clear, gone, lease, state


def below(seconds):
    return st.integers(0, int(seconds * 1024) - 1).map(lambda ms: ms / 1024)


SPARE = LEASE_TTL - 2 * SILENCE


@given(st.lists(st.tuples(below(SILENCE), st.sampled_from([0, 0.25, 1]), below(SPARE)), min_size=2, max_size=12))
def test_a_follower_never_expires_a_live_writer_even_if_both_are_slow(appends):
    reading, answered, heard = Reading(), 0.0, 0.0
    for seq, (took, part, late) in enumerate(appends):
        heard = max(heard, answered + part * took + late)  # after the previous answer, before its own
        assert seq == 0 or not reading.follower.expire(heard)
        reading.take(lease(1, seq) if seq else clear(1, 0, 1), now=heard)
        answered += took
    assert reading.follower.holds is Holds.ALL


def test_a_writer_with_fast_answers_sends_a_lease_before_the_silence_limit():
    assert LEASE + ASK_AGAIN < SILENCE


def test_a_follower_ignores_a_given_up_epoch_and_follows_the_next_epoch():
    reading = Reading()
    reading.take(clear(1, 0, 1))
    reading.follower.give_up()
    assert reading.take(batch(1, 1, 2), clear(1, 2, 3), gone(1, 3)) == set()
    assert reading.take(clear(2, 0, 4)) == {4}
    assert dict(reading.follower.counts) == {"expired": 1, "late": 3}


def test_a_follower_reports_each_seq_that_it_reaches():
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


# -- random histories --------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A record of a history, and the blocks that a reader must hold after it.

    The blocks are None while no reader can know them: inside a state that follows a gap, until its last record.
    """

    data: bytes
    blocks: frozenset[int] | None

    @property
    def number(self):
        record = read(self.data)
        return record.epoch, record.seq


@st.composite
def histories(draw):
    """Draw the records of a log.

    Its writers append records twice, repeat or break off a state, and are fenced at any time.
    """
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
    """Append a state, or only the first part of it, to a history. Return whether the state is complete."""
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
def test_a_reader_from_any_state_has_the_blocks_of_the_engine(log, data):
    start = data.draw(st.sampled_from([at for at, each in enumerate(log) if read(each.data).kind is Kind.CLEAR]))
    _check(log, range(start, len(log)))


@given(histories(), st.data())
def test_a_reader_that_misses_records_never_reports_a_wrong_state_as_complete(log, data):
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
