"""How far back a state reaches, and when the publisher is asked for more of it."""

from itertools import pairwise
from math import inf

import pytest

from kvbus.core.sequencing.backfill import MAX_BACKOFF, NOTHING, Backfill


def pending(pause=1.0):
    backfill = Backfill(pause)
    backfill.request_finished(answered=False)
    backfill.begins(10)
    return backfill


def test_what_an_answer_left_out_is_not_asked_for_again():
    backfill = Backfill(1.0)
    backfill.request_finished(answered=True)
    backfill.begins(10)
    assert (backfill.first, backfill.pending) == (10, False)
    assert not backfill.due(1e9)


def test_what_is_older_than_the_beginning_of_an_answer_is_not_either():
    backfill = Backfill(1.0)
    backfill.request_finished(answered=False)
    backfill.answer_begins()
    backfill.begins(10)
    assert (backfill.first, backfill.pending) == (10, False)


def test_what_nobody_answered_for_is():
    assert pending().due(0.0)


def test_whether_the_last_request_was_answered():
    backfill = Backfill(1.0)
    assert not backfill.unanswered
    backfill.request_finished(answered=False)
    assert backfill.unanswered
    backfill.request_finished(answered=True)
    assert not backfill.unanswered


def test_nothing_is_missing_before_the_first_number():
    backfill = Backfill(1.0)
    backfill.request_finished(answered=False)
    backfill.begins(0)
    assert not backfill.pending


def test_once_owed_it_stays_owed_until_it_is_answered():
    backfill = pending()
    backfill.request_finished(answered=True)  # of another question
    backfill.begins(20)
    assert backfill.pending
    assert backfill.answered(3)
    assert not backfill.pending


def test_pauses_double_up_to_a_limit():
    backfill, now = pending(), 0.0
    asked: list[float] = []
    while len(asked) < 7:
        if backfill.due(now):
            asked.append(now)
        now += 0.5
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses == [1.0, 2.0, 4.0, MAX_BACKOFF, MAX_BACKOFF, MAX_BACKOFF]


@pytest.mark.parametrize(("first", "more"), [(9, True), (0, True), (10, False), (11, False), (None, False)])
def test_only_what_is_from_before_is_worth_beginning_anew(first, more):
    assert pending().answered(first) is more


def test_of_nothing_any_number_is_more():
    backfill = Backfill(1.0)
    backfill.nothing_known()
    assert backfill.pending
    assert backfill.answered(NOTHING - 1)


def test_partial_is_what_is_missing_of_the_cache():
    backfill = Backfill(1.0)
    assert not backfill.partial
    backfill.begins(10)
    assert backfill.partial
    backfill.emptied()
    assert (backfill.partial, backfill.first) == (False, 10)
    backfill.begins(20)
    assert backfill.partial, "a loss after the cache was emptied"
    backfill.nothing_sent()
    assert not backfill.partial


def test_where_nobody_can_be_asked_nothing_is_pending():
    backfill = Backfill(1.0)
    backfill.nothing_known(pending=False)
    assert (backfill.partial, backfill.pending) == (True, False)


def test_that_the_cache_was_emptied_survives_a_restart():
    backfill, again = pending(), Backfill(1.0)
    backfill.emptied()
    again.load(backfill.dump())
    assert (again.partial, again.first, again.pending) == (False, 10, True)


def test_it_survives_a_restart():
    backfill, again = pending(), Backfill(1.0)
    again.load(backfill.dump())
    assert (again.first, again.pending) == (10, True)
    assert again.due(0.0)


def test_when_it_is_due():
    backfill = Backfill(10.0)
    assert backfill.next_due == inf
    backfill.nothing_known()
    assert backfill.due(100.0)
    assert backfill.next_due == 110.0
