"""Words that were retired stay out of names (docs/GLOSSARY.md has the words that took their places)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvbus

ROOT = Path(kvbus.__file__).parent
RETIRED = {
    "doubts": "unverified batches",
    "express": "fast path",
    "granularity": "block sizes",
    "horizon": "log end",
    "inlets": "source sockets",
    "intake": "admission",
    "life": "epoch",
    "outlets": "outputs",
    "owed": "backfill pending",
    "patience": "timeout",
    "recut": "reblocked",
    "resumed": "restored",
    "suspects": "stale batches",
    "telling": "state transfer",
    "tip": "last delivered",
    "told": "announced or sent",
    "wiring": "build",
    "withdrawn": "expired",
}


def names(source: str) -> Iterator[str]:
    """Every name that a module defines or uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def retired(name: str) -> set[str]:
    """The retired words in a name, in the singular or the plural, however it is spelled."""
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
    return {word for word in RETIRED if {word, word.removesuffix("s")} & words}


def test_no_name_has_a_retired_word() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name} (say {RETIRED[word]})"
        for path in ROOT.rglob("*.py")
        for name in {path.stem, *names(path.read_text())}
        for word in retired(name)
    }
    assert found == set()


@pytest.mark.parametrize(
    "name", ["_doubts", "Inlets", "SUSPECTS", "keep_suspect", "live_horizon", "withExpress", "first_of_life"]
)
def test_a_retired_word_is_found_however_it_is_spelled(name: str) -> None:
    assert retired(name)
