"""Special characters, colours and tables that the terminal screens of ``kvbus top`` and ``kvbus demo`` share."""

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
"""Colour of a source's state on the screen, by the state."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The signs (symbols) that the terminal screens draw. Each sign is one column wide, except the arrow.

    `UNICODE` has the signs, and `ASCII` has their replacements for a terminal without Unicode.
    """

    arrow: str = "━━▶"
    dot: str = "●"
    away: str = "·"
    good: str = "✓"
    bad: str = "✗"
    levels: str = " ▁▂▃▄▅▆▇█"
    """Signs (symbols) of a small bar chart, from the lowest value to the highest."""


UNICODE: Final = Glyphs()
ASCII: Final = Glyphs("-->", "*", ".", "+", "X", " .:-=+*%#")


class PipeConsole(Console):
    """A console that raises BrokenPipeError if the program that reads its output has closed the pipe."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, so that the kvbus command chooses the exit code.

        Rich's own method would exit with code 1.
        """
        raise BrokenPipeError


def glyphs_for(console: Console) -> Glyphs:
    """Return the signs for a console: `UNICODE` if the console's encoding is a form of Unicode, otherwise `ASCII`."""
    return UNICODE if console.encoding.lower().startswith("utf") else ASCII


def is_screen(console: Console) -> bool:
    """Return whether a screen can be redrawn on the console. It cannot on a file, a pipe or a dumb terminal."""
    return console.file.isatty() and console.is_terminal and not console.is_dumb_terminal


def state_cell(state: str, glyphs: Glyphs) -> Text:
    """Return a table cell that shows the state of a source in the state's colour."""
    return Text(f"{glyphs.dot} {state}", STATE_STYLES.get(state, ""))


def counted(count: float, style: str) -> Text:
    """Return a number as text in the given style. The number 0 is dimmed."""
    return Text(f"{count:,.0f}", style if count else "dim")


def short_dialect(dialect: str) -> str:
    """Shorten the name of an engine's dialect for a table: ``vllm-0.30..0.33`` becomes ``vllm-0.30+``.

    If the text has several names, only the first name is returned.
    """
    first = dialect.partition(" ")[0]
    head, dots, _ = first.partition("..")
    return f"{head}+" if dots else first


def right(header: str = "") -> Column:
    """Return a table column for numbers. Its text is aligned to the right."""
    return Column(header, justify="right", no_wrap=True)


def plain_table(*columns: Column | str, expand: bool = True) -> Table:
    """Return an empty table without borders."""
    gap = 1 if expand else 3
    return Table(*columns, box=None, expand=expand, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")


def panel(body: RenderableType, title: str, colour: str, subtitle: Text | None = None) -> Panel:
    """Return a frame around a body, with a title at the top left and, optionally, a subtitle at the bottom right."""
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
