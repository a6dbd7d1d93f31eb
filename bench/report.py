"""Show the results of benchmarks and their bounds: as JSON, on a terminal, and in docs/BENCHMARKS.md."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from .process import ROOT

PAGE: Final = ROOT / "docs" / "BENCHMARKS.md"
RESULTS: Final = ROOT / "docs" / "bench" / "results.json"
PATH: Final = ROOT / "docs" / "bench" / "path.json"
BEGIN: Final = {
    RESULTS: "<!-- rendered from bench/results.json: make bench ARGS=--render -->",
    PATH: "<!-- rendered from bench/path.json: make bench ARGS=--render -->",
}
"""The first line of each rendered part of :data:`PAGE`, by the file that has its results."""

QUIET: Final = 5
"""Maximum percentage of all cores that other processes may use. Above it, times and missed bounds prove nothing."""

END: Final = "<!-- end of the rendered part -->"


class Bound(msgspec.Struct):
    """A limit that was chosen before the measurement, and the measured values, whose median must not exceed it."""

    what: str
    limit: float
    unit: str
    values: list[float]
    reason: str = ""
    """Why the bound may not be met; empty without a reason."""
    before: str = ""
    """The median and the date of the previous result that was measured on a quiet machine."""

    @property
    def met(self) -> bool:
        """Whether the median of the values is within the limit."""
        return median(self.values) <= self.limit


class Table(msgspec.Struct):
    """A result's table of text cells."""

    columns: list[str]
    rows: list[list[str]]


class Result(msgspec.Struct):
    """A benchmark's result, with its date, machine and commit."""

    title: str
    bounds: list[Bound]
    table: Table
    date: str = ""
    commit: str = ""
    machine: str = ""
    runs: int = 0
    seconds: int = 0
    others: int = 0
    """Percentage of all cores that other processes used during the benchmark."""


def number(value: float) -> str:
    """Return a number with three significant digits, with commas between thousands."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def told(values: list[float], unit: str = "") -> str:
    """Return the median as text, with the range if there are several values."""
    text = f"{number(median(values))} {unit}".rstrip()
    return text if len(values) == 1 else f"{text} ({number(min(values))} to {number(max(values))})"


def ratios(values: list[float], others: list[float]) -> list[float]:
    """Return the ratio of two values for each run."""
    return [one / other for one, other in zip(values, others, strict=True)]


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table whose columns after the first are aligned to the right."""
    head, *lines = ["| " + " | ".join(line) + " |" for line in (columns, *rows)]
    return "\n".join([head, "|---|" + "--:|" * (len(columns) - 1), *lines])


def bounds_table(results: list[Result]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of a table of bounds and measured values."""
    rows = [
        [
            bound.what,
            f"≤ {bound.limit:g} {bound.unit}".rstrip(),
            told(bound.values),
            _judged(bound, busy=result.others > QUIET),
            bound.before,
        ]
        for result in results
        for bound in result.bounds
    ]
    return ["what is measured", "bound", "measured", "is the bound met?", "last result from a quiet machine"], rows


def _judged(bound: Bound, *, busy: bool) -> str:
    """Return whether a bound is met, with the reason if it is not."""
    judged = "met" if bound.met else f"**not met**: {bound.reason}" if bound.reason else "**not met**"
    return judged + ", on a busy machine" * (busy and bool(bound.unit))


def plain(result: Result) -> str:
    """Return a result as text for a terminal."""
    columns, rows = bounds_table([result])
    tables = [[columns, *rows]] if rows else []
    tables.append([result.table.columns, *result.table.rows])
    lines = [result.title]
    for table in tables:
        widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
        lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join(lines) + "\n"


def load(path: Path) -> dict[str, Result]:
    """Return the results in a file by the benchmarks' names."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Result]) if path.exists() else {}


def save(path: Path, name: str, result: Result, order: list[str]) -> None:
    """Save a benchmark's result in a file. Each bound also keeps its previous value from a quiet machine."""
    results = load(path)
    before = results.get(name, result)
    earlier = {bound.what: bound for bound in before.bounds if before is not result}
    for bound in result.bounds:
        if bound.what in earlier:
            told_before = f"{number(median(earlier[bound.what].values))} ({before.date})"
            bound.before = earlier[bound.what].before if before.others > QUIET else told_before
    results[name] = result
    data: dict[str, Any] = {each: msgspec.to_builtins(results[each]) for each in order if each in results}
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def tables(results: list[Result]) -> str:
    """Return the generated part of docs/BENCHMARKS.md."""
    machines = "; ".join(sorted({result.machine for result in results}))
    parts = [f"All benchmarks ran on this machine: {machines}.", markdown(*bounds_table(results))]
    for result in results:
        about = f"Measured on {result.date} with commit `{result.commit}` in {result.runs} runs"
        others = f"Other processes used {result.others} % of the machine's CPU time."
        parts += [f"### {result.title}", markdown(result.table.columns, result.table.rows), f"{about}. {others}"]
    return "\n\n".join(parts)


def put(text: str, rendered: str, begin: str, end: str = END) -> str:
    """Return a document with the part between two comments replaced.

    Raises:
        ValueError: the document does not have these comments.
    """
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"there is no part between {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{rendered}\n\n{end}{after}"


def page() -> str:
    """Return docs/BENCHMARKS.md with the tables of the saved results."""
    text = PAGE.read_text()
    for path, begin in BEGIN.items():
        text = put(text, tables(list(load(path).values())), begin)
    return text
