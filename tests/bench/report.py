"""Results: series with their spread, targets that are met or not, tables; as JSON, as text and as Markdown."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import comb
from statistics import median
from typing import Any, Literal


@dataclass
class Series:
    """The values of one quantity over several runs."""

    values: list[float]
    unit: str = ""

    @property
    def median(self) -> float:
        """What is reported."""
        return median(self.values)

    @property
    def upper(self) -> float:
        """What the median is below with 95 % confidence, by order alone: the greatest of five to seven values.

        Of fewer than five no value is sure enough; then it is the greatest too.
        """
        ordered, count = sorted(self.values), len(self.values)
        above = 0  # so many of the greatest may be passed over
        while sum(comb(count, i) for i in range(above + 2)) <= 0.05 * 2**count:
            above += 1
        return ordered[-1 - above]

    def __str__(self) -> str:
        return number(self.median)

    @property
    def spread(self) -> str:
        """The least and the greatest value."""
        if len(self.values) == 1:
            return "one run"
        return f"{number(min(self.values))} to {number(max(self.values))}"


@dataclass
class Target:
    """A bound that was set beforehand, and what was measured."""

    name: str
    what: str
    measured: Series
    limit: float
    sense: Literal["<=", ">="] = "<="
    surely: bool = False
    """The bound is for what the median is below with 95 % confidence (:attr:`Series.upper`)."""

    @property
    def met(self) -> bool:
        """Whether the median keeps the bound; with ``surely`` its upper bound."""
        value = self.measured.upper if self.surely else self.measured.median
        return value <= self.limit if self.sense == "<=" else value >= self.limit


@dataclass
class Table:
    """Rows as they are printed."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """One row; numbers are rounded to three digits."""
        self.rows.append([number(cell) if isinstance(cell, float) else str(cell) for cell in cells])


@dataclass
class Section:
    """What one part of the benchmarks found. ``plots`` maps a title to bars of ``[label, median, low, high]``."""

    name: str
    title: str
    targets: list[Target] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    """Single numbers that the document's text needs."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; :func:`from_json` reads it back."""
        return asdict(self)

    def plot(self, title: str, unit: str, bars: dict[str, Series]) -> None:
        """Bars with their spread."""
        told = [[label, bar.median, min(bar.values), max(bar.values)] for label, bar in bars.items()]
        self.plots.append({"title": title, "unit": unit, "bars": told})


def ratios(over: list[float], under: list[float], unit: str = "x", *, floor: float = 0.0) -> Series:
    """One run's value by the other's of the same turn; ``floor`` is the least that the second can really be."""
    return Series([a / max(b, floor) for a, b in zip(over, under, strict=True)], unit)


def from_json(data: dict[str, Any]) -> Section:
    """The reverse of :meth:`Section.to_json`."""
    targets = [Target(**{**target, "measured": Series(**target["measured"])}) for target in data["targets"]]
    return Section(**{**data, "targets": targets, "tables": [Table(**table) for table in data["tables"]]})


def number(value: float) -> str:
    """Three digits that count, thousands with commas."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def with_unit(series: Series) -> str:
    """``1.23 us``."""
    return f"{series} {series.unit}".strip()


def markdown_table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """A table whose cells after the first stand to the right."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" + "--:|" * (len(columns) - 1)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def target_rows(targets: list[Target]) -> list[list[str]]:
    """Target, bound, measured, spread, met or not."""
    return [
        [
            target.what,
            f"{'≤' if target.sense == '<=' else '≥'} {number(target.limit)} {target.measured.unit}".strip(),
            with_unit(target.measured) + (f", surely ≤ {number(target.measured.upper)}" if target.surely else ""),
            target.measured.spread,
            "met" if target.met else "**not met**",
        ]
        for target in targets
    ]


TARGET_COLUMNS = ["target", "bound", "measured", "spread", ""]


def markdown(section: Section, *, with_targets: bool = True) -> str:
    """One section of the document."""
    lines = [f"### {section.title}", ""]
    if with_targets and section.targets:
        lines += [*markdown_table(TARGET_COLUMNS, target_rows(section.targets)), ""]
    for table in section.tables:
        lines += [f"{table.title}:", "", *markdown_table(table.columns, table.rows), ""]
    for note in section.notes:
        lines += [note, ""]
    return "\n".join(lines).rstrip() + "\n"


def plain(section: Section) -> str:
    """The same for a terminal."""
    lines = [section.title, "=" * len(section.title)]
    if section.targets:
        lines += _columns(
            [TARGET_COLUMNS, *([cell.replace("*", "") for cell in row] for row in target_rows(section.targets))]
        )
    for table in section.tables:
        lines += ["", f"{table.title}:", *_columns([table.columns, *table.rows])]
    return "\n".join([*lines, *section.notes]) + "\n"


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
