"""Measure kvbus on this machine: ``python -m bench``."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click

from . import benchmarks, report, worth
from .process import CORES, LOAD_CORE, ROOT

BENCHMARKS: Final[dict[str, Callable[..., report.Result]]] = {
    each.__name__: each
    for each in (
        benchmarks.ranks,
        benchmarks.saturation,
        benchmarks.latency,
        benchmarks.late,
        benchmarks.routers,
        benchmarks.sources,
        benchmarks.memory,
        benchmarks.start,
        benchmarks.state,
    )
}


def machine() -> str:
    """Return a description of this machine for the results of benchmarks."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {len(CORES)} cores, Linux {platform.release()}, Python {platform.python_version()}"


def others_seconds() -> float:
    """Return the CPU seconds that all other processes have used so far, on all cores."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    busy = sum(fields) - fields[3] - fields[4]  # the sum without idle and iowait
    return busy / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def commit() -> str:
    """Return the last commit that changed kvbus, with a plus if there are uncommitted changes."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("log", "-1", "--format=%h", "--abbrev=10", "--", "kvbus") + "+" * bool(
        git("status", "-s", "--", "kvbus")
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, type=click.Choice(list(BENCHMARKS)), help="Run only these benchmarks.")
@click.option("--quick", is_flag=True, help="Small and short runs, to see whether they work. The results are rough.")
@click.option("--runs", type=click.IntRange(1), help="Alternating runs. By default 5, or 1 with --quick.")
@click.option("--write", is_flag=True, help="Write docs/bench/results.json and the tables of docs/BENCHMARKS.md.")
@click.option("--render", is_flag=True, help="Measure nothing, and write the tables from the results in docs/bench.")
@click.option("--check", is_flag=True, help="Measure nothing, and fail if the tables differ from docs/bench.")
def main(only: tuple[str, ...], runs: int | None, *, quick: bool, write: bool, render: bool, check: bool) -> None:
    """Measure kvbus, and the relays that it is compared with, on this machine.

    \b
    Examples:
      python -m bench --quick
      python -m bench --only late --only memory
      python -m bench --write
    """
    if write and quick:
        raise click.UsageError("--write needs complete runs: leave out --quick")
    if render or check:
        pages = worth.pages()
        if check and (stale := [path.name for path, text in pages.items() if path.read_text() != text]):
            raise click.ClickException(f"not the tables of docs/bench: {', '.join(stale)}; make bench ARGS=--render")
        for path, text in pages.items():
            path.write_text(text)
        return
    os.sched_setaffinity(0, {LOAD_CORE})
    missed = 0
    for name in only or BENCHMARKS:
        began, others = time.monotonic(), others_seconds()
        count = runs or (1 if quick else 5)
        result = BENCHMARKS[name](quick=quick, runs=count)
        result.date, result.commit, result.runs = time.strftime("%Y-%m-%d"), commit(), count
        seconds = time.monotonic() - began
        result.machine, result.seconds = machine(), round(seconds)
        result.others = max(0, round((others_seconds() - others) / seconds / len(CORES) * 100))
        missed += sum(not bound.met for bound in result.bounds)
        click.echo(report.plain(result))
        click.echo(f"{name}: {result.seconds} s, others used {result.others} % of the machine\n", err=True)
        if write:
            report.save(name, result, list(BENCHMARKS))
    if write:
        report.PAGE.write_text(report.page())
    click.echo(f"{missed} bounds were not met" if missed else "every bound was met")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
