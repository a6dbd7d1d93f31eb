"""A report: findings of the catalogue and what was seen, as lines for people and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

import click
import msgspec

from kvbus.core.findings import Finding, Severity


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
    """All findings, and a line for each source and output."""

    findings: list[Finding] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings, each once."""
        self.findings += [each for each in dict.fromkeys(findings) if each not in self.findings]

    def merge(self, other: Report) -> None:
        """Add another report."""
        self.add(other.findings)
        self.seen += other.seen

    @property
    def ordered(self) -> list[Finding]:
        """The findings in their order, problems before notes."""
        return sorted(self.findings, key=lambda finding: finding.severity is Severity.NOTE)

    @property
    def healthy(self) -> bool:
        """Whether there is no problem."""
        return all(finding.severity is Severity.NOTE for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "healthy": self.healthy,
            "findings": [msgspec.to_builtins(each) for each in self.ordered],
            "seen": [asdict(each) for each in self.seen],
        }


def printable(text: str) -> str:
    """Escape what peers must not send to a terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def render(report: Report, *, as_json: bool, colour: bool) -> str:
    """Return the report: a line for each finding, problems first, then sources and outputs."""
    if as_json:
        return json.dumps(report.to_json(), indent=2) + "\n"
    lines = []
    for finding in report.ordered:
        shade = "red" if finding.severity is Severity.PROBLEM else "yellow"
        line = printable(str(finding))
        lines.append(click.style(line, fg=shade) if colour else line)
    if report.healthy:
        lines.append("no problem was found, see the notes above" if report.findings else "nothing is wrong")
    lines += [f"  {seen}" for seen in report.seen]
    return "\n".join(lines) + "\n"


def coloured(out: TextIO) -> bool:
    """Return whether a stream gets colour: https://no-color.org."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Line:
    """One line on a terminal that is rewritten; no output elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out if out.isatty() and os.environ.get("TERM") != "dumb" else None

    def show(self, text: str) -> None:
        """Rewrite the line."""
        self._write(printable(text)[:78])

    def end(self) -> None:
        """Erase the line."""
        self._write("")

    def _write(self, text: str) -> None:
        if self._out is not None:
            self._out.write(f"\r\x1b[K{text}")
            self._out.flush()


class Waiting(Line):
    """Show the first endpoint whose answer is pending."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._open: dict[str, None] = {}
        self._done = 0

    def __call__(self, what: str, over: bool) -> None:
        """Begin or end looking at an endpoint."""
        if over:
            self._open.pop(what, None)
            self._done += 1
        else:
            self._open[what] = None
        if self._open:
            self.show(f"looking at {self._done + len(self._open)}: waiting for {next(iter(self._open))}")
