"""The lock files agree with each other: the container runs what the tests ran with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]


def pins(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", (ROOT / name).read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["requirements-runtime.lock", "requirements-build.lock", ".ci/tools.lock"])
def test_shared_pins_are_those_of_the_main_lock(name: str) -> None:
    main, other = pins("requirements.lock"), pins(name)
    shared = main.keys() & other.keys()
    assert shared
    assert {key: other[key] for key in shared} == {key: main[key] for key in shared}


def test_the_image_has_every_runtime_dependency_and_no_other() -> None:
    assert pins("requirements-runtime.lock").keys() <= pins("requirements.lock").keys()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[>=;\s]", requirement)[0].replace(".", "-") for requirement in declared}
    assert names <= pins("requirements-runtime.lock").keys()
    assert "pytest" not in pins("requirements-runtime.lock")
