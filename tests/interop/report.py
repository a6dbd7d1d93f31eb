"""Format the table of docs/INTEROP.md: the result of every router in every case, directly and through kvbus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from .cases import CASES
from .kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .cache import Score

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "INTEROP.md"
BEGIN: Final = "<!-- the tables below are written by `make interop` -->"
END: Final = "<!-- written by `make interop` until here -->"


class Cell(NamedTuple):
    """The result of one router in one interop case, directly at the engine and behind kvbus."""

    live: int
    direct: Score
    behind: Score


Cells = dict[tuple[str, str], Cell]
"""Results of the interop tests, by the names of the router and the case."""


def written(cells: Cells, lacking: Mapping[str, str]) -> str:
    """Return the text for docs/INTEROP.md: a table of routers behind kvbus and one of routers directly at the engine.

    It ends with a list of the routers that could not run.
    """
    routers = [kind.name for kind in KINDS if kind.name not in lacking]
    parts = ["Missing / dead blocks of each router through kvbus:", _table(cells, routers, "behind")]
    parts += [
        "Missing / dead blocks of the same routers in the same runs, connected directly to the engine:",
        _table(cells, routers, "direct"),
    ]
    parts += [f"Not measured: {name} ({why})." for name, why in lacking.items()]
    return "\n\n".join(parts)


def replaced(document: str, text: str) -> str:
    """Return the document with another text between the two marker comments."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert begin, f"no line {BEGIN!r}"
    assert end, f"no line {END!r}"
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}"


def _table(cells: Cells, routers: list[str], side: str) -> str:
    lines = ["| case | " + " | ".join(routers) + " |", "|---|" + "---|" * len(routers)]
    for case in CASES:
        found = [cells.get((router, case.name)) for router in routers]
        texts = ["" if cell is None else "{} / {}".format(*getattr(cell, side)) for cell in found]
        lines.append(f"| {case.title} | " + " | ".join(texts) + " |")
    return "\n".join(lines)
