"""``python -m tests.bench.worth``: what exact views are worth in prefill, in simulated time.

Every case and arm runs the same requests (paired by seed) through :class:`~tests.bench.fleet.Fleet`. Without a fault
every arm that knows the caches must choose and compute the same, request by request; a reader that gets the state must
never have a block that is not there, but while kvbus is away. Both are asserted in each run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, Final

import click

from .feeds import Bus, Direct
from .fleet import Arrival, Choice, Feed, Fleet, Load, Oracle, arrivals
from .processes import ROOT
from .render import DOCUMENT, into_document
from .report import Series, markdown_table

RESULTS: Final = ROOT / "docs" / "bench" / "worth.json"
README: Final = ROOT / "README.md"
BEGIN: Final = "<!-- rendered from docs/bench/worth.json: make bench-worth ARGS=--write -->"
END: Final = "<!-- end of the rendered table -->"

SEEDS: Final = 5

ARMS: Final[dict[str, Callable[[], Feed]]] = {
    "round robin": Feed,
    "the caches themselves": Oracle,
    "direct": partial(Direct, asks=False),
    "direct, asks": partial(Direct, asks=True),
    "kvbus": partial(Bus, "vllm", asks=False),
    "kvbus, asks": partial(Bus, "dynamo", asks=True),
}

TOUCHES: Final = {
    "": set[str](),
    "router": set(ARMS) - {"round robin", "the caches themselves"},
    "engine": set(ARMS),
    "kept": {"kvbus", "kvbus, asks"},
    "lost": {"kvbus", "kvbus, asks"},
}
"""Which arms a fault can change; the others ran the same requests without one."""

CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "nothing happens": ("", {}),
    "the router restarts": ("router", {}),
    "the router restarts, no prompt is shared": ("router", {"shared": 0}),
    "the router restarts, sessions of one or two turns": ("router", {"turns": (1, 2)}),
    "the router restarts, replay buffers reach back to the start": ("router", {"buffered": inf}),
    "an engine crashes": ("engine", {}),
    "kvbus is killed, with its state": ("kept", {}),
    "kvbus is killed, without it": ("lost", {}),
}
"""By what happens: the fault, and what differs of the load."""

SMALL: Final = Load(workers=3, blocks=300, seconds=120, fault_at=60, window=60, sessions=0.3, buffered=30)


def simulate(load: Load, feed: Feed, fault: str, requests: Sequence[Arrival]) -> list[Choice]:
    """One run."""
    fleet = Fleet(load, feed)
    if fault == "router":
        fleet.at(load.fault_at, lambda: feed.router_restarts(fleet.now))
    elif fault == "engine":
        fleet.at(load.fault_at, lambda: fleet.crash(0))
    elif fault:
        fleet.at(load.fault_at, feed.kvbus_killed)
        fleet.at(load.fault_at + load.away, lambda: feed.kvbus_back(fleet.now, state=fault == "kept"))
    return fleet.run(requests)


def summary(choices: Sequence[Choice], load: Load) -> dict[str, int]:
    """Tokens of the prompts and those computed, behind the fault and in all; blocks that were not there."""
    behind = [choice for choice in choices if load.fault_at <= choice.at < load.fault_at + load.window]
    return {
        "prompt": sum(choice.prompt for choice in behind),
        "computed": sum(choice.computed for choice in behind),
        "computed in all": sum(choice.computed for choice in choices),
        "mispredicted": sum(choice.mispredicted for choice in choices),
    }


def measure(base: Load, seeds: int) -> dict[str, dict[str, list[dict[str, int]]]]:
    """By case and arm, a summary for each seed."""
    found: dict[str, dict[str, list[dict[str, int]]]] = {case: {arm: [] for arm in ARMS} for case in CASES}
    for seed in range(1, seeds + 1):
        undisturbed: dict[Load, dict[str, list[Choice]]] = {}
        for case, (fault, changes) in CASES.items():
            load = replace(base, **changes)
            requests = arrivals(seed, load)
            if load not in undisturbed:
                undisturbed[load] = controls(load, requests, all_arms=not fault)
            for arm, make in ARMS.items():
                touched = arm in TOUCHES[fault]
                choices = simulate(load, make(), fault, requests) if touched else undisturbed[load][arm]
                found[case][arm].append(summary(choices, load))
    return found


def controls(load: Load, requests: Sequence[Arrival], *, all_arms: bool) -> dict[str, list[Choice]]:
    """The runs without a fault. Every arm that knows the caches must be the oracle's, choice by choice."""
    arms = list(ARMS) if all_arms else list(ARMS)[:2]
    runs = {arm: simulate(load, ARMS[arm](), "", requests) for arm in arms}
    for arm in arms[1:]:
        assert runs[arm] == runs["the caches themselves"], f"{arm} differs without a fault"
    return runs


