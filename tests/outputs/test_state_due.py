"""Tests for the time at which kvbus appends a new state to a log.

It does so after enough bytes of batches, or if the log's retention has deleted the last state.
"""

from hypothesis import given
from hypothesis import strategies as st

from kvbus.parts.log.follower import LEASE
from kvbus.parts.outputs.appending import LEAST_TAIL, StateDue

EVERY = 1800.0
MIB = 1024 * 1024
STEPS = st.one_of(
    st.tuples(st.just("batches"), st.integers(1, 4 * MIB)),
    st.tuples(st.just("grows"), st.integers(1, 40 * MIB)),
    st.tuples(st.just("lost"), st.integers(0, 9 * MIB)),
    st.tuples(st.just("ages"), st.just(0)),
)


@given(st.lists(STEPS, min_size=20, max_size=80))
def test_states_need_no_more_bytes_than_batches_and_one_state(steps):
    due, now, size = StateDue(EVERY, 0.0), 0.0, 0
    batches = states = largest = tail = newest = 0
    due.begin(now)
    due.wrote_state(size, 1, now)
    for what, number in steps:
        if what == "batches":
            batches += number
            tail += number
            due.wrote_batches(number)
        elif what == "grows":  # the cache fills, so the next state has the stored blocks too
            size = min(200 * MIB, size + number)
            batches += number
            tail += number
            due.wrote_batches(number)
        elif what == "lost":
            due.wrote_state(size, 1, now)
            largest, tail, newest = max(largest, size), 0, size
        else:
            now += EVERY
            assert due.due(now)
            due.wrote_state(size, 1, now)
            largest, tail, newest = max(largest, size), 0, size
        while due.due(now):
            assert tail >= max(newest, LEAST_TAIL)
            due.wrote_state(size, 1, now)
            states += size
            largest, tail, newest = max(largest, size), 0, size
        assert batches + states <= 2 * batches + largest
        # A new reader reads at most this many bytes of batches after the newest state.
        assert tail < max(newest, LEAST_TAIL)


def test_a_state_is_due_when_the_batches_have_as_many_bytes():
    due = StateDue(EVERY, 0.0)
    due.begin(0.0)
    due.wrote_state(10 * MIB, 7, 0.0)
    for _ in range(3):
        due.wrote_batches(10 * MIB - 1)
        assert not due.due(1.0)
        due.wrote_batches(1)
        assert due.due(1.0)
        due.wrote_state(10 * MIB, 7, 1.0)
        assert not due.due(1.0)


def test_a_deleted_state_is_due_and_repeated_deletions_are_checked_less_often():
    due, now, pauses = StateDue(EVERY, 0.0), 0.0, []
    due.begin(now)
    assert not due.looks(now + EVERY)
    due.wrote_state(10, 7, now)
    for _ in range(12):
        before = now
        while not due.looks(now):
            now += 1.0
        due.looked(now, kept=False)
        assert (due.due(now), due.looks(now + EVERY)) == (True, False)
        due.wrote_state(10, 7, now)
        assert not due.due(now)
        pauses.append(now - before)
    assert pauses == [min(LEASE * 2**n, EVERY) for n in range(12)]
    due.looked(now, kept=True)
    assert (due.looks(now + LEASE - 0.1), due.looks(now + LEASE)) == (False, True)


SHORT = 60.0


@given(
    st.lists(st.tuples(st.integers(0, MIB), st.sampled_from([False, False, False, True])), min_size=50, max_size=200)
)
def test_the_newest_state_is_never_older_than_the_configured_interval(seconds):
    """The newest state of a stream is never older than the configured interval, whatever batches the writer appends.

    If retention has deleted the newest state, a new one comes within LEASE seconds. If retention deletes that state
    too, the next one comes within twice this time, and so on. An element of ``seconds`` has the bytes of the batches
    in that second, and whether retention deletes the newest state.
    """
    due, written, gone, losses = StateDue(SHORT, 0.0), 0.0, None, 0
    due.begin(0.0)
    due.wrote_state(10, 7, 0.0)
    for now, (size, takes) in enumerate(seconds, 1):
        due.wrote_batches(size)
        gone = float(now) if takes and gone is None else gone
        if due.looks(now):
            due.looked(now, kept=gone is None)
            losses = 0 if gone is None else losses + 1
        if due.due(now):
            due.wrote_state(10, 7, float(now))
            written, gone = float(now), None
        assert now - written < SHORT
        assert gone is None or now - gone < min(LEASE * 2**losses, SHORT)


def test_a_new_turn_checks_for_no_deleted_state_before_its_first_state():
    due = StateDue(EVERY, 0.0)
    due.begin(0.0)
    due.wrote_state(10, 7, 0.0)
    due.looked(LEASE, kept=False)
    due.begin(10.0)
    assert (due.due(10.0), due.looks(10.0 + EVERY), due.due(10.0 + EVERY)) == (False, False, True)
