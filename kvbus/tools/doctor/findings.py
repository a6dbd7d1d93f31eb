"""What was found and what was seen, as values: a finding has a cause, a configuration key, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """Whether a finding makes the exit code 1."""

    PROBLEM = "problem"
    NOTE = "note"
    """It may be meant so, or cannot be known from here."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        cause: what is wrong, in a sentence that names the endpoint.
        key: the configuration key that it concerns.
        do: what to do about it.
        severity: whether it is certain to be wrong.
    """

    cause: str
    key: str
    do: str
    severity: Severity = Severity.PROBLEM

    def __str__(self) -> str:
        note = "note: " if self.severity is Severity.NOTE else ""
        return printable(f"{note}{self.cause} [{self.key}]: {self.do}")


@dataclass(frozen=True, slots=True)
class Seen:
    """A source or an output as it was seen.

    Attributes:
        key: its place in the configuration.
        name: its label.
        text: what was seen of it.
    """

    key: str
    name: str
    text: str

    def __str__(self) -> str:
        return printable(f"{self.key} {self.name}: {self.text}")


@dataclass(slots=True)
class Report:
    """Everything that was found and seen."""

    findings: list[Finding] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings, each once."""
        self.findings += [each for each in dict.fromkeys(findings) if each not in self.findings]

    def merge(self, other: Report) -> None:
        """Add what another part has found and seen."""
        self.add(other.findings)
        self.seen += other.seen

    @property
    def ordered(self) -> list[Finding]:
        """Problems first, else as they were found: sources, then outputs, then what engines' APIs answered."""
        return sorted(self.findings, key=lambda finding: finding.severity is Severity.NOTE)

    @property
    def healthy(self) -> bool:
        """Whether there is no problem."""
        return all(finding.severity is Severity.NOTE for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "healthy": self.healthy,
            "findings": [{**asdict(each), "severity": str(each.severity)} for each in self.ordered],
            "seen": [asdict(each) for each in self.seen],
        }


def printable(text: str) -> str:
    """Escape what peers must not send to a terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
