"""The verdicts about the clauses of docs/spec, and the report that shows them as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import IO, Any, Final

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kvbus.common.errors import ExitCode
from kvbus.tools.terminal import glyphs_for, plain_table

MAX_EVIDENCE_BYTES: Final = 512
"""Maximum number of bytes of one piece of evidence in the JSON report, which also states its complete length."""


class Outcome(StrEnum):
    """The result of judging a clause.

    The engine or router keeps the clause, breaks it, or has not shown whether it keeps it (not seen).
    """

    KEPT = "kept"
    BROKEN = "broken"
    NOT_SEEN = "not seen"


class Level(StrEnum):
    """The requirement level of a clause: MUST or SHOULD, as in RFC 2119."""

    MUST = "MUST"
    SHOULD = "SHOULD"


@dataclass(frozen=True, slots=True, order=True)
class Clause:
    """A clause of docs/spec/kv-events.md, such as 4.3.

    Attributes:
        number: number of the section, and position of the clause in the section.
        title: the requirement in a few words.
    """

    number: tuple[int, int]
    title: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.number[0]}.{self.number[1]}"


def clause(number: str, title: str) -> Clause:
    """Return the clause with a number such as ``4.3`` and a title."""
    section, _, position = number.partition(".")
    return Clause((int(section), int(position)), title)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Bytes of a publisher that prove a verdict.

    Attributes:
        what: description of the bytes, such as ``payload of batch 17``.
        data: the bytes.
    """

    what: str
    data: bytes

    def to_json(self) -> dict[str, Any]:
        """Return the evidence as a dictionary for JSON."""
        return {"what": self.what, "bytes": len(self.data), "hex": self.data[:MAX_EVIDENCE_BYTES].hex()}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of judging one clause. For a router, it is the result of one case, which tests the clause.

    Attributes:
        clause: the clause.
        outcome: kept, broken or not seen.
        message: the observation as a sentence.
        level: requirement level of the clause. If the clause is broken, it is the level of the broken part.
        evidence: bytes that prove the observation.
        case: name of the case (of ``kvbus conform router``); empty for a verdict about the complete clause.
        counts: numbers with their names, such as the number of missing blocks.
    """

    clause: Clause
    outcome: Outcome
    message: str
    level: Level = Level.MUST
    evidence: tuple[Evidence, ...] = ()
    case: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The number of the clause, followed by the name of the case if the verdict has one."""
        return f"{self.clause} {self.case}".rstrip()

    @property
    def seen(self) -> str:
        """The message of the verdict, followed by its counts."""
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"{self.message} ({counts})" if counts else self.message

    def fails(self, *, strict: bool = False) -> bool:
        """Return whether the verdict is a failure: a broken MUST or, with ``strict``, also a broken SHOULD."""
        return self.outcome is Outcome.BROKEN and (strict or self.level is Level.MUST)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as a dictionary for JSON."""
        return {
            "clause": str(self.clause),
            "title": self.clause.title,
            "case": self.case,
            "level": str(self.level),
            "outcome": str(self.outcome),
            "message": self.message,
            "counts": dict(self.counts),
            "evidence": [each.to_json() for each in self.evidence],
        }


SPEC_VERSION: Final = "0.1"
"""Version of docs/spec/kv-events.md to which the verdicts refer."""

_COLUMNS: Final = 120
"""Width of the report's table in a file or a pipe, in characters."""


_TABLE_BYTES: Final = 64
"""Maximum number of bytes that the report's table shows of one piece of evidence."""


@dataclass(slots=True)
class Report:
    """All verdicts about one engine or one router.

    Attributes:
        role: ``engine`` or ``router``.
        subject: the judged endpoint, file or router.
        verdicts: the verdicts, one for each clause or for each case of a clause.
        seen: amount of observed data, such as ``120 batches``.
        tried: whether any clause could be judged.
        notes: further information for the reader of the report.
    """

    role: str
    subject: str
    verdicts: list[Verdict] = field(default_factory=list)
    seen: str = ""
    tried: bool = True
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of_ranks(cls, reports: Sequence[Report]) -> Report:
        """Merge the reports about the ranks of an engine into one report. Each verdict of the result names its rank."""
        verdicts = [
            replace(each, case=f"rank {rank}") for rank, report in enumerate(reports) for each in report.verdicts
        ]
        notes = [f"rank {rank}: {note}" for rank, report in enumerate(reports) for note in report.notes]
        seen = "; ".join(report.seen for report in reports)
        first = reports[0]
        return cls(first.role, first.subject, verdicts, seen, tried=all(each.tried for each in reports), notes=notes)

    @property
    def ordered(self) -> list[Verdict]:
        """All verdicts, sorted by clause and case."""
        return sorted(self.verdicts, key=lambda each: (each.clause, each.case))

    def count(self, outcome: Outcome) -> int:
        """Return the number of verdicts with this outcome."""
        return sum(each.outcome is outcome for each in self.verdicts)

    def exit_code(self, *, strict: bool = False) -> ExitCode:
        """Return the exit code with which ``kvbus conform`` ends.

        It is ``UNAVAILABLE`` if no clause could be judged, ``FOUND`` if a MUST (with ``strict`` also a SHOULD) is
        broken, and ``OK`` otherwise.
        """
        if not self.tried:
            return ExitCode.UNAVAILABLE
        return ExitCode.FOUND if any(each.fails(strict=strict) for each in self.verdicts) else ExitCode.OK

    def without_bytes(self) -> Report:
        """Return a copy of the report without evidence. Evidence may contain token ids of prompts (clause 14.3)."""
        return replace(self, verdicts=[replace(each, evidence=()) for each in self.verdicts])

    @property
    def summary(self) -> str:
        """A line with the judged subject and the number of verdicts with each outcome."""
        counts = ", ".join(f"{self.count(outcome)} {outcome}" for outcome in Outcome)
        return f"{self.role} {self.subject}: {counts}" + (f" ({self.seen})" if self.seen else "")

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
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
    """Return the report as a JSON text."""
    return json.dumps(report.to_json(), indent=2) + "\n"


def print_table(report: Report, file: IO[str]) -> None:
    """Write the report to a file as a table for people. The table has colours if the file is a terminal."""
    console = Console(file=file, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=_COLUMNS)
    glyphs = glyphs_for(console)
    looks = {
        Outcome.KEPT: (glyphs.good, "green"),
        Outcome.BROKEN: (glyphs.bad, "red bold"),
        Outcome.NOT_SEEN: (glyphs.away, "dim"),
    }
    columns = (Column("clause", no_wrap=True), Column(no_wrap=True), "requirement", "observation")
    table = plain_table(*columns, expand=False)
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


def _printable(text: str) -> str:
    """Escape the unprintable characters in a text, so that text from a publisher cannot control the terminal."""
    return "".join(each if each.isprintable() or each == "\n" else f"\\x{ord(each):02x}" for each in text)
