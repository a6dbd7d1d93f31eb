"""Tests that retired words are not used in names, and that phrases which misled readers are not used in code or docs.

docs/GLOSSARY.md has the words that replace the retired ones.
"""

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

PHRASES = {
    "also where": "even if",
    "are taken in": "are applied",
    "behind the journal": "older than the journal",
    "came behind": "followed",
    "comes behind": "follows",
    "in one go": "at once",
    "is for nothing": "has no effect",
    "is taken in": "is applied",
    "let go": "release",
    "made anew": "made again",
    "of which nothing": "name the thing, and what is not known of it",
    "one more not": "the maximum is",
    "read off": "taken from",
    "so many": "up to N",
    "speaks of": "is about",
    "stays it": "name the state",
    "the most of it": "maximum",
    "the most of them": "maximum",
    "to be had": "available",
    "told apart": "distinguished",
    "what becomes of": "name the outcome",
    "what comes of": "name the result",
    "what is behind": "name the thing after it",
    "what is left": "the remaining, and the noun",
    "what leaves": "outgoing, and the noun",
    "whoever": "name the program or the person",
}
"""Phrases that readers of the documentation had to read twice, each with a better phrase."""

TEXTS = {".html", ".js", ".md", ".py", ".toml", ".tpl", ".yaml", ".yml"}


def names(source: str) -> Iterator[str]:
    """Return every name that a Python source text defines or uses."""
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
    """Return the retired words that are part of a name, in the singular or plural, in camel case or with
    underscores.
    """
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
def test_the_check_finds_a_retired_word_in_each_spelling(name: str) -> None:
    assert retired(name)


def misleading(text: str) -> Iterator[str]:
    """Return the phrases in a text that misled readers. A phrase may continue on the next line, also in a comment."""
    words = re.sub(r"[\s#*]+", " ", text.lower())
    return (phrase for phrase in PHRASES if re.search(rf"\b{phrase}\b", words))


def test_no_text_has_a_phrase_that_misled_readers() -> None:
    root = ROOT.parent
    found = {
        f"{path.relative_to(root)}: {phrase!r} (say: {PHRASES[phrase]})"
        for path in (
            *(root / name for name in ("README.md", "CONTRIBUTING.md", "MAINTAINERS.md", "SECURITY.md")),
            *(each for name in ("kvbus", "docs", "deploy", "helm") for each in (root / name).rglob("*")),
        )
        if path.suffix in TEXTS
        for phrase in misleading(path.read_text())
    }
    assert found == set()


@pytest.mark.parametrize("text", ["Whoever asks", "what\n    leaves", "# it is\n# to be had", "so many."])
def test_the_check_finds_a_misleading_phrase_across_line_ends(text: str) -> None:
    assert list(misleading(text))
