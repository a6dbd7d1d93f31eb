"""Format the results of the tests with a real engine as the tables of docs/REAL-ENGINE.md."""

from __future__ import annotations

import datetime as dt
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .outcome import ARRIVAL
from .routing import DIRECTLY, THROUGH_KVBUS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .outcome import Outcome
    from .routing import Routed

ROOT: Final = Path(__file__).parents[2]
DOCUMENT: Final = ROOT / "docs" / "REAL-ENGINE.md"
MEASURED: Final = (
    "requests of which the router knew a prefix",
    "requests sent to the engine with the longest prefix",
    "the same, after the router's restart",
    "prompt tokens from the cache",
    "the largest possible share of tokens from the cache",
)
HEAD: Final = (
    "engine",
    "case",
    "quiet points",
    "blocks in the pool",
    "blocks of which the engine has copies",
    "removed blocks",
    "kvbus: missing / dead",
    "late router: missing / dead",
    "early router: missing / dead",
)
BEGIN: Final = "<!-- everything below is written by `make real-engine` -->"


def write(outcomes: Sequence[Outcome], routed: Sequence[Routed], kvbus: str, engine: str, router: str) -> None:
    """Replace the results in docs/REAL-ENGINE.md, which are below a marker comment.

    ``kvbus``, ``engine`` and ``router`` are version numbers.
    """
    head, begin, _ = DOCUMENT.read_text().partition(BEGIN)
    assert begin, f"no line {BEGIN!r} in {DOCUMENT}"
    DOCUMENT.write_text(head + "\n\n".join([BEGIN, *sections(outcomes, routed, kvbus, engine, router)]) + "\n")


def sections(outcomes: Sequence[Outcome], routed: Sequence[Routed], kvbus: str, engine: str, router: str) -> list[str]:
    today = dt.datetime.now(dt.UTC).date()
    exact = sum(outcome.exact for outcome in outcomes)
    run = f"Measured on {today}: kvbus {kvbus}, vLLM {engine} on {platform.machine()}, vLLM router {router}"
    return [
        f"{run}, Python {platform.python_version()}.",
        "## The engine's block pool, kvbus and its routers",
        f"In {exact} of {len(outcomes)} cases, kvbus and its routers held exactly the pool's blocks at each quiet point.",
        "\n".join(
            [
                f"| {' | '.join(HEAD)} |",
                "|---|---|--:|--:|--:|--:|--:|--:|--:|",
                *map(case_row, outcomes),
            ]
        ),
        "\n".join(
            f"* **{outcome.engine}, {outcome.case}:** {each}" for outcome in outcomes for each in remarks(outcome)
        ),
        "## The vLLM router, directly and through kvbus",
        "\n".join(
            [
                f"| does the router restart? | whose events it reads | {' | '.join(MEASURED)} |",
                "|---|---|--:|--:|--:|--:|--:|",
                *(
                    routing_row(restart, events, routed)
                    for restart in (False, True)
                    for events in (DIRECTLY, THROUGH_KVBUS)
                ),
            ]
        ),
    ]


def case_row(outcome: Outcome) -> str:
    points = outcome.points
    scores = [outcome.worst(who) for who in ("kvbus", "late router", "early router")]
    cells = [
        outcome.engine,
        outcome.case,
        len(points),
        max((point.blocks for point in points), default=0),
        max((point.copied for point in points), default=0),
        # at arrival, the early router reads old removals
        sum(point.removed for point in points if point.what != ARRIVAL),
        *("-" if score is None else score for score in scores),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def remarks(outcome: Outcome) -> list[str]:
    differing = [f"not equal: {point}" for point in outcome.points if not point.exact]
    failed = [f"failed: {' '.join(outcome.failure.split())}"] if outcome.failure else []
    return [*differing, *outcome.notes, *failed]


def routing_row(restart: bool, events: str, routed: Sequence[Routed]) -> str:
    """Return the table row for all runs in which the router reads the same events (the engine's or kvbus's).

    ``restart`` selects the runs in which the router restarts, or the runs in which it does not.
    """
    runs = [run for run in routed if (run.restart, run.events) == (restart, events)]

    def total(name: str) -> int:
        return sum(getattr(run, name) for run in runs)

    prompts = max(total("prompts"), 1)
    cells = [
        "yes" if restart else "no",
        events,
        f"{total('credited')} of {total('requests')}",
        f"{total('landed')} of {total('held')}",
        f"{total('landed_after')} of {total('held_after')}" if restart else "-",
        f"{total('cached') / prompts:.0%}",
        f"{total('best') / prompts:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def commit() -> str:
    """Return the git description of the commit of kvbus that is tested."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def version(python: Path, package: str) -> str:
    """Return the version of a package in another Python environment."""
    command = [str(python), "-c", f"import importlib.metadata as m; print(m.version({package!r}))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
