"""Tests for the rates that ``kvbus top`` shows.

They are computed from two or more readings of the bus, and never across its restart.
"""

from __future__ import annotations

from kvbus.tools.top.moment import MAX_MOMENTS, History, batches_of, of_output, of_reason
from tests.top.moments import moment, source


def history_of(*moments) -> History:
    history = History()
    for each in moments:
        history.add(each)
    return history


def test_a_rate_in_top_needs_two_moments():
    assert history_of(moment(1.0)).rate(batches_of("engine")) == 0
    history = history_of(moment(1.0), moment(3.0))
    assert history.rate(batches_of("engine")) == 10
    assert history.rate(of_output("routers", lambda each: each.batches)) == 20
    assert history.rate(batches_of("nobody")) == 0


def test_top_smooths_a_rate_but_not_its_chart():
    history = history_of(*(moment(float(at), source("engine", batches)) for at, batches in enumerate([0, 0, 0, 50])))
    assert history.rate(batches_of("engine")) == 50 / 3
    assert history.course(batches_of("engine"), 2) == [0, 50]


def test_a_late_source_has_no_rate_before_its_second_moment():
    history = history_of(moment(1.0), moment(2.0, source("engine", 20), source("late", 500)))
    assert history.course(batches_of("late"), 9) == [0]
    assert history.rate(batches_of("late")) == 0


def test_the_history_begins_again_after_a_restart_of_the_bus():
    history = history_of(moment(1.0), moment(2.0), moment(3.0, started=2000.0))
    assert len(history.moments) == 1
    assert history.rate(batches_of("engine")) == 0


def test_a_reason_that_is_counted_for_the_first_time_has_a_rate():
    history = history_of(moment(1.0), moment(2.0, reasons={"rejected: block_size (engine)": 7.0}))
    assert history.rate(of_reason("rejected: block_size (engine)")) == 7


def test_the_history_keeps_at_most_max_moments():
    history = history_of(*(moment(float(at)) for at in range(MAX_MOMENTS + 50)))
    assert len(history.moments) == MAX_MOMENTS
