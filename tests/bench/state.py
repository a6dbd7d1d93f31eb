"""What ``state_dir`` costs on the way of a batch: throughput with and without, through the real process."""

from __future__ import annotations

from typing import Final, NamedTuple

from .report import Section, Series, Table, Target
from .setups import Result, Setup
from .setups import run as run_setup
from .turns import alternate


class Case(NamedTuple):
    """A load, and how much of it comes before the clock starts."""

    load: str
    batches: int
    prefill: int
    about: str


CASES: Final = (
    Case("mix", 60_000, 120_000, "a full cache"),
    Case("8x8", 30_000, 0, "the first log of a new directory"),
    Case("1x1", 150_000, 0, "the first log of a new directory"),
)
"""Of ``mix`` two logs are full before the clock starts, and one more is while it runs: what follows is the same again."""


def run(*, quick: bool, runs: int) -> Section:
    """At saturation, which no engine reaches: each microsecond shows."""
    section = Section("state", "The write path of `state_dir`")
    table = Table(
        "As fast as it is taken", ["load", "", "`state_dir`", "batches/s", "spread", "CPU us a batch", "spread"]
    )
    for case in CASES:
        by = 10 if quick else 1
        found = alternate(
            f"state {case.load}",
            runs,
            [False, True],
            lambda kept, case=case, by=by: run_setup(
                Setup(
                    "kvbus",
                    case.load,
                    (case.prefill + case.batches) // by,
                    prefill=case.prefill // by,
                    state_dir=kept,
                )
            ),
        )
        for kept, results in found.items():
            rate = Series([each.batches / each.seconds for each in results])
            cpu = Series([each.cpu["relay"] / each.batches * 1e6 for each in results])
            kept_there = "yes" if kept else "no"
            table.add(case.load, case.about, kept_there, rate.median, rate.spread, cpu.median, cpu.spread)
        section.targets.append(
            Target(
                f"state-{case.load}",
                f"throughput that `state_dir` costs, load {case.load}, {case.about}",
                Series([_cost(*pair) for pair in zip(found[False], found[True], strict=True)], "%"),
                5.0,
            )
        )
    section.tables.append(table)
    return section


def _cost(without: Result, kept: Result) -> float:
    """Percent."""
    return (1 - without.seconds / kept.seconds) * 100
