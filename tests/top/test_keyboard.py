"""Tests for the effect of each key on the display of ``kvbus top``."""

from __future__ import annotations

import pytest

from kvbus.tools.top.run import pressed
from kvbus.tools.top.view import SORTS, Choice
from tests.typed import there


def choice_after(choice: Choice, keys: str) -> Choice:
    for key in keys:
        choice = there(pressed(choice, key))
    return choice


def test_the_key_q_quits_unless_a_filter_is_typed():
    assert pressed(Choice(), "q") is None
    assert choice_after(Choice(), "/q").wanted == "q"


def test_the_key_s_cycles_through_every_sort_order():
    orders = [choice_after(Choice(), "s" * times).sort for times in range(len(SORTS) + 1)]
    assert orders == [*SORTS, SORTS[0]]


@pytest.mark.parametrize(
    ("keys", "wanted", "typing"),
    [
        ("/eng", "eng", True),
        ("/eng\n", "eng", False),
        ("/enx\x7fg\r", "eng", False),
        ("/eng\x1b", "", False),
        ("/eng\n\x1b", "", False),
        ("/a\x00b\n", "ab", False),
        ("/" + "x" * 1000 + "\n", "x" * 60, False),
        ("xy", "", False),
    ],
)
def test_a_filter_is_typed_accepted_and_cancelled(keys, wanted, typing):
    choice = choice_after(Choice(), keys)
    assert (choice.wanted, choice.typing) == (wanted, typing)


def test_a_table_scrolls_no_further_than_its_last_row():
    choice = Choice()
    for key, first in (("k", 0), ("j", 1), ("\x06", 11), ("\x06", 19), ("j", 19), ("\x02", 9), ("k", 8)):
        choice = there(pressed(choice, key, last=19))
        assert choice.first == first


def test_a_question_mark_opens_the_help_and_any_key_closes_it():
    assert choice_after(Choice(), "?").help
    assert not choice_after(Choice(), "?x").help
    assert pressed(choice_after(Choice(), "?"), "q") is None
    assert choice_after(Choice(), "/?").wanted == "?"


def test_the_keys_p_and_space_pause_and_resume():
    assert choice_after(Choice(), "p").paused
    assert not choice_after(Choice(), "p ").paused
