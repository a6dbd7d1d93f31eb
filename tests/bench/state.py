"""What ``state_dir`` costs on the way of a batch: throughput with and without, through the real process."""

from __future__ import annotations

from .report import Section, Series, Table, Target
from .setups import Result, Setup
from .setups import run as run_setup
from .turns import alternate


def run(*, quick: bool, runs: int) -> Section:
    """At saturation, which no engine reaches: each microsecond shows."""
    section = Section("state", "The write path of `state_dir`")
    table = Table("As fast as it is taken", ["load", "`state_dir`", "batches/s", "spread", "CPU us a batch", "spread"])
    for load, batches in (("8x8", 3000 if quick else 30_000), ("1x1", 20_000 if quick else 150_000)):
        found = alternate(
            f"state {load}",
            runs,
            [False, True],
            lambda kept, load=load, batches=batches: run_setup(Setup("kvbus", load, batches, state_dir=kept)),
        )
        for kept, results in found.items():
            rate = Series([each.batches / each.seconds for each in results])
            cpu = Series([each.cpu["relay"] / each.batches * 1e6 for each in results])
            table.add(load, "yes" if kept else "no", rate.median, rate.spread, cpu.median, cpu.spread)
        section.targets.append(
            Target(
                f"state-{load}",
                f"throughput that `state_dir` costs, load {load}",
                Series([_cost(*pair) for pair in zip(found[False], found[True], strict=True)], "%"),
                5.0,
            )
        )
    section.tables.append(table)
    return section


def _cost(without: Result, kept: Result) -> float:
    """Percent."""
    return (1 - without.seconds / kept.seconds) * 100
