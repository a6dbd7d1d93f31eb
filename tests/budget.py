"""CPU seconds of each directory of tests, and a session that fails where one takes half as many again as it may.

Counted is CPU time, the tests' own and that of processes they waited for: a machine that others load makes no difference
to it. What a slower CPU makes is taken out by a fixed piece of work at the beginning. Enforced with ``TEST_BUDGETS=1``
(`.ci/run`); the budgets are in budgets.toml.
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
from typing import Final

import pytest

FILE: Final = Path(__file__).with_name("budgets.toml")

GRACE: Final = 1.5
"""Times its budget that a directory may take."""

FLOOR: Final = 3.0
"""CPU seconds that are never too many: the small change of directories with next to none."""

REFERENCE: Final = 0.15
"""CPU seconds of the fixed piece of work where the budgets were measured."""


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
    """How many times as long this CPU takes as that of the budgets; 1 for a faster one."""
    took = []
    for _ in range(3):
        begin = time.process_time()
        table: dict[int, int] = {}
        for n in range(1_000_000):
            table[n % 1000] = n
        took.append(time.process_time() - begin)
    return max(1.0, min(took) / REFERENCE)


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

    def __init__(self, budgets: Mapping[str, float], slower: float, *, enforced: bool) -> None:
        self.cpu: dict[str, float] = defaultdict(float)
        self.wall: dict[str, float] = defaultdict(float)
        self.wrong: list[str] = []
        self._budgets = budgets
        self._slower = slower
        self._enforced = enforced
        self._at = cpu_seconds()

    def pytest_collection_finish(self) -> None:
        self._at = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        begin, self._at = self._at, cpu_seconds()
        vars(report)["cpu_seconds"] = self._at - begin  # with the report it gets to the session that adds up
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = directory_of(report.nodeid)
        self.cpu[name] += getattr(report, "cpu_seconds", 0.0)  # a crashed worker's report has none
        self.wall[name] += report.duration

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._enforced or hasattr(session.config, "workerinput"):
            return
        self.wrong = over_budget(self.cpu, self._budgets, self._slower)
        if self.wrong and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._enforced:
            return
        terminalreporter.section(f"budgets of tests (this CPU: {self._slower:.2f} times as slow)")
        for name, seconds in sorted(self.cpu.items(), key=lambda pair: -pair[1]):
            budget = self._budgets.get(name, 0.0)
            terminalreporter.line(f"{name:14} {seconds:7.1f} CPU s of {budget:5g}  {self.wall[name]:7.1f} s")
        for line in self.wrong:
            terminalreporter.line(f"OVER BUDGET {line}", red=True)


def plugin() -> Budgets:
    enforced = os.environ.get("TEST_BUDGETS") == "1"
    return Budgets(tomllib.loads(FILE.read_text()), slowness() if enforced else 1.0, enforced=enforced)
