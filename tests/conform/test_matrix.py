"""Tests that the matrix agrees with the files of results, and that each defect in it has a page in
docs/spec/findings.
"""

from __future__ import annotations

import re
from typing import Final

import pytest

from kvbus.tools.conform.engine.clauses import WATCHED
from kvbus.tools.conform.router.cases import CASES, CLAUSES
from tests.conform.matrix import PAGE, PUBLISHERS, ROUTERS, SPEC, page, publisher, read, reader
from tests.conform.results import load

FINDINGS: Final = SPEC / "findings"
TEXT: Final = (SPEC / "kv-events.md").read_text()


def test_the_matrix_agrees_with_the_result_files() -> None:
    assert PAGE.read_text() == page(), "python -m tests.conform.matrix"


def test_the_result_files_have_every_known_peer_clause_and_case() -> None:
    engines, routers = load("engines"), load("routers")
    assert all(any(name.startswith(peer) for name in engines) for peer in PUBLISHERS)
    assert all(any(name.startswith(peer) for peer in PUBLISHERS) for name in engines)
    assert routers.keys() == ROUTERS.keys()
    assert all([each["clause"] for each in result.verdicts] == list(WATCHED) for result in engines.values())
    wanted = {(clause, case.name) for case in CASES for clause in case.clauses}
    for result in routers.values():
        assert {(each["clause"], each["case"]) for each in result.verdicts} == wanted, result.name
    assert {each["peer"] for each in read()} <= PUBLISHERS.keys() | ROUTERS.keys()


PAGES: Final = {peer: found[1] for columns in (PUBLISHERS, ROUTERS) for peer, found in columns.items()}


def broken_by(peer: str) -> list[str]:
    if peer in PUBLISHERS:
        return [number for number in WATCHED if publisher(peer, number)[0] == "broken"]
    return [number for number in CLAUSES if reader(peer, number)[0] == "broken"]


@pytest.mark.parametrize("peer", PAGES)
def test_each_defect_in_the_matrix_has_a_findings_page(peer: str) -> None:
    name, broken = PAGES[peer], broken_by(peer)
    if not name:
        assert broken in ([], ["1.3"]), "it is kvbus"
        return
    text = (FINDINGS / name).read_text()
    rows = re.findall(r"^\| clauses? \|(.*)\|$", text, re.MULTILINE)
    named = set(re.findall(r"\b\d+\.\d+\b", " ".join(re.sub(r"\(\.\./[^)]*\)", "", row) for row in rows)))
    assert set(broken) <= named, sorted(set(broken) - named)
    sections = re.split(r"^\| \| \|$", text, flags=re.MULTILINE)[1:]
    for section in sections:
        assert re.search(r"^\| (cases?|vectors?|smallest way to see it|seen) ", section, re.MULTILINE), section
        assert re.search(r"^\| proposed fix \|", section, re.MULTILINE), section


def test_findings_pages_name_only_existing_cases_clauses_and_vectors() -> None:
    names = {case.name for case in CASES} | {path.stem for path in (SPEC / "vectors").glob("*.json")}
    clauses = set(re.findall(r"^\*\*(\d+\.\d+)\*\*", TEXT, re.MULTILINE))
    for path in FINDINGS.glob("*.md"):
        for kind, row in re.findall(r"^\| (clause|case|vector)s? \|(.*)\|$", path.read_text(), re.MULTILINE):
            found = set(
                re.findall(r"\b\d+\.\d+\b", row) if kind == "clause" else re.findall(r"`([a-z]+(?:-[a-z]+)*)`", row)
            )
            assert found <= (clauses if kind == "clause" else names), path.name
