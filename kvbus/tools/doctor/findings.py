"""The report of doctor: findings and observations, as lines for people or as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

import click
import msgspec

from kvbus.core.findings.finding import Finding, Severity


@dataclass(frozen=True, slots=True)
class Seen:
    """An observation about a source or an output, such as its last seq. It is not a problem.

    Attributes:
        key: position in the configuration, such as ``sources[0]``.
        name: label of the source or output.
        text: the observation.
    """

    key: str
    name: str
    text: str

    def __str__(self) -> str:
        return printable(f"{self.key} {self.name}: {self.text}")


@dataclass(slots=True)
class Report:
    """The report of doctor: all findings, and an observation for each source and output."""

    findings: list[Finding] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    def add(self, findings: Iterable[Finding]) -> None:
        """Add findings to the report, except those that it already has."""
        self.findings += [each for each in dict.fromkeys(findings) if each not in self.findings]

    def merge(self, other: Report) -> None:
        """Add the findings and observations of another report."""
        self.add(other.findings)
        self.seen += other.seen

    @property
    def ordered(self) -> list[Finding]:
        """All findings, problems before notes. Otherwise the findings stay in the order in which they were added."""
        return sorted(self.findings, key=lambda finding: finding.severity is Severity.NOTE)

    @property
    def healthy(self) -> bool:
        """Whether the report has no finding that is a problem. Notes do not count."""
        return all(finding.severity is Severity.NOTE for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON."""
        return {
            "healthy": self.healthy,
            "findings": [msgspec.to_builtins(each) for each in self.ordered],
            "seen": [asdict(each) for each in self.seen],
        }


def printable(text: str) -> str:
    """Escape the unprintable characters in a text, so that text from an engine cannot control the terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def render(report: Report, *, as_json: bool, colour: bool) -> str:
    """Return the report as text: a line for each finding, problems first, and a line for each source and output.

    With ``as_json`` the text is a JSON object.
    """
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
    """Return whether lines that are written to ``out`` get colours.

    ``NO_COLOR`` (https://no-color.org) turns colours off.
    """
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class StatusLine:
    """A status line on a terminal. Each call of `show` replaces it. Nothing is written to a file or a pipe."""

    def __init__(self, out: TextIO) -> None:
        self._out = out if out.isatty() and os.environ.get("TERM") != "dumb" else None

    def show(self, text: str) -> None:
        """Replace the text of the line. A text of more than 78 characters is cut."""
        self._write(printable(text)[:78])

    def end(self) -> None:
        """Erase the line from the terminal."""
        self._write("")

    def _write(self, text: str) -> None:
        if self._out is not None:
            self._out.write(f"\r\x1b[K{text}")
            self._out.flush()


class Waiting(StatusLine):
    """A status line that names an endpoint whose probe has not ended yet, so that the user sees why doctor waits."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._open: dict[str, None] = {}
        self._done = 0

    def __call__(self, what: str, done: bool) -> None:
        """Record that the probe of the endpoint ``what`` begins or, with ``done``, has ended. Then update the line."""
        if done:
            self._open.pop(what, None)
            self._done += 1
        else:
            self._open[what] = None
        if self._open:
            self.show(f"probing {self._done + len(self._open)} endpoints: waiting for {next(iter(self._open))}")
