"""Tests that the real publishers of vLLM and SGLang still have the verdicts of docs/spec/results and of the matrix."""

from __future__ import annotations

import pytest

from kvbus.tools.conform.report import Outcome
from tests.conform import results
from tests.conform.judged import CAPTURES, home_of, judged, lacking

ALWAYS = {"4.1", "4.2", "4.3", "5.1", "6.2", "6.4", "7.1"}
"""Clauses that each run observes, even on a busy machine."""


@pytest.mark.parametrize("engine", CAPTURES)
async def test_a_real_publisher_has_the_verdicts_in_its_results_file(engine: str) -> None:
    if home_of(engine) is None:
        pytest.skip(lacking(engine))
    filed = results.load("engines")[engine]
    seen = {str(each.clause): each for each in (await judged(engine)).verdicts if each.outcome is not Outcome.NOT_SEEN}
    found = {clause: (str(each.outcome), str(each.level), each.message) for clause, each in seen.items()}
    assert seen.keys() >= ALWAYS
    for clause, (outcome, level, message) in found.items():
        said = filed.of_clause(clause)
        if said["outcome"] != "not seen":
            assert (outcome, level) == (said["outcome"], said["level"]), (clause, message)
        else:
            assert outcome == "kept", (clause, message)
