"""The classes of findings, and the current findings of one source, of one router or of the bus.

A finding is a fact that is or may be a problem, with its remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Any, Final, NamedTuple

import msgspec

RUNBOOK: Final = "docs/RUNBOOK.md"


class Severity(StrEnum):
    """The severity of a finding: either the fact is certainly a problem, or it may be intended."""

    PROBLEM = "problem"
    NOTE = "note"
    """The operator may have intended the fact, or the finding ends without an action of the operator."""


class Finding(msgspec.Struct, frozen=True):
    """One finding: a fact that is or may be a problem, with its remedy.

    Attributes:
        id: the id of the finding's row in the catalogue.
        severity: whether it is certainly a problem.
        text: the cause, in one sentence.
        key: the configuration key that the operator may have to change.
        remedy: how the operator can fix it.
        link: the section of the runbook about this finding.
        since: the time of day at which the finding began, in seconds; None if it is not tracked.
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
        """The finding's text without its numbers. It is the same for two findings that differ only in their counts."""
        return re.sub(r"\b\d[\d,]*\b", "", self.text)


class Reported(Finding, frozen=True):
    """A current finding of a running bus together with its subject, as ``/findings`` shows it.

    Attributes:
        kind: what the finding is about: ``bus``, ``source`` or ``router``.
        name: the source's label, or the name of the router's key. Empty for the bus, and for a router without a name.
        output: the name of the router's output; None for other kinds.
        peer: the address of the router; None for other kinds.
        stream: the slot of the stream that the router reads; None for other kinds.
    """

    kind: str = "bus"
    name: str = ""
    output: str | None = None
    peer: str | None = None
    stream: int | None = None

    @property
    def who(self) -> str:
        """The subject as text, such as ``source engine``."""
        if self.kind == "router":
            return f"router {self.name or self.peer}"
        return f"{self.kind} {self.name}".strip()


class Kind(msgspec.Struct, frozen=True):
    """A row of the catalogue of findings. Call it with the facts that fill the placeholders of its texts.

    Attributes:
        key: the configuration key that the operator may have to change.
        text: the cause, in one sentence.
        remedy: how the operator can fix it.
        means: the consequence for routers or operators, for the runbook; empty if ``text`` says enough.
    """

    id: str
    severity: Severity
    key: str
    text: str
    remedy: str
    means: str

    def __call__(self, **facts: object) -> Finding:
        """Return the finding whose texts have these facts in place of their placeholders."""
        text, key, remedy = (each.format_map(facts) for each in (self.text, self.key, self.remedy))
        return Finding(self.id, self.severity, text, key, remedy, f"{RUNBOOK}#{self.id}")


def problem(row: str, key: str, text: str, remedy: str, means: str = "") -> Kind:
    """Return a kind of finding for a fact that is certainly a problem. See :func:`note` for the arguments."""
    return Kind(row, Severity.PROBLEM, key, text, remedy, means)


def note(row: str, key: str, text: str, remedy: str, means: str = "") -> Kind:
    """Return a kind of finding for a fact that may be intended, or that ends without an action of the operator.

    Args:
        row: the identifier of the kind.
        key: the place in the configuration.
        text: what kvbus has found.
        remedy: what the operator can do.
        means: what follows from the finding.
    """
    return Kind(row, Severity.NOTE, key, text, remedy, means)


class Change(NamedTuple):
    """One change of the current findings. kvbus's log and the HTTP path ``/events`` report it.

    Attributes:
        word: what happens to the finding: ``begins``, ``changes`` or ``ends``.
        finding: the finding after the change; if the finding ended, the finding before the change.
        seconds: how long the finding has existed, in seconds.
    """

    word: str
    finding: Finding
    seconds: float


class Findings:
    """The current findings of one source, of one router or of the bus.

    Args:
        written: function that returns a configuration key in the form in which the operator has written it.
    """

    def __init__(self, written: Callable[[str], str] = str) -> None:
        self._written = written
        self._now: dict[tuple[str, str], Finding] = {}

    @property
    def standing(self) -> list[Finding]:
        """The findings whose conditions hold now."""
        return list(self._now.values())

    def reported(self, **subject: Any) -> Iterator[Reported]:
        """Yield the current findings with their subject; see :class:`Reported` for its fields."""
        for each in self._now.values():
            yield Reported(**msgspec.structs.asdict(each), **subject)

    def update(self, found: Iterable[Finding], now: float) -> list[Change]:
        """Replace the current findings by ``found``, and return the changes. ``now`` is the time of day in seconds."""
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
