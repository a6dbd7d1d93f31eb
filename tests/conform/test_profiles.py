"""kvbus keeps its own contract as an engine: its outputs are judged, and what a profile breaks is on a page."""

from __future__ import annotations

import pytest

from kvbus.conform.verdict import Outcome
from tests.conform.profiles import CAPTURE, PAGE, judged, page

SEEN = {"1.1", "3.1", "3.6", "4.1", "4.3", "4.4", "5.1", "5.2", "5.4", "6.4", "6.7", "6.12", "7.1"}
"""What has to be seen of every profile, lest the page should say nothing because nothing was tried."""


@pytest.mark.slow
async def test_the_page_says_what_each_profile_breaks():
    reports = await judged(CAPTURE)
    assert page(reports) == PAGE.read_text(), "python -m tests.conform.profiles"
    for name, report in reports.items():
        found = {str(each.clause): each for each in report.verdicts}
        unseen = {number for number in SEEN if found[number].outcome is Outcome.NOT_SEEN}
        assert not unseen, (name, unseen, found)
