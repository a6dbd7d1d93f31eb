"""Tests that run a short fault campaign with real processes. `make chaos` runs a long campaign."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable

import pytest
import uvloop
from rich.console import Console

from tests.chaos import checks, engines
from tests.chaos.campaign import Campaign, Wanted
from tests.chaos.plan import SHAPES
from tests.chaos.tally import Tally
from tests.long import LONG

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


def play(wanted: Wanted) -> tuple[Tally, str]:
    said = io.StringIO()
    campaign = Campaign(wanted, Console(file=said, width=120))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(campaign.run())
    campaign.summary()
    return campaign.tally, said.getvalue()


@pytest.mark.timeout(400)
def test_a_short_fault_campaign_has_no_failure() -> None:
    """Run several cells (an engine, kvbus and routers each) in parallel, and cause faults in them.

    One cell has two ranks, and another one has a kvbus that is never killed. In a long test run (``TEST_LONG=1``),
    a third cell has an engine that connects to kvbus.
    """
    faults, cells, rounds = (40, (0, 1, 2), 2) if LONG else (15, (0, 1), 1)
    tally, said = play(Wanted(seed=1, faults=faults, seconds=300, cells=cells, generation=0, rounds=rounds))
    assert tally.failures == [], said
    assert tally.rounds >= len(cells), said
    assert tally.total >= faults, said
    assert tally.checks["exact view"] >= 3 * len(cells)
    assert tally.blocks > 1000
    assert "faults (seed 1)" in said


@pytest.mark.skipif(not LONG, reason="a second campaign: make test-all has it")
@pytest.mark.timeout(400)
def test_a_fault_campaign_reports_a_wrong_view_of_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign reports that a router's view is wrong.

    The campaign compares the router's view with a record of the engine's blocks. To make them differ, the test adds to
    this record a block that does not exist.
    """
    honest: Callable[..., engines.Truth] = engines.truth_of

    def lying(blocks: list[dict[str, object]]) -> engines.Truth:
        truth = honest(blocks)
        truth.keys.add(("None", "GPU", "1"))
        return truth

    monkeypatch.setattr(engines, "truth_of", lying)
    monkeypatch.setattr(checks, "SETTLE", 0.5)
    steady = next(number for number, shape in enumerate(SHAPES) if not shape.kills_bus)
    tally, said = play(Wanted(seed=1, seconds=300, cells=(steady,), generation=0, rounds=1))
    assert len(tally.failures) == 1, said
    assert "1 of" in tally.failures[0]
    assert "missing" in tally.failures[0]
    assert f"make chaos SEED=1 CELL={steady} GENERATION=0 ROUNDS=1" in tally.failures[0]
