"""Signs, colours and tables that kvbus's terminal screens share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rich.box import ROUNDED
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

STATE_STYLES: Final = {
    "live": "green",
    "gap": "yellow",
    "syncing": "cyan",
    "connecting": "magenta",
    "lost": "red bold",
    "conflict": "red bold",
}
"""Style of a source, by its state."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Signs of one column each, with ASCII forms for a terminal without Unicode."""

    arrow: str = "━━▶"
    dot: str = "●"
    away: str = "·"
    good: str = "✓"
    bad: str = "✗"
    levels: str = " ▁▂▃▄▅▆▇█"
    """Signs of a small chart, from the lowest value to the highest."""


UNICODE: Final = Glyphs()
ASCII: Final = Glyphs("-->", "*", ".", "+", "X", " .:-=+*%#")


class PipeConsole(Console):
    """A console that raises BrokenPipeError if the reader of its output has closed the pipe."""

    def on_broken_pipe(self) -> None:
        """Raise the error, so that the program chooses the exit code. Rich would exit with 1."""
        raise BrokenPipeError


def glyphs_for(console: Console) -> Glyphs:
    """Return the signs that a console can show: ASCII unless its encoding is Unicode."""
    return UNICODE if console.encoding.lower().startswith("utf") else ASCII


def is_screen(console: Console) -> bool:
    """Return whether the console can redraw its screen. A file, a pipe or a dumb terminal gets lines instead."""
    return console.file.isatty() and console.is_terminal and not console.is_dumb_terminal


def state_cell(state: str, glyphs: Glyphs) -> Text:
    """Return a table cell with a source's state in its colour."""
    return Text(f"{glyphs.dot} {state}", STATE_STYLES.get(state, ""))


def counted(count: float, style: str) -> Text:
    """Return a number in the given style, or dimmed if it is 0."""
    return Text(f"{count:,.0f}", style if count else "dim")


def short_dialect(dialect: str) -> str:
    """Shorten ``vllm-0.30..0.33`` to ``vllm-0.30+``. Return only the first of several names."""
    first = dialect.partition(" ")[0]
    head, dots, _ = first.partition("..")
    return f"{head}+" if dots else first


def right(header: str = "") -> Column:
    """Return a column for numbers."""
    return Column(header, justify="right", no_wrap=True)


def plain_table(*columns: Column | str, expand: bool = True) -> Table:
    """Return a table without lines."""
    gap = 1 if expand else 3
    return Table(*columns, box=None, expand=expand, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")


def panel(body: RenderableType, title: str, colour: str, subtitle: Text | None = None) -> Panel:
    """Return a frame with a title and, optionally, a subtitle at the bottom right."""
    return Panel(
        body,
        title=Text(f" {title} ", f"{colour} bold"),
        title_align="left",
        subtitle=subtitle,
        subtitle_align="right",
        border_style="dim",
        box=ROUNDED,
        padding=(0, 1),
    )
