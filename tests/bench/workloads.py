"""Every load through everything: batches a second and CPU time a batch, one and many routers, one and eight ranks.

Recorded loads come first: each family through kvbus and through the naive relay, with a full cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from .loads import load_named
from .recorded import FAMILIES, NARROWED, shape_of
from .report import Section, Series, Table, ratios
from .setups import BETWEEN, Between, Result, Setup, with_a_cache
from .setups import run as run_setup
from .turns import alternate


@dataclass(frozen=True)
class Case:
    """A row: a load, its batches (of each rank), and who takes part."""

    load: str
    batches: int
    routers: int = 1
    ranks: int = 1

    @property
    def name(self) -> str:
        """As printed; of a trace its file's name alone."""
        return Path(self.load.removeprefix("trace:")).stem if self.load.startswith("trace:") else self.load


def cases(traces: Path | None, *, quick: bool) -> list[Case]:
    """The matrix, with a row for each request trace."""
    by = 1 if quick else 8
    simulated = ["sim"] if traces is None else ["sim", *(f"trace:{path}" for path in sorted(traces.glob("*.jsonl")))]
    return [
        Case("1x1", 20_000 * by),
        Case("8x8", 2000 * by),
        Case("1x64", 2000 * by),
        Case("mix", 2000 * by),
        *(Case(load, 500 if quick else 1000) for load in simulated),  # each run has to simulate them first
        Case("8x8", 1000 * by, routers=8),
        Case("8x8", 200 * by, routers=64),
        Case("8x8", 300 * by, ranks=8),
        Case("1x1", 2000 * by, routers=8, ranks=8),
    ]


def run(*, quick: bool, runs: int, traces: Path | None = None) -> Section:
    """Recorded loads, then all of the matrix."""
    section = Section("workloads", "Every load")
    families = list(FAMILIES)[:: 3 if quick else 1]
    section.tables.append(_recorded(families, runs, batches=500 if quick else 40_000))
    table = Table(
        "As fast as they are taken: batches/s, CPU us a batch of the relay's process, and kvbus's rate by each other's",
        [
            "load",
            "routers",
            "ranks",
            "",
            "batches/s",
            "spread",
            "CPU us a batch",
            "kvbus's rate by this one's",
            "spread",
        ],
    )
    for case in cases(traces, quick=quick):
        title = f"{case.name}, {case.routers} routers, {case.ranks} ranks"
        found = alternate(title, runs, BETWEEN, lambda between, case=case: _measure(case, between))
        _same_state(case, found)
        ours = [each.batches / each.seconds for each in found["kvbus"]]
        for between, results in found.items():
            rate = [each.batches / each.seconds for each in results]
            cpu = Series([each.cpu.get("relay", 0.0) / each.batches * 1e6 for each in results])
            ratio = ratios(ours, rate)
            told = ("", "") if between == "kvbus" else (ratio.median, ratio.spread)
            first = (case.name, case.routers, case.ranks) if between == BETWEEN[0] else ("", "", "")
            table.add(*first, between, Series(rate).median, Series(rate).spread, cpu.median, *told)
    section.tables.append(table)
    return section


def _recorded(families: list[str], runs: int, *, batches: int) -> Table:
    table = Table(
        "Recorded traffic with a full cache, as fast as it is taken",
        ["family", "", "batches/s", "spread", "blocks/s", "CPU us a batch", "spread", "kvbus's rate by this one's"],
    )
    between: list[Between] = ["naive", "kvbus"]
    for family in families:
        shape, loop = shape_of(family), load_named(family).loop
        setup = with_a_cache(Setup("kvbus", family, max(batches // loop, 1) * loop, verify=True))
        found = alternate(family, runs, between, lambda who, setup=setup: run_setup(replace(setup, between=who)))
        for who, results in found.items():
            rate = Series([each.batches / each.seconds for each in results])
            cpu = Series([each.cpu["relay"] / each.batches * 1e6 for each in results])
            ratio = ratios([each.batches / each.seconds for each in found["kvbus"]], rate.values).median
            first = family if who == between[0] else ""
            blocks = rate.median * shape.events * shape.blocks
            told = "" if who == "kvbus" else ratio
            table.add(first, who, rate.median, rate.spread, blocks, cpu.median, cpu.spread, told)
        held = {
            who: {(each.heard[0].live, each.heard[0].live_sum) for each in results} for who, results in found.items()
        }
        if any(len(states) != 1 for states in held.values()):
            raise RuntimeError(f"{family}: the router held different blocks from run to run: {held}")
        if family not in NARROWED and held["naive"] != held["kvbus"]:
            raise RuntimeError(f"{family}: the router held different blocks behind kvbus: {held}")
    return table


def _measure(case: Case, between: Between) -> Result:
    return run_setup(Setup(between, case.load, case.batches, case.routers, case.ranks, verify=case.routers == 1))


def _same_state(case: Case, found: dict[Between, list[Result]]) -> None:
    """Whatever is between: the routers receive every batch, and hold the same blocks in the end.

    Simulated engines store copies; a batch of which nothing else is left goes no further than kvbus.

    Raises:
        RuntimeError: they do not.
    """
    if case.load in ("1x1", "8x8", "1x64", "mix"):
        for between, results in found.items():
            if any(each.batches != case.batches for result in results for each in result.heard):
                raise RuntimeError(f"{case}: batches are missing through {between}")
    held = {
        (between, tuple((each.live, each.live_sum) for each in result.heard))
        for between, results in found.items()
        for result in results
    }
    if len({states for _, states in held}) != 1:
        raise RuntimeError(f"{case}: routers hold different blocks: {held}")
