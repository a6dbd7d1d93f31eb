"""Tests for two publishers on one endpoint (a conflict).

They test what counts as a restart and what as a conflict, and how long a conflict lasts.
"""

from math import inf

import pytest

from kvbus.core.sequencing.epoch import FIRST_PAUSE, MAX_EPOCHS, MAX_PAUSE, WINDOW, Conflict


def provoked(conflict, now):
    """Return how many epochs must begin at the same time before kvbus reports a conflict."""
    return next(n for n in range(1, 100) if conflict.epoch_began(now))


def test_one_epoch_more_than_the_maximum_within_the_window_is_a_conflict():
    assert provoked(conflict := Conflict(), 7.0) == MAX_EPOCHS + 1
    assert conflict.until == 7.0 + FIRST_PAUSE


def test_epochs_just_inside_the_window_are_a_conflict():
    conflict = Conflict()
    step = WINDOW / MAX_EPOCHS * 0.99
    assert [conflict.epoch_began(n * step) for n in range(MAX_EPOCHS + 1)] == [False] * MAX_EPOCHS + [True]


def test_each_pause_of_a_conflict_is_longer_up_to_a_limit():
    conflict, now, pauses = Conflict(), 0.0, []
    for _ in range(6):
        assert provoked(conflict, now) == MAX_EPOCHS + 1
        assert conflict.until < inf
        pauses.append(conflict.until - now)
        now = conflict.until
        assert conflict.ended(now)
    assert pauses == [5.0, 10.0, 20.0, 40.0, MAX_PAUSE, MAX_PAUSE]


@pytest.mark.parametrize(("quiet", "pause"), [(MAX_PAUSE, 2 * FIRST_PAUSE), (MAX_PAUSE + 1, FIRST_PAUSE)])
def test_the_pauses_are_short_again_after_a_long_time_without_conflict(quiet, pause):
    provoked(conflict := Conflict(), 0.0)
    conflict.ended(FIRST_PAUSE)
    now = FIRST_PAUSE + quiet
    provoked(conflict, now)
    assert conflict.until == now + pause


def test_a_reconnection_resets_the_epoch_counter_but_not_a_conflict():
    conflict = Conflict()
    for _ in range(MAX_EPOCHS):
        conflict.epoch_began(0.0)
    conflict.reconnected()
    assert provoked(conflict, 0.0) == MAX_EPOCHS + 1
    conflict.reconnected()
    assert conflict.until == inf
    assert not conflict.ended(1e9)
