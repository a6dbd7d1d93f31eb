"""Tests that the project's tests do not replace private names of kvbus.

Tests that put a known defect back may do so. They lie in folders named `defects`.
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def replaced(tree: ast.AST) -> set[str]:
    """Return the names that calls of ``setattr``, ``patch`` and ``patch.object`` replace."""
    return {
        argument.value.rpartition(".")[2]
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in ("setattr", "object", "patch")
        for argument in call.args[:2]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


def test_no_test_replaces_a_private_name() -> None:
    found = {
        f"{path.relative_to(TESTS)}: {name}"
        for path in TESTS.rglob("*.py")
        if "defects" not in path.parts
        for name in replaced(ast.parse(path.read_text()))
        if name.startswith("_")
    }
    assert found == set()
