"""Tests that tests which share an expensive setup run in one worker process of pytest-xdist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sharing import TOGETHER, place

pytest_plugins = ["pytester"]

WHERE = """
import os
import time

import pytest

@pytest.mark.parametrize("number", range(4))
def test_where(number):
    time.sleep(0.2)  # so long that each worker gets something to do
    with open({said!r}, "a") as file:
        file.write({name!r} + " " + os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


def test_what_stands_together_exists() -> None:
    root = Path(__file__).parents[1]
    assert [each for each in TOGETHER if not (root / each).exists()] == []
    assert place("tests/image/test_image.py::test_x[a]") == "tests/image/"
    assert place("tests/cli/test_main.py::test_x") == "tests/cli/test_main.py::test_x"


def test_they_share_a_worker_and_all_others_do_not(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeconftest("from tests.conftest import pytest_xdist_make_scheduler\n")
    said = pytester.path / "said"
    for name in ("tests/image/test_a.py", "tests/image/test_b.py", "tests/other/test_c.py"):
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(WHERE.format(said=str(said), name=name.split("/")[1]))
    done = pytester.runpytest_subprocess("-n", "2", "--dist", "loadgroup", f"--rootdir={pytester.path}")
    assert done.ret == 0
    ran = [line.split() for line in said.read_text().splitlines()]
    assert len(ran) == 12
    assert len({worker for name, worker in ran if name == "image"}) == 1
