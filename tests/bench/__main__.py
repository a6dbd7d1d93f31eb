"""``python -m tests.bench``: measure kvbus on this machine."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from kvbus.common import compiled

from . import asking, core, delivery, end_to_end, fanout, ingest, instructions, late, latency, state, workloads
from .processes import pin
from .render import render
from .report import Section, plain

SECTIONS: Final[dict[str, Callable[..., Section]]] = {
    "core": core.run,
    "compiled": instructions.run,
    "ingest": ingest.run,
    "end-to-end": end_to_end.run,
    "latency": latency.run,
    "late": late.run,
    "asking": asking.run,
    "ranks": fanout.run_ranks,
    "engine": fanout.run_engine,
    "fan-out": delivery.run_fan_out,
    "numbers": delivery.run_numbers,
    "aggregator": delivery.run_aggregator,
    "state": state.run,
    "workloads": workloads.run,
}


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def save(path: Path, section: Section, settings: dict[str, Any]) -> None:
    """Put one section's results into the file; those of other sections stay."""
    data = json.loads(path.read_text()) if path.exists() else {"sections": {}}
    data["sections"][section.name] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        **settings,
        **section.to_json(),
    }
    data["sections"] = {name: data["sections"][name] for name in SECTIONS if name in data["sections"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, type=click.Choice(list(SECTIONS)), help="These parts; all of them if left out.")
@click.option("--quick", is_flag=True, help="Small and short: does it work, and roughly.")
@click.option(
    "--runs", type=click.IntRange(1), default=5, show_default=True, help="Alternating runs of each measurement."
)
@click.option(
    "--traces",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Directory of request traces (*.jsonl in Mooncake's format) that drive simulated engines in `workloads`.",
)
@click.option(
    "--render", "rendering", is_flag=True, help="Measure nothing: write docs/bench/results.json into the docs."
)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Put the results into this file, part by part.")
def main(
    only: tuple[str, ...], out: Path | None, traces: Path | None, runs: int, *, quick: bool, rendering: bool
) -> None:
    """Measure kvbus beside what it is compared with, on this machine, now.

    \b
    Examples:
      python -m tests.bench --quick
      python -m tests.bench --only core --runs 3
      python -m tests.bench --json docs/bench/results.json && python -m tests.bench --render
    """
    if rendering:
        render()
        return
    pin()
    click.echo(f"the {compiled.core()} core is measured\n", err=True)
    for name in only or SECTIONS:
        if name == "compiled" and (lacks := instructions.lacking()):
            if only:
                raise click.UsageError(lacks)
            click.echo(f"compiled is left out: {lacks}\n", err=True)
            continue
        began = time.monotonic()
        more = {"traces": traces} if name == "workloads" else {}
        section = SECTIONS[name](quick=quick, runs=runs, **more)
        took = time.monotonic() - began
        click.echo(plain(section))
        click.echo(f"{name}: {took:.0f} s\n", err=True)
        if out is not None:
            counted = 1 if name == "compiled" else runs  # it needs no more
            settings = {"core": compiled.core(), "quick": quick, "runs": counted, "seconds": round(took)}
            save(out, section, settings)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
