"""Tests for every router of docs/INTEROP.md in a few cases, directly at an engine and through kvbus.

``make interop`` runs all cases.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .cases import CASES, Case, play
from .expected import DIRECT, THROUGH_KVBUS, Belief
from .kinds import KINDS
from .routers import Kind

EXACT = Belief.EXACT


def test_every_router_has_expected_results_and_only_for_existing_cases() -> None:
    names = {kind.name for kind in KINDS}
    cases = {case.name for case in CASES}
    assert (DIRECT.keys(), THROUGH_KVBUS.keys()) == (names, names)
    assert {case for side in (DIRECT, THROUGH_KVBUS) for row in side.values() for case in row} <= cases


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.short], ids=lambda case: case.name)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.short], ids=lambda kind: kind.name)
async def test_a_router_has_its_expected_results_directly_and_through_kvbus(
    kind: Kind, case: Case, tmp_path: Path
) -> None:
    if lacking := kind.lacking():
        pytest.skip(lacking)
    live, direct, behind = await play(case, kind, tmp_path)
    found = f"{live} blocks; missing and dead directly: {tuple(direct)}, through kvbus: {tuple(behind)}"
    assert DIRECT[kind.name].get(case.name, EXACT).agrees(direct, live), found
    assert THROUGH_KVBUS[kind.name].get(case.name, EXACT).agrees(behind, live), found
