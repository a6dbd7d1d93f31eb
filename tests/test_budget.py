"""The budgets of tests: what is added up, what is too much, and that a session fails of it."""

from __future__ import annotations

import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.budget import FILE, FLOOR, cpu_seconds, directory_of, ends_servers, over_budget, slowness
from tests.log.server import Server
from tests.long import LONG
from tests.ports import free_port

pytest_plugins = ["pytester"]

CONFTEST = """
from tests import budget

def pytest_configure(config):
    budget.FLOOR = 0.1
    budget.slowness = lambda: {slower}
    config.pluginmanager.register(budget.Budgets({{"quick": {budget}}}, enforced={enforced}))
"""
BUSY = """
import time

def test_busy():
    begin = time.process_time()
    while time.process_time() < begin + 0.3:
        pass
"""


def test_a_directory_may_take_half_as_much_again() -> None:
    assert over_budget({"core": 15.0}, {"core": 10.0}) == []
    (line,) = over_budget({"core": 15.1}, {"core": 10.0})
    assert line.startswith("core: 15 CPU seconds of 10")


def test_a_slower_machine_may_take_longer() -> None:
    assert over_budget({"core": 29.0}, {"core": 10.0}, 2.0) == []
    assert over_budget({"core": 31.0}, {"core": 10.0}, 2.0)


def test_next_to_nothing_is_never_too_much() -> None:
    assert over_budget({"core": FLOOR, "new": FLOOR}, {"core": 0.1}) == []
    assert over_budget({"new": FLOOR + 1}, {}) == ["new: 4 CPU seconds and no budget"]


def test_what_is_measured() -> None:
    assert directory_of("tests/core/wire/test_codec.py::test_x[a/b]") == "core"
    assert directory_of("tests/test_budget.py::test_x") == "test_budget.py"
    begin = cpu_seconds()
    assert slowness() >= 1.0
    assert cpu_seconds() > begin


def test_what_servers_of_the_session_used_is_no_test_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    apart: list[float] = []
    monkeypatch.setattr("tests.budget._of_no_test", apart)
    begin = cpu_seconds()
    end = time.process_time() + 0.2
    with ends_servers():
        while time.process_time() < end:
            pass
    assert sum(apart) >= 0.15
    assert cpu_seconds() - begin < 0.1


SERVER = """
import socket, sys, time
while time.process_time() < 0.5:
    pass
here = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    here.accept()
"""


def test_a_test_that_ends_a_server_of_the_session_is_not_charged_for_the_tests_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tests.budget._of_no_test", [])
    charged = {}
    for of_session in (False, True):
        port = free_port()
        server = Server(tmp_path, port, [sys.executable, "-c", SERVER, str(port)])
        server.of_session = of_session
        server.start()
        begin = cpu_seconds()
        server.kill()
        charged[of_session] = cpu_seconds() - begin
    assert charged[False] >= 0.4
    assert charged[True] < 0.1


def test_every_directory_of_tests_has_a_budget() -> None:
    budgets = tomllib.loads(FILE.read_text())
    with_tests = {path.relative_to(FILE.parent).parts[0] for path in FILE.parent.rglob("test_*.py")}
    assert budgets.keys() == with_tests


@pytest.mark.parametrize("workers", ["-n1", ""] if LONG else ["-n1"])
@pytest.mark.parametrize(
    ("budget", "slower", "enforced", "code"),
    [(0.05, 1, True, 1), (10, 1, True, 0), (0.05, 1, False, 0), (0.05, 100, True, 0)],
    ids=["too much", "enough", "not enforced", "a slow CPU"],
)
def test_a_session_fails_where_a_directory_takes_too_much(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    workers: str,
    budget: float,
    slower: int,
    enforced: bool,
    code: int,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeconftest(CONFTEST.format(budget=budget, slower=slower, enforced=enforced))
    tests = pytester.mkdir("tests") / "quick"
    tests.mkdir()
    (tests / "test_busy.py").write_text(BUSY)
    done = pytester.runpytest_subprocess(*workers.split(), f"--rootdir={pytester.path}")
    assert done.ret == code, done.outlines
    assert any("OVER BUDGET quick" in line for line in done.outlines) is bool(code)
