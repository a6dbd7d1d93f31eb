"""Tests that play some of the cases to real routers, and compare each outcome with the stored one in
docs/spec/results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from kvbus.tools.conform.report import Outcome, Report
from kvbus.tools.conform.router.adapters import BLOCK_SIZE
from kvbus.tools.conform.router.play import chosen, judge
from tests.conform.results import load
from tests.interop import kinds

from .routers import cases_for, kind_named, player_of, slug

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]

TRIED: Final = {
    "Dynamo 1.6.1, indexer": ("children-stay", "small-hashes", "two-ranks-clear", "restart-connected"),
    "llm-d-kv-cache": ("children-stay", "small-hashes", "two-ranks-clear", "restart-connected"),
    "AIBrix": ("maps", "clear", "two-ranks"),
}


@pytest.mark.parametrize("name", TRIED)
async def test_a_real_router_has_the_verdicts_in_its_results_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = kind_named(name)
    if lacking := kind.lacking():
        pytest.skip(lacking)
    monkeypatch.setattr(kinds, "BLOCK_SIZE", BLOCK_SIZE)
    report = Report("router", name)
    await judge(player_of(kind, tmp_path, 3.0), cases_for(kind, chosen(TRIED[name])), report, str)
    filed = load("routers")[slug(kind)]
    assert len({each.case for each in report.verdicts}) == len(TRIED[name]) + 1
    for each in report.verdicts:
        said = filed.of_case(each.case)
        assert said is not None
        assert (str(each.outcome), dict(each.counts)) == (said["outcome"], said["counts"]), each.case
        assert each.outcome is not Outcome.NOT_SEEN
