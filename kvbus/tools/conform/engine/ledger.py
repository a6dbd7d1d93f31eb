"""What has been seen of each clause so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvbus.tools.conform.engine.clauses import WATCHED
from kvbus.tools.conform.verdict import Evidence, Level, Outcome, Verdict


@dataclass(slots=True)
class _Entry:
    """Of one clause: how often it was kept, and how it was broken first."""

    kept: int = 0
    broken: int = 0
    message: str = ""
    level: Level = Level.SHOULD
    evidence: tuple[Evidence, ...] = ()
    unseen: str = ""
    instead: str = ""


class Ledger:
    """Counts what keeps a clause, and remembers the first thing that breaks it. A MUST outweighs a SHOULD."""

    def __init__(self) -> None:
        self._entries: Final = {number: _Entry() for number in WATCHED}

    def kept(self, number: str, times: int = 1) -> None:
        """Something kept a clause."""
        self._entries[number].kept += times

    def broken(self, number: str, message: str, *evidence: Evidence, level: Level | None = None) -> None:
        """Something broke a clause. ``level``: how strongly it asks for that; by default as for the most of it."""
        entry, level = self._entries[number], level or WATCHED[number].level
        if not entry.broken or (level is Level.MUST and entry.level is Level.SHOULD):
            entry.message, entry.level, entry.evidence = message, level, evidence
        entry.broken += 1

    def unseen(self, number: str, why: str) -> None:
        """A clause could not be seen for a reason of this run."""
        self._entries[number].unseen = why

    def not_yet(self, number: str, why: str) -> None:
        """A clause was not seen for a reason of this run. It may still be."""
        self._entries[number].instead = why

    def is_kept(self, number: str) -> bool:
        """Whether a clause was seen, and never otherwise."""
        entry = self._entries[number]
        return entry.kept > 0 and not entry.broken

    def is_broken(self, number: str) -> bool:
        """Whether anything has broken a clause."""
        return self._entries[number].broken > 0

    def verdicts(self) -> list[Verdict]:
        """Return a verdict for each clause that is watched."""
        return [self._verdict(number) for number in WATCHED]

    def _verdict(self, number: str) -> Verdict:
        entry, asked = self._entries[number], WATCHED[number]
        if entry.broken:
            more = f" ({entry.broken} times)" if entry.broken > 1 else ""
            return Verdict(asked.clause, Outcome.BROKEN, entry.message + more, entry.level, entry.evidence)
        if entry.kept and not entry.unseen:
            return Verdict(asked.clause, Outcome.KEPT, f"{entry.kept:,} {asked.noun}", asked.level)
        return Verdict(asked.clause, Outcome.NOT_SEEN, entry.unseen or entry.instead or asked.unseen, asked.level)
