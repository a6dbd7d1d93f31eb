"""Verdicts as a table for people, as JSON and as JUnit, and the exit code that follows from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import IO, Any, Final
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbus.tools.conform.verdict import MAX_EVIDENCE_BYTES, Outcome, Verdict
from kvbus.tools.terminal import glyphs_for, plain_table

SPEC_VERSION: Final = "0.1"
"""Of docs/spec/kv-events.md, whose clauses are judged."""

_COLUMNS: Final = 120
"""Of a table that goes into a file or a pipe."""


_TABLE_BYTES: Final = 64
"""Of one piece of evidence in a table; JSON and JUnit have more."""


class Exit(IntEnum):
    """What the exit code of ``kvbus conform`` means."""

    KEPT = 0
    BROKEN = 1
    NOT_TRIED = 2


@dataclass(slots=True)
class Report:
    """All verdicts about one engine or router.

    Attributes:
        role: ``engine`` or ``router``.
        subject: what was judged: an endpoint, a file or an adapter.
        verdicts: one for each clause, or for each case of a clause.
        seen: what was seen in all, such as ``120 batches``.
        tried: whether anything could be judged at all.
        notes: what a reader of the report has to know beyond the verdicts.
    """

    role: str
    subject: str
    verdicts: list[Verdict] = field(default_factory=list)
    seen: str = ""
    tried: bool = True
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of_ranks(cls, reports: Sequence[Report]) -> Report:
        """Return the reports of all ranks as one, in which each verdict names its rank."""
        verdicts = [
            replace(each, case=f"rank {rank}") for rank, report in enumerate(reports) for each in report.verdicts
        ]
        notes = [f"rank {rank}: {note}" for rank, report in enumerate(reports) for note in report.notes]
        seen = "; ".join(report.seen for report in reports)
        first = reports[0]
        return cls(first.role, first.subject, verdicts, seen, tried=all(each.tried for each in reports), notes=notes)

    @property
    def ordered(self) -> list[Verdict]:
        """By clause and case."""
        return sorted(self.verdicts, key=lambda each: (each.clause, each.case))

    def count(self, outcome: Outcome) -> int:
        """Return how many verdicts are so."""
        return sum(each.outcome is outcome for each in self.verdicts)

    def exit_code(self, *, strict: bool = False) -> Exit:
        """Return 1 where a MUST is broken (with ``strict`` a SHOULD too), 2 where nothing could be tried, else 0."""
        if not self.tried:
            return Exit.NOT_TRIED
        return Exit.BROKEN if any(each.fails(strict=strict) for each in self.verdicts) else Exit.KEPT

    def without_bytes(self) -> Report:
        """Return the report without the bytes: they may hold token ids, which are prompts (14.3)."""
        return replace(self, verdicts=[replace(each, evidence=()) for each in self.verdicts])

    @property
    def summary(self) -> str:
        """The counts in a sentence."""
        counts = ", ".join(f"{self.count(outcome)} {outcome}" for outcome in Outcome)
        return f"{self.role} {self.subject}: {counts}" + (f" ({self.seen})" if self.seen else "")

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "spec": SPEC_VERSION,
            "role": self.role,
            "subject": self.subject,
            "seen": self.seen,
            "tried": self.tried,
            "notes": self.notes,
            "counts": {str(outcome): self.count(outcome) for outcome in Outcome},
            "verdicts": [each.to_json() for each in self.ordered],
        }


def as_json(report: Report) -> str:
    """Return the report as JSON."""
    return json.dumps(report.to_json(), indent=2) + "\n"


def print_table(report: Report, file: IO[str]) -> None:
    """Print the report for people, in colours on a terminal."""
    console = Console(file=file, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=_COLUMNS)
    glyphs = glyphs_for(console)
    looks = {
        Outcome.KEPT: (glyphs.good, "green"),
        Outcome.BROKEN: (glyphs.bad, "red bold"),
        Outcome.NOT_SEEN: (glyphs.away, "dim"),
    }
    table = plain_table(expand=False)
    for head in ("clause", "", "asks for", "what was seen"):
        table.add_column(head, no_wrap=head in ("clause", ""), ratio=None)
    for each in report.ordered:
        _add(table, each, *looks[each.outcome])
    console.print(table)
    for note in report.notes:
        console.print(Text(f"note: {_printable(note)}"))
    console.print(Text(_printable(report.summary), "bold"))


def _add(table: Table, verdict: Verdict, sign: str, style: str) -> None:
    text = Text(_printable(verdict.seen), "" if verdict.outcome is Outcome.BROKEN else style)
    for piece in verdict.evidence:
        text.append(f"\n{_printable(_shown(piece.to_json(), _TABLE_BYTES))}", "dim")
    head = f"{verdict.outcome} ({verdict.level})" if verdict.outcome is Outcome.BROKEN else str(verdict.outcome)
    table.add_row(Text(verdict.name), Text(f"{sign} {head}", style), Text(verdict.clause.title), text)


def _shown(piece: dict[str, Any], most: int = MAX_EVIDENCE_BYTES) -> str:
    rest = piece["bytes"] - most
    return f"{piece['what']}: {piece['hex'][: 2 * most]}" + (f"… and {rest} bytes" if rest > 0 else "")


def as_junit(report: Report, *, strict: bool = False) -> str:
    """Return the report as JUnit XML: a case for each verdict.

    A MUST that is broken is a failure, a SHOULD that is broken and a clause that was not seen are skipped with what was
    seen. With ``strict`` a broken SHOULD is a failure too.
    """
    root = Element("testsuites")
    suite = SubElement(root, "testsuite", name=f"kvbus conform {report.role}", tests=str(len(report.verdicts)))
    failures = skipped = 0
    for each in report.ordered:
        case = SubElement(suite, "testcase", classname=f"kv-events.{report.role}", name=_printable(_title(each)))
        text = _printable("\n".join([each.seen, *(_shown(piece.to_json()) for piece in each.evidence)]))
        if each.fails(strict=strict):
            failures += 1
            SubElement(case, "failure", message=_printable(each.seen)).text = text
        elif each.outcome is not Outcome.KEPT:
            skipped += 1
            SubElement(case, "skipped", message=_printable(f"{each.outcome} ({each.level}): {each.seen}"))
        else:
            SubElement(case, "system-out").text = text
    if not report.tried:
        failures += 1
        case = SubElement(suite, "testcase", classname=f"kv-events.{report.role}", name="anything was seen")
        SubElement(case, "failure", message=_printable(" ".join(report.notes) or "nothing was seen"))
        suite.set("tests", str(len(report.verdicts) + 1))
    suite.set("failures", str(failures))
    suite.set("skipped", str(skipped))
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _title(verdict: Verdict) -> str:
    return f"{verdict.name}: {verdict.clause.title}"


def _printable(text: str) -> str:
    """Escape what a peer must not send to a terminal."""
    return "".join(each if each.isprintable() or each == "\n" else f"\\x{ord(each):02x}" for each in text)
