"""Tests for how the tests' CPU seconds are limited, and for the tiers (such as fast) to which tests belong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.budget import FLOOR, budgets, over_budget

pytest_plugins = ["pytester"]

TESTS = Path(__file__).parent
CONFTEST = """
from tests import budget

def pytest_configure(config):
    budget.FLOOR = 0.1
    config.pluginmanager.register(budget.Budgets({{"quick": {budget}}}))
"""
BUSY = """
import time

def test_busy():
    begin = time.process_time()
    while time.process_time() < begin + 0.3:
        pass
"""


def test_a_directory_over_its_budget_is_named():
    assert over_budget({"core": 25.0, "wire": FLOOR}, {"core": 10.0, "wire": 0.1}) == []
    assert over_budget({"core": 26.0}, {"core": 10.0}) == ["core: 26 CPU seconds, budget 10"]
    assert over_budget({"new": 0.1}, {}) == ["new: no budget in budgets.toml"]


def test_every_directory_of_tests_has_one_tier_and_one_budget():
    with_tests = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert budgets().keys() == with_tests
    assert len(budgets()) == sum(len(budgets(tier)) for tier in ("fast", "all", "foreign"))


@pytest.mark.parametrize(("budget", "code"), [(0.05, 1), (10, 0)], ids=["too much", "enough"])
def test_a_session_fails_where_a_directory_is_over_its_budget(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, budget: float, code: int
):
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeconftest(CONFTEST.format(budget=budget))
    tests = pytester.mkdir("tests") / "quick"
    tests.mkdir()
    (tests / "test_busy.py").write_text(BUSY)
    done = pytester.runpytest_subprocess("-n1", f"--rootdir={pytester.path}")
    assert done.ret == code, done.outlines
    assert any("OVER BUDGET quick" in line for line in done.outlines) is bool(code)
