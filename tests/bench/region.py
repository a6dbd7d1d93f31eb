"""``python -m tests.bench.region kafka``: a fleet of engines through leaves, a log and two aggregators to 16 routers.

Each engine has a leaf of its own: a ``kvbus run`` beside it whose output is the log. Two ``kvbus run`` read the log and
serve half of the routers each, unmodified ones, which get the state when they subscribe. All of it is one machine's,
and nothing is pinned. What each process and each hop takes is measured over some seconds at some rates; then routers go
from one aggregator to the other and back while engines publish; then a router begins, an aggregator is killed and
started again, and both with all routers. After each of these every router must hold what every engine holds.

The model (:mod:`tests.bench.region_model`) is fitted on the smaller fleets and has to predict the larger ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import click

from .__main__ import machine
from .many_routers import Exact
from .processes import fine_cpu_seconds, many_descriptors
from .rebuild import SERVERS
from .region_model import ROUTERS
from .region_processes import Fleet, Region, scraped
from .region_tables import RESULTS, render

SETTLE: Final = 3.0
"""Seconds of a rate before it is looked at."""

FLEETS: Final = (
    Fleet(10, 1000, 8, (1.0, 4.0)),
    Fleet(10, 4000, 32, (1.0, 4.0)),
    Fleet(10, 2000, 16, (10.0, 20.0)),
    Fleet(30, 1000, 8, (1.0, 3.0)),
    Fleet(30, 4000, 32, (1.0, 3.0)),
    Fleet(60, 3000, 8, (2.0,)),
    Fleet(100, 2000, 16, (1.0,)),
)
"""The last two are predicted from the others; that of 60 was measured when the model was made, and changed nothing of it."""


def switched(region: Region, rate: float, seconds: float) -> list[dict[str, Any]]:
    """Routers go to the other aggregator and back while engines publish; what one aggregator takes with all of them."""
    region.run(rate)
    time.sleep(SETTLE)
    region.tell("go", region.half(1), region.out[0])
    time.sleep(SETTLE)
    found = [region.window(seconds, (ROUTERS, 0))]
    region.tell("go", range(ROUTERS), region.out[1])
    time.sleep(SETTLE)
    region.tell("go", region.half(0), region.out[0])
    time.sleep(1.0)
    region.exact(range(ROUTERS), region.pause())
    region.heard()
    return found


def recovered(region: Region, rate: float, runs: int) -> dict[str, list[dict[str, float]]]:
    """Seconds until a router, an aggregator's routers, and all of a region are exact again."""
    found: dict[str, list[dict[str, float]]] = {"router": [], "aggregator": [], "region": []}

    def told(what: str, began: float, exact: list[Exact], cpu: dict[str, float]) -> None:
        last = max(exact, key=lambda each: each.at)
        after = {role: sum(map(fine_cpu_seconds, pids)) for role, pids in region.pids().items()}
        row = {"seconds": last.at - began, "load": os.getloadavg()[0]}
        row |= {f"cpu {role}": after[role] - cpu.get(role, 0.0) for role in ("broker", "aggregator", "router")}
        found[what].append(row | {"journal": scraped(region.http[0])["kvbus_output_journal_bytes"]})

    def cpu(*roles: str) -> dict[str, float]:
        return {role: sum(map(fine_cpu_seconds, pids)) for role, pids in region.pids().items() if role in roles}

    for _ in range(runs):
        truth, began, used = region.pause(), time.monotonic(), cpu("broker", "aggregator", "router")
        region.tell("begin", [ROUTERS], region.out[0])
        told("router", began, region.exact([ROUTERS], truth), used)
        region.tell("end", [ROUTERS])
    for _ in range(runs):
        region.kill(0)
        region.run(rate)
        time.sleep(1.0)
        truth = region.pause()
        region.exact(region.half(1), truth)
        used = cpu("broker", "router") | {"aggregator": fine_cpu_seconds(region.aggregators[1].pid)}
        began = time.monotonic()
        region.restart(0)
        told("aggregator", began, region.exact(region.half(0), truth), used)
        region.heard()
    for _ in range(runs):
        for number in range(2):
            region.kill(number)
        region.tell("end", range(ROUTERS))
        region.run(rate)
        time.sleep(1.0)
        truth, used, began = region.pause(), cpu("broker", "router"), time.monotonic()
        for number in range(2):
            region.restart(number)
            region.tell("begin", region.half(number), region.out[number])
        told("region", began, region.exact(range(ROUTERS), truth), used)
        region.heard()
    return found


def measured(fleet: Fleet, log: str, seconds: float, runs: int) -> dict[str, Any]:
    """One fleet, from nothing to its end."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbus-region-")))
        began = time.monotonic()
        region = Region(fleet, log, directory, stack)

        def told(what: str) -> None:
            click.echo(
                f"  {fleet}: {what} at {time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}", err=True
            )

        region.start()
        told("started, and exact")
        windows = []
        for rate in fleet.rates:
            region.run(rate)
            time.sleep(SETTLE)
            even = (ROUTERS // 2, ROUTERS // 2)
            windows += [{"rate": rate, **region.window(seconds, even)} for _ in range(runs)]
            region.exact(range(ROUTERS), region.pause())
        told("rates")
        windows += [{"rate": fleet.rates[-1], **each} for each in switched(region, fleet.rates[-1], seconds)]
        again = sum(each.again for each in region.heard().values())
        told("switched")
        recoveries = recovered(region, fleet.rates[-1], runs)
        told("recovered")
        region.end()
        return {
            **fleet._asdict(),
            "log": log,
            "filled bytes": region.filled,
            "dropped": again,
            "windows": windows,
            "recoveries": recoveries,
        }


def save(path: Path, log: str, run: dict[str, Any]) -> None:
    """Put one fleet into the file, in the place of what was known of it."""
    found = json.loads(path.read_text()) if path.exists() else {}
    known = {(each["engines"], each["blocks"]): each for each in found.get(log, {"runs": []})["runs"]}
    known[run["engines"], run["blocks"]] = run
    runs = [known[key] for key in sorted(known)]
    found[log] = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "runs": runs}
    path.write_text(json.dumps(found, indent=1) + "\n")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("log", type=click.Choice(list(SERVERS)), required=False)
@click.option("--engines", multiple=True, type=int, help="Fleets of so many engines; all fleets if left out.")
@click.option("--seconds", type=float, default=15.0, show_default=True, help="Of a window.")
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Windows and recoveries of a kind.")
@click.option("--json", "out", type=click.Path(path_type=Path), default=RESULTS, help="Put the fleets into this file.")
@click.option(
    "--render", "rendering", is_flag=True, help="Measure nothing: write docs/bench/region.json into the docs."
)
def main(log: str | None, engines: tuple[int, ...], seconds: float, runs: int, out: Path, *, rendering: bool) -> None:
    """Measure fleets through one real log: ten minutes of a machine with two cores and 16 GiB."""
    if rendering:
        render()
        return
    if log is None:
        raise click.UsageError(f"which log? One of {', '.join(SERVERS)}")
    many_descriptors()
    for fleet in FLEETS:
        if not engines or fleet.engines in engines:
            save(out, log, measured(fleet, log, seconds, runs))


if __name__ == "__main__":
    main()
