"""Tests that the relay's clock leaves out the time in which the kvbus process did not run, for example when it was
stopped.
"""

import pytest

from kvbus.daemon.runtime import LONGEST_STEP, RunningClock


class ManualClock:
    """A clock whose time the test sets."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_the_running_clock_follows_the_real_clock_if_it_is_read_often():
    hands = ManualClock()
    clock = RunningClock(hands)
    start = clock.time()
    for _ in range(100):
        hands.now += 0.1
        clock.time()
    assert clock.time() - start == pytest.approx(10.0)
    assert clock.paused == 0.0


def test_the_running_clock_advances_by_one_step_after_a_pause():
    hands = ManualClock()
    clock = RunningClock(hands)
    start = clock.time()
    hands.now += 3600.0
    assert clock.time() - start == pytest.approx(LONGEST_STEP)
    hands.now += 0.1
    assert clock.time() - start == pytest.approx(LONGEST_STEP + 0.1)
    assert clock.paused == pytest.approx(3600.0 - LONGEST_STEP)


def test_the_running_clock_reports_each_pause_once():
    hands = ManualClock()
    clock = RunningClock(hands)
    hands.now += 3.0
    hands.now += 2.0
    assert clock.stood() == pytest.approx(5.0 - LONGEST_STEP)
    hands.now += 0.1
    assert clock.stood() == 0.0
    for step in (1.0, 0.1, 7.0):
        hands.now += step
        clock.time()
    assert clock.stood() == pytest.approx(8.0 - 2 * LONGEST_STEP)


def test_the_running_clock_never_goes_back():
    hands = ManualClock()
    clock = RunningClock(hands)
    before = clock.time()
    for step in (0.0, 10.0, 0.1, 0.6, 1e6, 0.0):
        hands.now += step
        now = clock.time()
        assert now >= before
        before = now
