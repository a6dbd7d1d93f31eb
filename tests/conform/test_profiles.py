"""Tests that kvbus's outputs keep the specification for publishers, and that a page names what each profile breaks."""

from __future__ import annotations

import pytest

from kvbus.tools.conform.report import Outcome, Report
from tests.conform.profiles import CAPTURE, PAGE, judged, page

SEEN = {"1.1", "3.1", "3.6", "4.1", "4.3", "4.4", "5.1", "5.2", "5.4", "6.4", "6.7", "6.12", "7.1"}
"""Clauses that the run must have observed for every profile.

Without them, a page without defects would prove nothing.
"""


@pytest.mark.slow
async def test_the_page_lists_the_clauses_that_each_profile_breaks():
    reports = await judged(CAPTURE)
    # A process without CPU during a silence may observe no heartbeat. A longer watch has more silences.
    if unseen_clauses(reports):
        reports = await judged(CAPTURE, seconds=30)
    assert page(reports) == PAGE.read_text(), "python -m tests.conform.profiles"
    assert not unseen_clauses(reports)


def unseen_clauses(reports: dict[str, Report]) -> list[tuple[str, str]]:
    """Return the clauses of ``SEEN`` that the run did not observe, each with the profile for which it is missing.

    ``SEEN`` has the clauses that the run must observe for every profile.
    """
    return [
        (name, str(each.clause))
        for name, report in reports.items()
        for each in report.verdicts
        if str(each.clause) in SEEN and each.outcome is Outcome.NOT_SEEN
    ]
