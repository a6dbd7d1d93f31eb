"""All cases at one router, and the report of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from kvbus.tools.conform.report import Report
from kvbus.tools.conform.router.cases import CASES, CLAUSES
from kvbus.tools.conform.router.play import Player, Result
from kvbus.tools.conform.router.steps import Case
from kvbus.tools.conform.verdict import Outcome, Verdict


def chosen(names: Iterable[str]) -> list[Case]:
    """Return the cases of these names or clauses, and the plainest before them; all if there is none.

    Raises:
        ValueError: there is no such case and no such clause.
    """
    wanted = set(names)
    known = {case.name for case in CASES} | CLAUSES.keys()
    if strange := sorted(wanted - known):
        raise ValueError(f"there is no case and no clause {strange[0]!r} that routers are tried with (--list)")
    return [case for at, case in enumerate(CASES)
            if not wanted or not at or case.name in wanted or wanted & set(case.clauses)]  # fmt: skip


async def judge(player: Player, cases: Iterable[Case], report: Report, progress: Callable[[str], object]) -> None:
    """Play the cases, and add what comes of each to the report.

    Where the first shows that the router does not listen, the others are not played.
    """
    for played, case in enumerate(cases, start=1):
        progress(f"{case.name}: {case.title}")
        result = await player.play(case)
        report.verdicts += _verdicts(case, result)
        report.seen = f"{played} cases"
        if played == 1 and result.outcome is not Outcome.KEPT:
            report.notes.append(f"even without a fault the view is not right ({result.message}): is the adapter?")
            if result.deaf:
                report.tried = False
                return


def _verdicts(case: Case, result: Result) -> list[Verdict]:
    counts = {"missing": result.score.missing, "dead": result.score.dead} if any(result.score) else {}
    return [
        Verdict(
            CLAUSES[number],
            result.outcome,
            f"{case.title}: {result.message}" if result.message else case.title,
            case.level,
            result.evidence,
            case.name,
            counts,
        )
        for number in case.clauses
    ]


def table() -> list[tuple[str, str, str]]:
    """Return each case: its name, its clauses, what happens."""
    return [(case.name, ", ".join(case.clauses), re.sub(r"\s+", " ", case.title)) for case in CASES]
