"""Tests that the conformance kit judges each clause that binds publishers, or has a reason why it does not."""

from __future__ import annotations

import re

from kvbus.tools.conform.engine.clauses import WATCHED
from kvbus.tools.conform.engine.judge import EngineJudge
from kvbus.tools.conform.report import Level, Outcome
from tests.spec.test_spec import CLAUSES

UNWATCHED = {
    "6.10": "a publisher may store and remove a hash in one batch: nothing to break; readers owe the order",
    "13.2": "what a new field means shows in no frame",
    "14.2": "a publisher may leave tokens out: nothing to break",
    "14.3": "logs and metrics of an engine cannot be seen from its sockets",
}
"""Clauses of the specification that bind publishers but are not judged, with the reason."""

OF_READERS = {"2.4", "3.2", "3.4", "3.5", "3.7", "4.5", "4.7", "6.13", "10.2", "11.4", "12.2", "13.1"}
"""Clauses of the specification that bind only readers."""


def test_each_clause_is_judged_or_for_readers_or_has_a_reason():
    lists = [list(WATCHED), list(UNWATCHED), sorted(OF_READERS)]
    named = [number for each in lists for number in each]
    assert len(set(named)) == len(named)
    assert set(named) == set(CLAUSES)


def test_a_clause_for_readers_does_not_bind_publishers():
    for number in OF_READERS:
        assert not re.search(r"publisher (MUST|SHOULD)", CLAUSES[number].replace("\n", " ")), number


def test_each_clause_contains_the_level_of_its_check():
    for number, asked in WATCHED.items():
        rule = CLAUSES[number].replace("\n", " ").partition("*Why:*")[0]
        words = r"\b(MUST|takes the next|a removal speaks|MAY serve)" if asked.level is Level.MUST else r"\bSHOULD\b"
        assert re.search(words, rule, re.IGNORECASE), number


def test_a_judge_without_a_batch_reports_each_clause_as_not_seen():
    verdicts = EngineJudge().verdicts()
    assert [str(each.clause) for each in verdicts] == list(WATCHED)
    assert {each.outcome for each in verdicts} == {Outcome.NOT_SEEN}
    assert all(each.message for each in verdicts)
