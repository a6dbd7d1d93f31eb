"""Measure the CPU seconds that the tests of each directory take, and compare them with the limits in budgets.toml.

The CPU seconds include those of processes that the tests started and waited for. ``TEST_BUDGETS=1`` (`.ci/run`) prints
the table, and fails the session if a directory takes more than :data:`GRACE` times its budget.
"""

from __future__ import annotations

import contextlib
import os
import resource
import tomllib
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

FILE: Final = Path(__file__).with_name("budgets.toml")

GRACE: Final = 2.5
"""Factor by which a directory's tests may exceed their budget: on a busy machine they need twice the CPU seconds."""

FLOOR: Final = 5.0
"""CPU seconds that the tests of a directory may always take, whatever its budget."""

_of_servers: list[float] = []
"""The CPU seconds of each server (such as Kafka) that several tests shared. They count for no directory of tests."""


def budgets(*tiers: str) -> dict[str, float]:
    """Return the budget in CPU seconds of each directory of tests, by default of all tiers."""
    return {
        name: seconds for tier, each in _read().items() if tier in tiers or not tiers for name, seconds in each.items()
    }


def _read() -> dict[str, dict[str, float]]:
    return tomllib.loads(FILE.read_text())


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended child processes, except those of servers that several
    tests shared.
    """
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) - sum(_of_servers)


@contextlib.contextmanager
def ends_servers() -> Iterator[None]:
    """Do not count the CPU seconds of a server that several tests shared, and that ends in this ``with`` block.

    Otherwise all CPU seconds of the server would count for the last of these tests.
    """
    begin = cpu_seconds()
    try:
        yield
    finally:
        _of_servers.append(cpu_seconds() - begin)


def over_budget(taken: Mapping[str, float], allowed: Mapping[str, float]) -> list[str]:
    """Return a message for each directory whose tests take too many CPU seconds, or that has no budget."""
    wrong = []
    for name, seconds in sorted(taken.items()):
        if name not in allowed:
            wrong.append(f"{name}: no budget in budgets.toml")
        elif seconds > max(allowed[name] * GRACE, FLOOR):
            wrong.append(f"{name}: {seconds:.0f} CPU seconds, budget {allowed[name]:g}")
    return wrong


class Budgets:
    """The pytest plugin that compares the CPU seconds of the tests with their budgets.

    Each worker process measures its tests. The main session prints the sums, and fails if one of them exceeds its
    budget.
    """

    def __init__(self, allowed: Mapping[str, float]) -> None:
        self.cpu: dict[str, float] = defaultdict(float)
        self.tests: dict[str, float] = defaultdict(float)
        self._allowed = allowed
        self._before = cpu_seconds()

    def pytest_collection_finish(self) -> None:
        self._before = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = cpu_seconds()
        # pytest-xdist sends the attribute to the main session with the report.
        vars(report)["cpu_seconds"] = now - self._before
        self._before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        taken = getattr(report, "cpu_seconds", 0.0)  # the report of a crashed worker lacks it
        self.cpu[report.nodeid.partition("::")[0].split("/")[1]] += taken
        self.tests[report.nodeid] += taken

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_worker = hasattr(session.config, "workerinput")
        if not is_worker and session.exitstatus == pytest.ExitCode.OK and over_budget(self.cpu, self._allowed):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("CPU seconds of tests, and their budgets")
        for name, seconds in sorted(self.cpu.items(), key=lambda pair: -pair[1]):
            terminalreporter.line(f"{name:18} {seconds:7.1f} {self._allowed.get(name, 0):5g}")
        for nodeid, seconds in sorted(self.tests.items(), key=lambda pair: -pair[1])[:20]:
            terminalreporter.line(f"{seconds:7.1f} {nodeid}")
        for line in over_budget(self.cpu, self._allowed):
            terminalreporter.line(f"OVER BUDGET {line}", red=True)


def register(config: pytest.Config) -> None:
    """Measure the CPU seconds of the test session if ``TEST_BUDGETS=1``."""
    if os.environ.get("TEST_BUDGETS") == "1":
        config.pluginmanager.register(Budgets(budgets()), "budgets")
