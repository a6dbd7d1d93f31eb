"""The types of findings, and the current findings of one subject."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

RUNBOOK: Final = "docs/RUNBOOK.md"


class Severity(StrEnum):
    """The certainty that a finding is a problem."""

    PROBLEM = "problem"
    NOTE = "note"
    """It may be intended, or it ends without intervention."""


class Finding(msgspec.Struct, frozen=True):
    """One finding: something is wrong.

    Attributes:
        id: its row in the catalogue.
        text: the cause, in a sentence.
        key: the configuration key that it concerns.
        remedy: how to fix it.
        link: its section of the runbook.
        since: the time of day at which it began, in seconds; None if it is not tracked.
    """

    id: str
    severity: Severity
    text: str
    key: str
    remedy: str
    link: str
    since: float | None = None

    def __str__(self) -> str:
        prefix = "note: " if self.severity is Severity.NOTE else ""
        return f"{prefix}{self.text} [{self.key}]: {self.remedy}"

    @property
    def sense(self) -> str:
        """The text without its numbers: a finding is not new if only a count has risen."""
        return re.sub(r"\b\d[\d,]*\b", "", self.text)


class Kind(msgspec.Struct, frozen=True):
    """A row of the catalogue. Call it with the facts that its placeholders name.

    Attributes:
        means: the consequence for routers or operators.
    """

    id: str
    severity: Severity
    key: str
    text: str
    remedy: str
    means: str

    def __call__(self, **facts: object) -> Finding:
        """Return the finding with these facts."""
        text, key, remedy = (each.format_map(facts) for each in (self.text, self.key, self.remedy))
        return Finding(self.id, self.severity, text, key, remedy, f"{RUNBOOK}#{self.id}")


def problem(row: str, key: str, text: str, remedy: str, means: str) -> Kind:
    """Return a row of the catalogue."""
    return Kind(row, Severity.PROBLEM, key, text, remedy, means)


def note(row: str, key: str, text: str, remedy: str, means: str) -> Kind:
    """Return a row of the catalogue for what may be intended or ends without intervention."""
    return Kind(row, Severity.NOTE, key, text, remedy, means)


class Change(NamedTuple):
    """One change of the current findings.

    Attributes:
        word: ``begins``, ``changes`` or ``ends``.
        finding: the finding, in its current or last form.
        seconds: how long it has lasted.
    """

    word: str
    finding: Finding
    seconds: float


class Findings:
    """The current findings of one source, one router or the bus.

    Args:
        written: returns a key as the operator has written it.
    """

    def __init__(self, written: Callable[[str], str] = str) -> None:
        self._written = written
        self._now: dict[tuple[str, str], Finding] = {}

    @property
    def standing(self) -> list[Finding]:
        """The current findings."""
        return list(self._now.values())

    def since(self, finding: Finding) -> Finding:
        """Return a finding with the time at which it began, and with its key as the operator has written it."""
        key = self._written(finding.key)
        known = self._now.get((finding.id, key))
        return msgspec.structs.replace(finding, since=None if known is None else known.since, key=key)

    def update(self, found: Iterable[Finding], now: float) -> list[Change]:
        """Replace the current findings, at this time of day; return the changes."""
        before, self._now = self._now, {}
        changes = []
        for each in found:
            key = self._written(each.key)
            known = before.pop((each.id, key), None)
            began = now if known is None or known.since is None else known.since
            self._now[each.id, key] = finding = msgspec.structs.replace(each, since=began, key=key)
            if known is None:
                changes.append(Change("begins", finding, 0.0))
            elif known.sense != finding.sense:
                changes.append(Change("changes", finding, now - began))
        ended = [Change("ends", each, now - (each.since or now)) for each in before.values()]
        return [*ended, *changes]
