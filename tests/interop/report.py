"""Format the table of docs/INTEROP.md: the result of every router in every case, directly at the engine and behind
kvbus.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from .cases import CASES
from .kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .cache import Score

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "INTEROP.md"
BEGIN: Final = "<!-- the table below is written by `make interop` -->"
END: Final = "<!-- written by `make interop` until here -->"
INTRODUCTION: Final = """\
A cell has the router's missing and dead blocks directly at the engine, an arrow, and the missing and dead blocks of the
same router behind kvbus."""
HEAD: Final = "case (missing / dead blocks: directly → behind kvbus)"


class Cell(NamedTuple):
    """The result of one router in one interop case, directly at the engine and behind kvbus."""

    live: int
    direct: Score
    behind: Score


Cells = dict[tuple[str, str], Cell]
"""Results of the interop tests, by the names of the router and the case."""


def written(cells: Cells, lacking: Mapping[str, str]) -> str:
    """Return the text for docs/INTEROP.md: the table of all results, and the routers that could not run."""
    routers = [kind.name for kind in KINDS if kind.name not in lacking]
    parts = [INTRODUCTION, _table(cells, routers)]
    parts += [f"Not measured: {name} ({why})." for name, why in lacking.items()]
    return "\n\n".join(parts)


def replaced(document: str, text: str) -> str:
    """Return the document with another text between the two marker comments."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert begin, f"no line {BEGIN!r}"
    assert end, f"no line {END!r}"
    return f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}"


def _table(cells: Cells, routers: list[str]) -> str:
    lines = [f"| {HEAD} | " + " | ".join(routers) + " |", "|---|" + "---|" * len(routers)]
    for case in CASES:
        found = [cells.get((router, case.name)) for router in routers]
        texts = ["" if cell is None else "{} / {} → {} / {}".format(*cell.direct, *cell.behind) for cell in found]
        lines.append(f"| {case.title} | " + " | ".join(texts) + " |")
    return "\n".join(lines)
