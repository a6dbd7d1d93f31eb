"""The core's compiled form: every module is in the list or has a reason, and stale code is never run in silence."""

from __future__ import annotations

import hashlib
import json
import sys
import tomllib
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

from kvbus.common.compiled import PURE, StaleError, changed, choose, core
from kvbus.core import relay
from tests.architecture.imports import modules

ROOT = Path(__file__).parents[2]
PACKAGE = "of_a_test_that_compiles"


@pytest.fixture
def table() -> dict[str, Any]:
    """The hook's table in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook: dict[str, Any] = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    return hook


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a compiled module, a stamp, and nothing that could be loaded of the former."""
    package = tmp_path / PACKAGE
    (package / "core").mkdir(parents=True)
    for name in ("__init__.py", "core/__init__.py", "core/relay.py"):
        (package / name).write_text("SOURCE = True\n")
    (package / "core" / f"relay{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    stamp(package, EXTENSION_SUFFIXES[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delenv(PURE, raising=False)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def stamp(package: Path, suffix: str) -> None:
    sources = {
        path.relative_to(package).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (package / "core").rglob("*.py")
    }
    (package / "compiled.json").write_text(json.dumps({"suffix": suffix, "sources": sources}))


def test_each_module_of_the_core_is_compiled_or_has_a_reason(table):
    there = {name for name, path in modules(ROOT, "kvbus.core").items() if path.name != "__init__.py"}
    compiled, interpreted = table["modules"], table["interpreted"]
    assert len(set(compiled)) == len(compiled)
    assert not set(compiled) & interpreted.keys()
    assert {*compiled, *interpreted} == there
    assert all(interpreted.values())


def test_the_hook_takes_what_the_lock_file_pins(table):
    pinned = (ROOT / "requirements-build.lock").read_text()
    for each in table["dependencies"]:
        name, _, version = each.partition("==")
        assert not version or f"\n{name}=={version} " in pinned


def test_a_compiled_module_of_the_same_sources_is_taken(package):
    assert changed(package) == []
    choose(package, PACKAGE)
    with pytest.raises(ImportError, match="relay"):
        __import__(f"{PACKAGE}.core.relay")  # the library it would have loaded is none


def test_an_edit_is_refused(package):
    (package / "core" / "relay.py").write_text("SOURCE = 2\n")
    with pytest.raises(StaleError, match=r"core/relay\.py is not what .* were made of \(1 such\): make compiled"):
        choose(package, PACKAGE)


def test_a_module_more_and_one_less_are_refused(package):
    (package / "core" / "more.py").touch()
    (package / "core" / "relay.py").unlink()
    assert changed(package) == ["core/more.py", "core/relay.py"]


def test_modules_for_another_python_are_none_for_this_one(package):
    stamp(package, ".cpython-27.so")
    (package / "core" / "relay.py").write_text("SOURCE = 2\n")
    assert changed(package) == []


def test_without_a_stamp_there_is_nothing_to_be_stale(package):
    (package / "compiled.json").unlink()
    assert changed(package) == []


def test_the_sources_run_where_that_is_asked_for(package, monkeypatch):
    (package / "core" / "relay.py").write_text("SOURCE = 2\n")
    monkeypatch.setenv(PURE, "1")
    choose(package, PACKAGE)
    assert __import__(f"{PACKAGE}.core.relay", fromlist=["SOURCE"]).SOURCE == 2


def test_the_core_of_this_run_is_what_its_modules_are():
    assert core() == ("pure" if str(relay.__file__).endswith(".py") else "compiled")
