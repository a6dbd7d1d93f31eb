"""Copy the measured results of docs/INTEROP.md and docs/REAL-ENGINE.md into README.md.

Run it with ``python -m tests.docs.measured``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
INTEROP: Final = ROOT / "docs" / "INTEROP.md"
REAL_ENGINE: Final = ROOT / "docs" / "REAL-ENGINE.md"
README: Final = ROOT / "README.md"
SHOWN: Final = (
    "the router joins late; the engine publishes nothing",
    "the router loses its connection and misses five batches",
    "the engine restarts",
)
"""Interop cases that have a column of their own in the table of README.md."""

OURS: Final = ("(double)", "go-zeromq", "no replay")
"""Columns of docs/INTEROP.md that README.md leaves out.

They are kvbus's own readers, and further variants of routers of other projects.
"""

ROUTERS: Final = """\
**Real routers, a synthetic engine**: each router ran twice at an engine with 300 blocks, directly and behind kvbus. In each
of the cases, such as a late start or lost batches, the router's blocks were compared with the engine's. The second and third
columns count the cases with a difference. The last three columns show, for three of the cases, the numbers of missing / dead
blocks without kvbus.
"""

Figures = dict[str, dict[str, tuple[int, int]]]
"""Numbers of missing and dead blocks, by router and case."""


def results(text: str) -> tuple[Figures, Figures]:
    """Return the results of all routers in all cases of docs/INTEROP.md, without the columns in ``OURS``.

    The first result has the routers behind kvbus, the second has the same routers directly at the engine.
    """
    part = text.split("<!-- the table below is written by", 1)[1].split("<!-- written by", 1)[0]
    (table,) = re.findall(r"(?:^\|.*\n)+", part, re.MULTILINE)
    head, _, *rows = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in table.splitlines()]
    behind: Figures = {name: {} for name in head[1:] if not any(each in name for each in OURS)}
    direct: Figures = {name: {} for name in behind}
    for case, *cells in rows:
        for name, cell in zip(head[1:], cells, strict=True):
            if name in behind:
                numbers = [int(each) for each in re.findall(r"\d+", cell)]
                direct[name][case], behind[name][case] = (numbers[0], numbers[1]), (numbers[2], numbers[3])
    return behind, direct


def short_table(text: str) -> str:
    """Return the table for README.md with the results of each router with and without kvbus, from docs/INTEROP.md."""
    behind, direct = results(text)
    cases = len(next(iter(direct.values())))
    lines = [
        f"| router | wrong without kvbus, of {cases} cases | wrong with kvbus | joins late | misses five batches | engine restarts |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, found in direct.items():
        wrong, repaired = (sum(any(each) for each in figures.values()) for figures in (found, behind[name]))
        shown = " | ".join("{} / {}".format(*found[case]) for case in SHOWN)
        lines.append(f"| {name} | {wrong} | {repaired} | {shown} |")
    return "\n".join(lines) + "\n"


def real_engine(text: str) -> str:
    """Return the sentence and the table for README.md about the test with a real engine, from docs/REAL-ENGINE.md."""
    (run,) = re.findall(
        r"^Measured on (\S+): kvbus \S+, (vLLM [\d.]+) on \S+, (vLLM router [\d.]+),", text, re.MULTILINE
    )
    (equal,) = re.findall(r"^In (\d+ of \d+) cases, kvbus and its routers held exactly", text, re.MULTILINE)
    lines = [
        f"**A real {run[1]}, on a CPU** ({run[0]}): in {equal} cases kvbus and its routers held exactly the engine's blocks.",
        f"In a second test the {run[2]} distributed requests to two such engines, and was restarted in the middle of",
        "the test ([all figures](docs/REAL-ENGINE.md#the-vllm-router-directly-and-through-kvbus)):",
        "",
        "| | requests whose prefix the router knew | after the restart: sent to the engine with the longest prefix | prompt tokens from the cache |",
        "|---|--:|--:|--:|",
    ]
    for row, name in (("directly", "without kvbus"), ("through kvbus", "with kvbus")):
        ((known, longest, cached),) = re.findall(
            rf"^\| yes \| {row} \| (.+?) \| .+? \| (.+?) \| (.+?) \| .+? \|$", text, re.MULTILINE
        )
        lines.append(f"| {name} | {known} | {longest} | {cached} |")
    return "\n".join(lines) + "\n"


def rendered(readme: str) -> str:
    """Return README.md with the current results of docs/INTEROP.md and docs/REAL-ENGINE.md."""
    shown = f"{real_engine(REAL_ENGINE.read_text())}\n{ROUTERS}\n{short_table(INTEROP.read_text())}"
    return with_table(readme, shown)


def with_table(text: str, table: str) -> str:
    """Return README.md with a new text between the two marker comments."""
    start, end = (
        "<!-- rendered from docs/INTEROP.md: python -m tests.docs.measured -->\n",
        "<!-- end of what is rendered",
    )
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError("the table's place is missing")
    return f"{before}{start}\n{table}\n{end}{after}"


if __name__ == "__main__":
    README.write_text(rendered(README.read_text()))
