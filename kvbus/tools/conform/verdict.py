"""What was found about one clause of docs/spec: kept, broken with the bytes that show it, or not seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

MAX_EVIDENCE_BYTES: Final = 512
"""Of one piece of evidence that is shown; its length is always said."""


class Outcome(StrEnum):
    """What became of a clause."""

    KEPT = "kept"
    BROKEN = "broken"
    NOT_SEEN = "not seen"


class Level(StrEnum):
    """How strongly a clause asks for what was judged (RFC 2119)."""

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
        what: what they are, such as ``payload of batch 17``.
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
        outcome: what became of it.
        message: what was seen, in a sentence.
        level: how strongly the clause asks for it. Of a broken clause: for what was broken.
        evidence: bytes that show it.
        case: what was tried, where a clause has several cases; empty for the whole clause.
        counts: what was counted, such as missing and dead blocks.
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
        """Whether this makes the whole a failure: a MUST that is broken, or with ``strict`` a SHOULD as well."""
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
