"""Measure how many prompt tokens workers need not compute because the router's views are exact, in simulated time.

Run it with ``python -m bench.worth``. Each case (a fault) and each arm (a way to get the view) runs the same requests
through :class:`~bench.fleet.Fleet`, for several seeds. Each run asserts two things. Without a fault, every arm that
considers prefixes makes the same choices as the arm that reads the caches directly. A router of kvbus never counts on a
block that its worker does not have, except while kvbus is down.
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
from .process import ROOT
from .report import PAGE, markdown, page, put

RESULTS: Final = ROOT / "docs" / "bench" / "worth.json"
BEGIN: Final = "<!-- rendered from docs/bench/worth.json: make bench-worth ARGS=--write -->"
END: Final = "<!-- end of the rendered table -->"

SEEDS: Final = 5

ARMS: Final[dict[str, Callable[[], Feed]]] = {
    "round robin": Feed,
    "the true caches": Oracle,
    "engines' events": partial(Direct, asks=False),
    "engines' events and a replay": partial(Direct, asks=True),
    "kvbus": partial(Bus, "vllm", asks=False),
    "kvbus and a replay": partial(Bus, "dynamo", asks=True),
}

TOUCHES: Final = {
    "": set[str](),
    "router": set(ARMS) - {"round robin", "the true caches"},
    "engine": set(ARMS),
    "kept": {"kvbus", "kvbus and a replay"},
    "lost": {"kvbus", "kvbus and a replay"},
}
"""The arms that each fault can affect. The other arms run once without a fault, for all faults."""

CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "nothing happens": ("", {}),
    "the router restarts": ("router", {}),
    "the router restarts; sessions share no prompt": ("router", {"shared": 0}),
    "the router restarts; sessions have one or two turns": ("router", {"turns": (1, 2)}),
    "the router restarts; the engines' replay buffers have all batches": ("router", {"buffered": inf}),
    "an engine crashes": ("engine", {}),
    "kvbus is killed, and loads its state from disk": ("kept", {}),
    "kvbus is killed, and has no state on disk": ("lost", {}),
}
"""The fault of each case, and the fields of ``Load`` that the case changes."""

SMALL: Final = Load(workers=3, blocks=300, seconds=120, fault_at=60, window=60, sessions=0.3, buffered=30)

Runs = dict[str, dict[str, list[dict[str, int]]]]
"""A summary of each seed's run, by case and arm."""


def simulate(load: Load, feed: Feed, fault: str, requests: Sequence[Arrival]) -> list[Choice]:
    """Simulate an arm with a fault, and return the router's choices."""
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
    """Return the tokens after the fault and in the complete run, and the blocks that the chosen worker did not have."""
    after = [choice for choice in choices if load.fault_at <= choice.at < load.fault_at + load.window]
    return {
        "prompt": sum(choice.prompt for choice in after),
        "computed": sum(choice.computed for choice in after),
        "computed in all": sum(choice.computed for choice in choices),
        "mispredicted": sum(choice.mispredicted for choice in choices),
    }


def measure(base: Load, seeds: int) -> Runs:
    """Simulate every case and every arm with each seed, and return the summaries."""
    found: Runs = {case: {arm: [] for arm in ARMS} for case in CASES}
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
    """Simulate arms without a fault, and return the router's choices in each.

    Check that every arm that considers prefixes chooses like the arm that reads the caches directly.
    """
    arms = list(ARMS) if all_arms else list(ARMS)[:2]
    runs = {arm: simulate(load, ARMS[arm](), "", requests) for arm in arms}
    for arm in arms[1:]:
        assert runs[arm] == runs["the true caches"], f"{arm} differs without a fault"
    return runs


def share(runs: list[dict[str, int]]) -> float:
    """Return the median percentage of prompt tokens that were computed after the fault."""
    return median(100 * run["computed"] / run["prompt"] for run in runs)


def full_table(found: Runs) -> str:
    """Return the table of simulated cases for docs/BENCHMARKS.md."""
    rows = [[case, *(f"{share(runs):.1f}" for runs in arms.values())] for case, arms in found.items()]
    return markdown(
        ["share of prompt tokens that workers had to compute in the five minutes after the fault, %", *ARMS], rows
    )


def pages() -> dict[Path, str]:
    """Return docs/BENCHMARKS.md with the table of the saved results."""
    found = json.loads(RESULTS.read_text())
    return {PAGE: put(page(), full_table(found), BEGIN, END)}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seeds", type=click.IntRange(1), default=SEEDS, show_default=True, help="Paired runs of each case.")
@click.option("--quick", is_flag=True, help="Small and short runs, to see whether they work.")
@click.option("--write", is_flag=True, help="Write docs/bench/worth.json and the table of docs/BENCHMARKS.md.")
def main(seeds: int, *, quick: bool, write: bool) -> None:
    """Simulate a fleet with each kind of router and each fault, and print how much prefill was computed."""
    if write and (quick or seeds != SEEDS):
        raise click.UsageError(f"--write needs a complete run with {SEEDS} seeds")
    found = measure(SMALL if quick else Load(), seeds)
    click.echo(full_table(found))
    if write:
        lines = (f"{json.dumps(case)}: {json.dumps(arms)}" for case, arms in found.items())
        RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        for path, text in pages().items():
            path.write_text(text)


if __name__ == "__main__":
    main()
