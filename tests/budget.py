"""CPU seconds of each directory of tests, and a session that fails where one takes half as many again as it may.

Counted is CPU time, the tests' own and that of processes they waited for. What a slower CPU makes is taken out: a fixed
piece of work is timed again and again between the tests, since a virtual core is as fast as its neighbours let it be, and
not the same at the beginning and ten minutes later. Enforced with ``TEST_BUDGETS=1`` (`.ci/run`); the budgets are in
budgets.toml.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
import tomllib
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Final

import pytest

FILE: Final = Path(__file__).with_name("budgets.toml")

GRACE: Final = 1.5
"""Times its budget that a directory may take."""

FLOOR: Final = 3.0
"""CPU seconds that are never too many: the small change of directories with next to none."""

REFERENCE: Final = 0.004
"""CPU seconds of the fixed piece of work where the budgets were measured, with nothing beside it."""

DEAREST: Final = 20
"""Tests that are named at the end."""

EVERY: Final = 3.0
"""CPU seconds of tests between two times that the piece of work is done."""

_of_no_test: list[float] = []
"""CPU seconds of servers that lived as long as the session."""


def cpu_seconds() -> float:
    """Of this process and of those it has waited for, but for servers that were several tests' own."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) - sum(_of_no_test)


@contextlib.contextmanager
def ends_servers() -> Iterator[None]:
    """Servers of the whole session end here: what they used is not charged to the test that happens to be the last."""
    begin = cpu_seconds()
    try:
        yield
    finally:
        _of_no_test.append(cpu_seconds() - begin)


def slowness() -> float:
    """How many times as long this CPU takes right now as that of the budgets; 1 for a faster one."""
    begin = time.process_time()
    table: dict[int, int] = {}
    for n in range(100_000):
        table[n % 1000] = n
    return max(1.0, (time.process_time() - begin) / REFERENCE)


def directory_of(nodeid: str) -> str:
    """The directory under tests; its own name for a module right in it."""
    return nodeid.partition("::")[0].split("/")[1]


def over_budget(taken: Mapping[str, float], budgets: Mapping[str, float], slower: float = 1.0) -> list[str]:
    """A line for each directory that has no budget or takes too much more than it."""
    wrong = []
    for name, seconds in sorted(taken.items()):
        if name not in budgets:
            if seconds > FLOOR * slower:
                wrong.append(f"{name}: {seconds:.0f} CPU seconds and no budget")
        elif seconds > (limit := max(budgets[name] * GRACE, FLOOR) * slower):
            wrong.append(f"{name}: {seconds:.0f} CPU seconds of {budgets[name]:g}, at most {limit:.0f} here")
    return wrong


class Budgets:
    """The pytest plugin: workers measure, the session that prints adds up."""

    def __init__(self, budgets: Mapping[str, float], *, enforced: bool) -> None:
        self.cpu: dict[str, float] = defaultdict(float)
        self.wall: dict[str, float] = defaultdict(float)
        self.tests: dict[str, float] = defaultdict(float)
        self.slower: list[float] = []
        self.wrong: list[str] = []
        self._budgets = budgets
        self._enforced = enforced
        self._at = cpu_seconds()
        self._since = EVERY  # CPU seconds since the piece of work was last done

    def pytest_collection_finish(self) -> None:
        self._at = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        taken = cpu_seconds() - self._at
        self._since += taken
        vars(report)["cpu_seconds"] = taken  # with the report it gets to the session that adds up
        if self._enforced and self._since >= EVERY:
            self._since = 0.0
            vars(report)["slowness"] = slowness()
        self._at = cpu_seconds()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = directory_of(report.nodeid)
        taken = getattr(report, "cpu_seconds", 0.0)  # a crashed worker's report has none
        self.cpu[name] += taken
        self.tests[report.nodeid] += taken
        self.wall[name] += report.duration
        if (slower := getattr(report, "slowness", None)) is not None:
            self.slower.append(slower)

    @property
    def slowness(self) -> float:
        """Of the whole session, a mean: a stretch in which everything was slow has its part of it."""
        return fmean(self.slower) if self.slower else 1.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._enforced or hasattr(session.config, "workerinput"):
            return
        self.wrong = over_budget(self.cpu, self._budgets, self.slowness)
        if self.wrong and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._enforced:
            return
        slower = f"this CPU: {self.slowness:.2f} times as slow, in {len(self.slower)} looks"
        terminalreporter.section(f"budgets of tests ({slower})")
        for name, seconds in sorted(self.cpu.items(), key=lambda pair: -pair[1]):
            budget = self._budgets.get(name, 0.0)
            terminalreporter.line(f"{name:14} {seconds:7.1f} CPU s of {budget:5g}  {self.wall[name]:7.1f} s")
        for nodeid, seconds in sorted(self.tests.items(), key=lambda pair: -pair[1])[:DEAREST]:
            terminalreporter.line(f"{seconds:7.1f} CPU s of {nodeid}")
        for line in self.wrong:
            terminalreporter.line(f"OVER BUDGET {line}", red=True)


def plugin() -> Budgets:
    return Budgets(tomllib.loads(FILE.read_text()), enforced=os.environ.get("TEST_BUDGETS") == "1")
