"""Results into the document: tables between two marks of ``docs/BENCHMARKS.md``, bars into one SVG beside the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from .processes import ROOT
from .report import TARGET_COLUMNS, Section, from_json, markdown, markdown_table, number, target_rows

DOCUMENT: Final = ROOT / "docs" / "BENCHMARKS.md"
RESULTS: Final = ROOT / "docs" / "bench" / "results.json"
BEGIN: Final = "<!-- rendered from bench/results.json: python -m tests.bench --render -->"
END: Final = "<!-- end of what is rendered -->"

_ABOUT_RUN: Final = ("date", "machine", "core", "quick", "runs", "seconds")


def load(path: Path) -> list[tuple[dict[str, Any], Section]]:
    """What is known of each part's run, and its results, in the order of the file."""
    sections = json.loads(path.read_text())["sections"].values()
    return [({key: data.pop(key) for key in _ABOUT_RUN}, from_json(data)) for data in sections]


def tables(parts: list[tuple[dict[str, Any], Section]]) -> str:
    """All of the rendered text: the machine, the targets at a glance, then part by part."""
    lines = [_machine(parts), ""]
    targets = [target for _, section in parts for target in section.targets]
    lines += ["### Targets", "", *markdown_table(TARGET_COLUMNS, target_rows(targets)), ""]
    lines += _sizing({name: value for _, section in parts for name, value in section.facts.items()})
    lines += ["![The main results as bars](bench/results.svg)", ""]
    for about, section in parts:
        runs = f"{about['runs']} runs" if about["runs"] > 1 else "one run"
        short = ", short" if about["quick"] else ""
        core = f", {about['core']} core"
        lines += [markdown(section, with_targets=False).rstrip(), "", f"({about['date']}, {runs}{short}{core})", ""]
    return "\n".join(lines)


def _sizing(facts: dict[str, float]) -> list[str]:
    """What the numbers say about how much to give kvbus."""
    needed = ("bytes 8x8", "bytes 1x1", "base MiB", "rank %")
    if any(name not in facts for name in needed):
        return []
    many, single, base, rank = (facts[name] for name in needed)
    rows = [
        [f"{blocks:,}", f"{blocks * 16:,}", number(blocks * many / 2**20), number(blocks * single / 2**20)]
        for blocks in (10_000, 100_000, 1_000_000, 10_000_000)
    ]
    columns = ["live blocks", "cached tokens", "MiB, multi-block events", "MiB, single-block events"]
    takes = (
        f"The process takes {number(base)} MiB before it has received anything, a live block of 16 tokens "
        f"{number(many)} bytes where engines send several blocks in an event and {number(single)} where they send one:"
    )
    more = (
        "Each stream's journal comes on top: `journal_batches` (10,000) of the engine's own payloads, bounded by "
        f"`journal_bytes`. A rank that sends 50 batches of 8 blocks a second takes {number(rank)} % of a core."
    )
    return ["### Sizing", "", takes, "", *markdown_table(columns, rows), "", more, "", *_by_connection(facts)]


def _by_connection(facts: dict[str, float]) -> list[str]:
    """What each further source and connection takes, where that was measured."""
    names = ("source %", "source MiB", "connection %", "connection MiB")
    if any(name not in facts for name in names):
        return []
    rows = [
        ["source, 50 batches of 8 blocks a second", *(number(facts[name]) for name in names[:2])],
        ["router's connection to such a source's stream", *(number(facts[name]) for name in names[2:])],
    ]
    if "router %" in facts:
        rows.append(["router's connection, 1,000 batches of one block a second", number(facts["router %"]), ""])
    return [*markdown_table(["each further", "% of a core", "MiB beside blocks and journals"], rows), ""]


def _machine(parts: list[tuple[dict[str, Any], Section]]) -> str:
    machines = []
    for about, _ in parts:
        if about["machine"] not in machines:
            machines.append(about["machine"])
    told = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}, "
        f"Python {machine['python']}"
        for machine in machines
    ]
    dates = sorted({about["date"] for about, _ in parts})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"Measured {when} on: {'; '.join(told)}."


def into_document(document: str, rendered: str, begin: str = BEGIN, end: str = END) -> str:
    """The document with the part between two comments replaced.

    Raises:
        ValueError: it has no such marks.
    """
    before, found, rest = document.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the document has no part between {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{rendered.rstrip()}\n\n{end}{after}"


WIDTH: Final = 860
LABELS: Final = 190
VALUES: Final = 310
ROW: Final = 22


def svg(parts: list[tuple[dict[str, Any], Section]]) -> str:
    """Horizontal bars, one panel under the other; the thin line is the spread over the runs."""
    drawn: list[str] = []
    y = 12
    for plot in (plot for _, section in parts for plot in section.plots):
        drawn.append(f'<text x="12" y="{y + 14}" class="title">{escape(plot["title"])}</text>')
        y += 26
        greatest = max(*(high for _, _, _, high in plot["bars"]), 1e-9)
        scale = (WIDTH - LABELS - VALUES) / greatest
        for label, middle, low, high in plot["bars"]:
            ours = "ours" if "kvbus" in label else "others"
            left, right = (LABELS + max(value, 0) * scale for value in (low, high))
            told = f"{number(middle)} {escape(plot['unit'])} ({number(low)} to {number(high)})"
            drawn += [
                f'<text x="{LABELS - 8}" y="{y + 14}" class="label">{escape(label)}</text>',
                f'<rect x="{LABELS}" y="{y + 3}" width="{max(middle, 0) * scale:.1f}" height="14" class="{ours}"/>',
                f'<line x1="{left:.1f}" y1="{y + 10}" x2="{right:.1f}" y2="{y + 10}"/>',
                f'<text x="{WIDTH - VALUES + 8}" y="{y + 14}">{told}</text>',
            ]
            y += ROW
        y += 14
    style = (
        "text{font:12px sans-serif;fill:#222}.title{font-weight:bold}.label{text-anchor:end}"
        ".ours{fill:#2563a8}.others{fill:#9aa7b4}line{stroke:#222;stroke-width:1.5}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}">\n'
        f'<style>{style}</style>\n<rect width="{WIDTH}" height="{y}" fill="#fff"/>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def render(results: Path = RESULTS, document: Path = DOCUMENT) -> None:
    """Write the document's tables and the SVG anew."""
    parts = load(results)
    document.write_text(into_document(document.read_text(), tables(parts)))
    results.with_suffix(".svg").write_text(svg(parts))
