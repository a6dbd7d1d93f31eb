"""Real routers at some of the cases: what comes of each is its cell in docs/spec/matrix.md."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import pytest

from kvbus.conform.report import Report
from kvbus.conform.router.adapters import BLOCK_SIZE
from kvbus.conform.router.judge import chosen, judge
from kvbus.conform.router.play import Player, Settings
from kvbus.conform.verdict import Outcome
from tests.interop import kinds
from tests.spec.vectors import DIRECTORY

from .routers import OfKind, kind_named

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]

MATRIX: Final = (DIRECTORY.parent / "matrix.md").read_text().partition("## The cases at real routers")[2]
COLUMNS: Final = {"Dynamo 1.6.1, indexer": 1, "llm-d-kv-cache": 4}
TRIED: Final = ("children-stay", "small-hashes", "two-ranks-clear", "restart-connected")


def cell(case: str, column: int) -> tuple[int, int]:
    row = re.search(rf"^\| `{case}` \|(.*)\|$", MATRIX, re.MULTILINE)
    numbers = re.findall(r"\d+", row[1].split("|")[column]) if row else []
    return (int(numbers[0]), int(numbers[1])) if numbers else (0, 0)


@pytest.mark.parametrize("name", COLUMNS)
async def test_a_router_is_as_the_matrix_has_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kind_named(name)
    if lacking := kind.lacking():
        pytest.skip(lacking)
    monkeypatch.setattr(kinds, "BLOCK_SIZE", BLOCK_SIZE)
    report = Report("router", name)
    await judge(Player(OfKind(kind, tmp_path), Settings(topic=kind.topic, settle=3.0)), chosen(TRIED), report, str)
    found = {each.case: (each.counts.get("missing", 0), each.counts.get("dead", 0)) for each in report.verdicts}
    assert found == {"stores": (0, 0)} | {case: cell(case, COLUMNS[name]) for case in TRIED}
    assert Outcome.NOT_SEEN not in {each.outcome for each in report.verdicts}
