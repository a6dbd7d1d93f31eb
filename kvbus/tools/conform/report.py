"""Verdicts about the clauses of docs/spec, as a table for people and as JSON, and the exit code that follows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import IO, Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbus.common.errors import ExitCode
from kvbus.tools.terminal import glyphs_for, plain_table

MAX_EVIDENCE_BYTES: Final = 512
"""Maximum bytes of one piece of evidence in JSON, beside its whole length."""


class Outcome(StrEnum):
    """The outcome for a clause."""

    KEPT = "kept"
    BROKEN = "broken"
    NOT_SEEN = "not seen"


class Level(StrEnum):
    """How strongly a clause requires something (RFC 2119)."""

    MUST = "MUST"
    SHOULD = "SHOULD"


@dataclass(frozen=True, slots=True, order=True)
class Clause:
    """A clause of docs/spec/kv-events.md, such as 4.3.

    Attributes:
        number: the section and the place in it.
        title: what the clause asks for, in a few words.
    """

    number: tuple[int, int]
    title: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.number[0]}.{self.number[1]}"


def clause(number: str, title: str) -> Clause:
    """Return the clause of a number such as ``4.3``."""
    section, _, place = number.partition(".")
    return Clause((int(section), int(place)), title)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Bytes that show a verdict.

    Attributes:
        what: name of the bytes, such as ``payload of batch 17``.
        data: the bytes.
    """

    what: str
    data: bytes

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"what": self.what, "bytes": len(self.data), "hex": self.data[:MAX_EVIDENCE_BYTES].hex()}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found about one clause, or about one case of it.

    Attributes:
        clause: the clause.
        outcome: kept, broken or not seen.
        message: the observation, in a sentence.
        level: how strongly the clause requires it; of a broken clause, the level of the broken part.
        evidence: bytes that show it.
        case: name of the case; empty for a verdict about the whole clause.
        counts: numbers such as missing and dead blocks.
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
        """The clause, and the case if there is one."""
        return f"{self.clause} {self.case}".rstrip()

    @property
    def seen(self) -> str:
        """The message, and what was counted."""
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"{self.message} ({counts})" if counts else self.message

    def fails(self, *, strict: bool = False) -> bool:
        """Whether the verdict is a failure: a broken MUST, or with ``strict`` also a broken SHOULD."""
        return self.outcome is Outcome.BROKEN and (strict or self.level is Level.MUST)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
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
"""Version of docs/spec/kv-events.md, whose clauses are judged."""

_COLUMNS: Final = 120
"""Width of a table in a file or a pipe."""


_TABLE_BYTES: Final = 64
"""Maximum bytes of one piece of evidence in a table."""


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
        """The verdicts, sorted by clause and case."""
        return sorted(self.verdicts, key=lambda each: (each.clause, each.case))

    def count(self, outcome: Outcome) -> int:
        """Count the verdicts with this outcome."""
        return sum(each.outcome is outcome for each in self.verdicts)

    def exit_code(self, *, strict: bool = False) -> ExitCode:
        """Return 1 where a MUST is broken (with ``strict`` a SHOULD too), 2 where nothing could be tried, else 0."""
        if not self.tried:
            return ExitCode.UNAVAILABLE
        return ExitCode.FOUND if any(each.fails(strict=strict) for each in self.verdicts) else ExitCode.OK

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


def _printable(text: str) -> str:
    """Escape what a peer must not send to a terminal."""
    return "".join(each if each.isprintable() or each == "\n" else f"\\x{ord(each):02x}" for each in text)