# -- tables ------------------------------------------------------------------------------------------------------------


def shares(runs: list[dict[str, int]]) -> list[float]:
    """Percent of the prompt tokens that were computed behind the fault, by seed."""
    return [100 * run["computed"] / run["prompt"] for run in runs]


def extra(runs: list[dict[str, int]], than: list[dict[str, int]], what: str) -> Series:
    """How much more than others the runs computed, in percent of these; paired by seed."""
    return Series([100 * (run[what] / other[what] - 1) for run, other in zip(runs, than, strict=True)])


def signed(series: Series) -> str:
    """Median, and the range over the seeds."""
    low, middle, high = (f"{value:+.1f}" for value in (min(series.values), series.median, max(series.values)))
    middle, low, high = (value.replace("-0.0", "0.0").replace("+0.0", "0.0") for value in (middle, low, high))
    return middle if low == high else f"{middle} ({low} to {high})"


def full_tables(found: dict[str, dict[str, list[dict[str, int]]]]) -> str:
    """For docs/BENCHMARKS.md."""
    seeds = len(next(iter(found["nothing happens"].values())))
    lines = [f"Prompt tokens that were computed in the five minutes behind the fault, %, median of {seeds} seeds:", ""]
    rows = [[case, *(f"{median(shares(runs)):.1f}" for runs in arms.values())] for case, arms in found.items()]
    lines += [*markdown_table(["", *ARMS], rows), ""]
    lines += ["Computed more than by a router that sees the caches themselves, %, median and range of the pairs:", ""]
    others = list(ARMS)[2:]
    for title, what in (("behind the fault", "computed"), ("in all", "computed in all")):
        rows = [
            [case, *(signed(extra(arms[arm], arms["the caches themselves"], what)) for arm in others)]
            for case, arms in found.items()
        ]
        lines += [*markdown_table([title, *others], rows), ""]
    lines += ["Blocks that the router's view promised and the chosen worker did not have, all seeds together:", ""]
    rows = [
        [case, *(f"{sum(run['mispredicted'] for run in arms[arm]):,}" for arm in others)]
        for case, arms in found.items()
    ]
    return "\n".join([*lines, *markdown_table(["", *others], rows)])


def short_table(found: dict[str, dict[str, list[dict[str, int]]]]) -> str:
    """For README.md: what a user decides by."""
    cases = list(CASES)
    shown = (*cases[:2], "the router restarts, sessions of one or two turns", *cases[-2:])
    arms = {"round robin": "round robin", "KV-aware, direct": "direct", "KV-aware, through kvbus": "kvbus"}
    rows = [[case, *(f"{median(shares(found[case][arm])):.0f} %" for arm in arms.values())] for case in shown]
    return "\n".join(markdown_table(["prefill computed in the next five minutes", *arms], rows))


def render(results: Path = RESULTS, document: Path = DOCUMENT, readme: Path = README) -> None:
    """Write the tables anew."""
    found = json.loads(results.read_text())
    for path, table in ((document, full_tables(found)), (readme, short_table(found))):
        path.write_text(into_document(path.read_text(), table, BEGIN, END))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seeds", type=click.IntRange(1), default=SEEDS, show_default=True, help="Paired runs of each case.")
@click.option("--quick", is_flag=True, help="Small and short: does it work.")
@click.option("--write", is_flag=True, help="Write docs/bench/worth.json and the tables of README.md and the docs.")
def main(seeds: int, *, quick: bool, write: bool) -> None:
    """Simulate a fleet with each kind of router and each fault; print what was computed again."""
    if write and (quick or seeds != SEEDS):
        raise click.UsageError(f"what is written comes from the whole run of {SEEDS} seeds")
    found = measure(SMALL if quick else Load(), seeds)
    click.echo(f"{full_tables(found)}\n\n{short_table(found)}")
    if write:
        lines = (f"{json.dumps(case)}: {json.dumps(arms)}" for case, arms in found.items())
        RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        render()


if __name__ == "__main__":
    main()
