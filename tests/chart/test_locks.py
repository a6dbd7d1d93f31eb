"""Tests that the lock files have equal versions: the container image must have the packages with which the tests
ran.
"""

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
def test_packages_in_several_lock_files_have_equal_versions(name: str) -> None:
    main, other = pins("requirements.lock"), pins(name)
    shared = main.keys() & other.keys()
    assert shared
    assert {key: other[key] for key in shared} == {key: main[key] for key in shared}


def test_the_lock_of_the_image_has_exactly_the_runtime_dependencies() -> None:
    assert pins("requirements-runtime.lock").keys() <= pins("requirements.lock").keys()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[>=;\s]", requirement)[0].replace(".", "-") for requirement in declared}
    assert names <= pins("requirements-runtime.lock").keys()
    assert "pytest" not in pins("requirements-runtime.lock")


def test_the_build_lock_has_the_build_dependencies_and_the_readme_uses_it() -> None:
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    names = {re.split(r"[>=;\s]", requirement)[0] for requirement in backend}
    assert names <= pins("requirements-build.lock").keys()
    assert "editables" in pins("requirements-build.lock"), "hatchling needs it where .ci/demo.sh installs the checkout"
    readme = (ROOT / "README.md").read_text()
    assert "--require-hashes -r requirements-runtime.lock -r requirements-build.lock\n" in readme
    assert "--no-deps --no-build-isolation .\n" in readme, "an isolated build fetches what no lock pins"
