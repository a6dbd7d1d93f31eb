"""Tests that code outside kvbus.core (the shell) changes no object of kvbus.core: it sends the core events instead.

The test copies the package. Before each statement that changes a value through an object, it inserts a line that asks
mypy for the type of that object. Therefore the names of the variables do not matter.
"""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

OWN = {"Findings", "Histogram", "NamedBlocks", "OutputStats", "ProcessStats"}
"""Classes of the core whose instances the shell may change, because it creates its own instances."""

APART = {"core", "client"}
"""Packages that the test does not check: the core itself, and the client, which has core objects but no relay."""

CHANGING = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft"),
    *("remove", "setdefault", "sort", "subtract", "update"),
}
"""Names of methods of lists, dicts and other built-in containers that change the container."""

QUESTION = re.compile(r"^(\S+?):(\d+): note: Revealed type is \"(.*)\"$")


def changed(statement: ast.stmt) -> Iterator[ast.expr]:
    """Return the targets that a statement assigns or deletes, and the objects that it changes by a method, such as a
    list to which it appends.
    """
    if isinstance(statement, ast.Assign | ast.Delete):
        yield from statement.targets
    elif isinstance(statement, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor):
        yield statement.target
    elif isinstance(statement, ast.With | ast.AsyncWith):
        yield from (item.optional_vars for item in statement.items if item.optional_vars is not None)
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute) and function.attr in CHANGING:
                yield function.value
            elif isinstance(function, ast.Name) and function.id in {"setattr", "delattr"}:
                yield ast.Attribute(node.args[0], "_")


def owners(target: ast.expr) -> Iterator[str]:
    """Return the source text of each object through which a statement reaches the value that it changes.

    For a change of ``a.b.c``, these objects are ``a.b`` and ``a``.
    """
    if isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from owners(each)
    while isinstance(target, ast.Attribute | ast.Subscript | ast.Starred):
        target = target.value
        yield ast.unparse(target)


def with_reveal_type(text: str) -> str:
    """Return a module's text with a ``reveal_type`` call before each statement that changes a value through an object.

    Each call asks mypy for the type of the object that the statement changes.
    """
    lines = text.split("\n")
    for node in sorted((n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt)), key=lambda n: -n.lineno):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        simple = not hasattr(node, "body")
        found = {owner for target in changed(node) if simple or target for owner in owners(target)}
        if found and lines[node.lineno - 1].lstrip().startswith(("elif", "else", "except", "finally")):
            continue  # no line can be inserted before this branch; statements inside it get their own calls
        indent = " " * node.col_offset
        lines[node.lineno - 1 : node.lineno - 1] = [f"{indent}reveal_type({owner})" for owner in sorted(found)]
    return "\n".join(lines)


def may_change(dotted: str) -> bool:
    """Return whether the rule of this test holds for a class: only kvbus.core may change its instances.

    It does not hold if the instances cannot change (enums, frozen structs), or if the class is in ``OWN``. ``dotted``
    is the dotted name of the class.
    """
    module, _, name = dotted.rpartition(".")
    if name in OWN:
        return False
    found = getattr(importlib.import_module(module), name)
    config = getattr(found, "__struct_config__", None)
    return not (issubclass(found, Enum) or (config is not None and config.frozen))


def offences(root: Path, cache: Path) -> list[str]:
    """Return the objects of kvbus.core that code outside kvbus.core (the shell) changes.

    Args:
        root: the source tree. The function rewrites its files.
        cache: mypy's cache directory, which makes repeated runs faster.
    """
    for path in sorted(root.joinpath("kvbus").rglob("*.py")):
        if path.relative_to(root).parts[1] not in APART:
            path.write_text(with_reveal_type(path.read_text()))
    command = [sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={cache}", "--no-error-summary"]
    options = ["--follow-imports=silent", "--ignore-missing-imports", "--python-version=3.11", "--check-untyped-defs"]
    told = subprocess.run(
        [*command, *options, "kvbus"], cwd=root, capture_output=True, text=True, timeout=240, check=False
    )
    found = []
    asked = 0
    for row in told.stdout.splitlines():
        answer = QUESTION.match(row)
        if answer is None:
            continue
        asked += 1
        file, _, kind = answer.groups()
        if any(map(may_change, re.findall(r"kvbus\.core\.[\w.]*\.\w+", kind))):
            found.append(f"{file}: {kind}")
    assert asked > 100, told.stdout + told.stderr
    return found


@pytest.fixture
def kvbus_copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "kvbus", tmp_path / "kvbus", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


HOLES = """

from kvbus.core.relay import Relay
from kvbus.core.source import Source


def _holes(anything: Relay, other: Source) -> None:
    for _, harmless in anything.outputs[0].open_streams.items():
        harmless.next_seq = 7
    mine = other.stats
    mine.refused["key"] += 1
    if mine:
        anything.sources.clear()
    setattr(anything, "backlog", True)
    del other.sequencer.actions[0]
"""


def test_the_check_finds_each_change_of_the_core_and_the_shell_makes_none(
    kvbus_copy: Path, cache: pytest.Cache
) -> None:
    path = kvbus_copy / "kvbus/daemon/daemon.py"
    path.write_text(path.read_text() + HOLES)
    found = offences(kvbus_copy, cache.mkdir("what_the_shell_changes"))
    assert {row.partition(":")[0] for row in found} == {"kvbus/daemon/daemon.py"}, found
    assert {row.partition(": ")[2].rpartition(".")[2] for row in found} >= {
        "OutputStream",
        "SourceStats",
        "Relay",
        "Source",
        "Sequencer",
    }
