"""What ``state_dir`` costs on the way of a batch: throughput with and without, through the real process."""

from __future__ import annotations

from typing import Final, NamedTuple

from .report import Section, Series, Table, Target
from .setups import Result, Setup, StateDir
from .setups import run as run_setup
from .turns import alternate


class Case(NamedTuple):
    """A load, and what there is before the clock starts."""

    load: str
    batches: int
    prefill: int
    directory: StateDir
    about: str
    bounded: bool = True


CASES: Final = (
    Case("mix", 60_000, 120_000, "new", "a full cache, dumps included"),
    Case("8x8", 28_000, 0, "used", "one log"),
    Case("1x1", 250_000, 0, "used", "one log"),
    Case("8x8", 28_000, 0, "new", "the first log of a new directory", bounded=False),
)
"""Of ``mix`` two logs are full before the clock starts, and one more is while it runs: what follows is the same again.
"One log" is less than it takes to rotate one."""

TURNS: Final = 2
"""For each run asked for: a few per cent are looked for, in runs of some seconds on a machine that others share."""


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
            runs * TURNS,
            [None, case.directory],
            lambda directory, case=case, by=by: run_setup(
                Setup(
                    "kvbus",
                    case.load,
                    (case.prefill + case.batches) // by,
                    prefill=case.prefill // by,
                    state_dir=directory,
                )
            ),
        )
        for directory, results in found.items():
            rate = Series([each.batches / each.seconds for each in results])
            cpu = Series([each.cpu["relay"] / each.batches * 1e6 for each in results])
            table.add(
                case.load, case.about, "yes" if directory else "no", rate.median, rate.spread, cpu.median, cpu.spread
            )
        if not case.bounded:
            continue
        section.targets.append(
            Target(
                f"state-{case.load}",
                f"throughput that `state_dir` costs, load {case.load}, {case.about}",
                Series([_cost(*pair) for pair in zip(found[None], found[case.directory], strict=True)], "%"),
                5.0,
            )
        )
    section.tables.append(table)
    return section


def _cost(without: Result, kept: Result) -> float:
    """Percent."""
    return (1 - without.seconds / kept.seconds) * 100
