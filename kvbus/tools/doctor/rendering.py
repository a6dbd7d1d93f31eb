"""The report as lines or as JSON, and what is being waited for, on a terminal."""

from __future__ import annotations

import json
import os
from typing import TextIO

import click

from kvbus.tools.doctor.findings import Report, Severity, printable


def render(report: Report, *, as_json: bool, colour: bool) -> str:
    """Return the report: a line for each finding, the problems first, then what was seen."""
    if as_json:
        return json.dumps(report.to_json(), indent=2) + "\n"
    lines = []
    for finding in report.ordered:
        shade = "red" if finding.severity is Severity.PROBLEM else "yellow"
        lines.append(click.style(str(finding), fg=shade) if colour else str(finding))
    if report.healthy:
        lines.append("no problem was found, see the notes above" if report.findings else "nothing is wrong")
    lines += [f"  {seen}" for seen in report.seen]
    return "\n".join(lines) + "\n"


def coloured(out: TextIO) -> bool:
    """Return whether a stream gets colour: https://no-color.org."""
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Line:
    """One line on a terminal that is written again and again; nothing elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out if out.isatty() and os.environ.get("TERM") != "dumb" else None

    def show(self, text: str) -> None:
        """Write it anew."""
        self._write(printable(text)[:78])

    def end(self) -> None:
        """Take the line away."""
        self._write("")

    def _write(self, text: str) -> None:
        if self._out is not None:
            self._out.write(f"\r\x1b[K{text}")
            self._out.flush()


class Waiting(Line):
    """Says what is waited for."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(out)
        self._open: dict[str, None] = {}
        self._done = 0

    def __call__(self, what: str, over: bool) -> None:
        """Something is being looked at, or no more."""
        if over:
            self._open.pop(what, None)
            self._done += 1
        else:
            self._open[what] = None
        self.show(f"looking at {self._done + len(self._open)}: waiting for {next(iter(self._open), 'nothing')}")
