"""The list of checks is the list of the text's clauses: each one that binds publishers is judged, or says why not."""

from __future__ import annotations

import re

from kvbus.tools.conform.engine.clauses import OF_READERS, UNWATCHED, WATCHED
from kvbus.tools.conform.engine.judge import EngineJudge
from kvbus.tools.conform.report import Level, Outcome
from tests.spec.test_spec import CLAUSES


def test_each_clause_of_the_text_is_judged_or_there_is_a_reason():
    lists = [list(WATCHED), list(UNWATCHED), sorted(OF_READERS)]
    named = [number for each in lists for number in each]
    assert len(set(named)) == len(named)
    assert set(named) == set(CLAUSES)
    assert all(UNWATCHED.values())


def test_a_clause_of_readers_asks_nothing_of_publishers():
    for number in OF_READERS:
        assert not re.search(r"publisher (MUST|SHOULD)", CLAUSES[number].replace("\n", " ")), number


def test_the_level_of_a_check_is_in_its_clause():
    for number, asked in WATCHED.items():
        rule = CLAUSES[number].replace("\n", " ").partition("*Why:*")[0]
        words = r"\b(MUST|takes the next|a removal speaks|MAY serve)" if asked.level is Level.MUST else r"\bSHOULD\b"
        assert re.search(words, rule, re.IGNORECASE), number


def test_nothing_seen_is_no_verdict_and_says_how_to_see_it():
    verdicts = EngineJudge().verdicts()
    assert [str(each.clause) for each in verdicts] == list(WATCHED)
    assert {each.outcome for each in verdicts} == {Outcome.NOT_SEEN}
    assert all(each.message for each in verdicts)
