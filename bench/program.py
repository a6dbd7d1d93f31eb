"""The command line of a set of benchmarks."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import click

from . import report, worth
from .process import CORES, LOAD_CORE, ROOT

Benchmark = Callable[..., report.Result]


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


def program(name: str, path: Path, benchmarks: dict[str, Benchmark]) -> click.Command:
    """Return the command that runs benchmarks and saves their results.

    Args:
        name: name of the Python module, for the examples of the help.
        path: file of the results.
        benchmarks: the benchmarks by name.
    """

    @click.command(
        context_settings={"help_option_names": ["-h", "--help"]},
        help=f"""Measure kvbus, and the programs that it is compared with, on this machine.

        \b
        Examples:
          python -m {name} --quick
          python -m {name} --only {next(iter(benchmarks))}
          python -m {name} --write
        """,
    )
    @click.option("--only", multiple=True, type=click.Choice(list(benchmarks)), help="Run only these benchmarks.")
    @click.option(
        "--quick", is_flag=True, help="Small and short runs, to see whether they work. The results are rough."
    )
    @click.option("--runs", type=click.IntRange(1), help="Alternating runs. By default 5, or 1 with --quick.")
    @click.option("--write", is_flag=True, help=f"Write docs/bench/{path.name} and the tables of docs/BENCHMARKS.md.")
    @click.option(
        "--render", is_flag=True, help="Measure nothing, and write the tables from the results in docs/bench."
    )
    @click.option("--check", is_flag=True, help="Measure nothing, and fail if the tables differ from docs/bench.")
    def main(only: tuple[str, ...], runs: int | None, *, quick: bool, write: bool, render: bool, check: bool) -> None:
        if write and quick:
            raise click.UsageError("--write needs complete runs: leave out --quick")
        if render or check:
            pages = worth.pages()
            if check and (stale := [page.name for page, text in pages.items() if page.read_text() != text]):
                raise click.ClickException(
                    f"not the tables of docs/bench: {', '.join(stale)}; make bench ARGS=--render"
                )
            for page, text in pages.items():
                page.write_text(text)
            return
        os.sched_setaffinity(0, {LOAD_CORE})
        missed = 0
        for each in only or benchmarks:
            began, others = time.monotonic(), others_seconds()
            count = runs or (1 if quick else 5)
            result = benchmarks[each](quick=quick, runs=count)
            result.date, result.commit, result.runs = time.strftime("%Y-%m-%d"), commit(), count
            seconds = time.monotonic() - began
            result.machine, result.seconds = machine(), round(seconds)
            result.others = max(0, round((others_seconds() - others) / seconds / len(CORES) * 100))
            missed += sum(not bound.met for bound in result.bounds)
            click.echo(report.plain(result))
            click.echo(f"{each}: {result.seconds} s, others used {result.others} % of the machine\n", err=True)
            if write:
                report.save(path, each, result, list(benchmarks))
        if write:
            report.PAGE.write_text(report.page())
        click.echo(f"{missed} bounds were not met" if missed else "every bound was met")

    return main
