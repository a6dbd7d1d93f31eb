"""Tests for the formats of a conformance report, and for the exit code that follows from its verdicts."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from kvbus.common.errors import ExitCode
from kvbus.tools.conform import report as forms
from kvbus.tools.conform.report import (
    MAX_EVIDENCE_BYTES,
    Clause,
    Evidence,
    Level,
    Outcome,
    Report,
    Verdict,
    clause,
)
from tests.spec.test_spec import TEXT

KEPT = Verdict(clause("2.1", "three frames"), Outcome.KEPT, "120 batches")
UNSEEN = Verdict(clause("10.1", "one rank"), Outcome.NOT_SEEN, "no rank was sent")
SHOULD = Verdict(clause("3.6", "an empty batch"), Outcome.BROKEN, "silent for 4 s", Level.SHOULD)
BAD = Verdict(
    clause("3.1", "dense"),
    Outcome.BROKEN,
    "batch 7 came twice\x1b[2J",
    evidence=(Evidence("sequence", bytes(8)), Evidence("payload", bytes(MAX_EVIDENCE_BYTES + 9))),
    case="duplicates",
    counts={"missing": 3, "dead": 0},
)


def report(*verdicts: Verdict, **changes) -> Report:
    return replace(Report("engine", "tcp://127.0.0.1:5557", list(verdicts), "120 batches"), **changes)


def text(found: Report) -> str:
    out = io.StringIO()
    forms.print_table(found, out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("verdicts", "code", "strict"),
    [
        ([KEPT, UNSEEN], ExitCode.OK, ExitCode.OK),
        ([KEPT, SHOULD], ExitCode.OK, ExitCode.FOUND),
        ([KEPT, BAD], ExitCode.FOUND, ExitCode.FOUND),
    ],
)
def test_a_broken_must_sets_the_exit_code_and_with_strict_a_broken_should(verdicts, code, strict):
    found = report(*verdicts)
    assert (found.exit_code(), found.exit_code(strict=True)) == (code, strict)
    assert replace(found, tried=False).exit_code() is ExitCode.UNAVAILABLE


def test_a_report_lists_clauses_in_the_order_of_the_specification():
    assert [str(each.clause) for each in report(UNSEEN, SHOULD, KEPT, BAD).ordered] == ["2.1", "3.1", "3.6", "10.1"]
    assert clause("4.3", "a") == Clause((4, 3), "b")


def test_the_table_shows_the_verdicts_and_escapes_bytes_of_a_peer():
    shown = text(report(KEPT, UNSEEN, SHOULD, BAD, notes=["the API did not answer"]))
    assert "broken (MUST)" in shown
    assert "broken (SHOULD)" in shown
    assert "3 missing, 0 dead" in shown
    assert "\x1b" not in shown
    assert f"and {MAX_EVIDENCE_BYTES + 9 - 64} bytes" in shown
    assert "note: the API did not answer" in shown
    assert "1 kept, 2 broken, 1 not seen (120 batches)" in " ".join(shown.split())


def test_brackets_in_a_clause_title_are_not_markup():
    assert "[ts, events, rank]" in text(
        report(Verdict(clause("6.1", "[ts, events, rank]"), Outcome.KEPT, "2 payloads"))
    )


def test_the_table_has_colours_on_a_terminal(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(forms, "Console", lambda **named: Console(force_terminal=True, **named | {"width": 120}))
    forms.print_table(report(BAD), out)
    assert "\x1b[" in out.getvalue()


def test_the_json_report_has_every_verdict_with_its_bytes():
    found = json.loads(forms.as_json(report(KEPT, BAD)))
    assert found["counts"] == {"kept": 1, "broken": 1, "not seen": 0}
    assert found["spec"] == forms.SPEC_VERSION
    bad = found["verdicts"][1]
    assert (bad["clause"], bad["case"], bad["level"], bad["outcome"]) == ("3.1", "duplicates", "MUST", "broken")
    assert bad["evidence"][0] == {"what": "sequence", "bytes": 8, "hex": "00" * 8}
    assert len(bad["evidence"][1]["hex"]) == 2 * MAX_EVIDENCE_BYTES
    bare = json.loads(forms.as_json(report(BAD).without_bytes()))
    assert bare["verdicts"][0]["evidence"] == []


def test_a_report_has_the_version_of_the_specification():
    assert f"Version {forms.SPEC_VERSION}," in TEXT
