"""How kvbus looks on a terminal: signs, colours and tables that its screens share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rich.box import ROUNDED
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

STATE_STYLES: Final = {
    "live": "green",
    "gap": "yellow",
    "syncing": "cyan",
    "connecting": "magenta",
    "lost": "red bold",
    "conflict": "red bold",
}
"""By the state of a source."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Signs of one column each, with ASCII forms for a terminal without Unicode."""

    arrow: str = "━━▶"
    dot: str = "●"
    equal: str = "="
    unequal: str = "≠"
    away: str = "·"
    fault: str = "▼"
    good: str = "✓"
    bad: str = "✗"
    down: str = "▾"
    up: str = "▴"
    levels: str = " ▁▂▃▄▅▆▇█"
    """Of a small chart, from nothing to the most."""


UNICODE: Final = Glyphs()
ASCII: Final = Glyphs("-->", "*", "=", "#", ".", "!", "+", "X", "v", "^", " .:-=+*%#")


class PipeConsole(Console):
    """A console that raises BrokenPipeError if the reader of its output is gone."""

    def on_broken_pipe(self) -> None:
        """Leave the exit code to the program."""
        raise BrokenPipeError


def glyphs_for(console: Console) -> Glyphs:
    """Return the signs that a console can show."""
    return UNICODE if console.encoding.lower().startswith("utf") else ASCII


def is_screen(console: Console) -> bool:
    """Whether the console can be drawn upon: a file, a pipe or a dumb terminal gets lines."""
    return console.file.isatty() and console.is_terminal and not console.is_dumb_terminal


def state_cell(state: str, glyphs: Glyphs) -> Text:
    """A source's state, in its colour."""
    return Text(f"{glyphs.dot} {state}", STATE_STYLES.get(state, ""))


def counted(count: float, style: str) -> Text:
    """A number that is worth a look where it is not 0."""
    return Text(f"{count:,.0f}", style if count else "dim")


def short_dialect(dialect: str) -> str:
    """Shorten ``vllm-0.30..0.33`` to ``vllm-0.30+``; of several names take the first."""
    first = dialect.partition(" ")[0]
    head, dots, _ = first.partition("..")
    return f"{head}+" if dots else first


def plain_table(*, expand: bool = True) -> Table:
    """A table without lines."""
    gap = 1 if expand else 3
    return Table(box=None, expand=expand, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")


def panel(body: RenderableType, title: str, colour: str, subtitle: Text | None = None) -> Panel:
    """A frame with a title, and perhaps a legend."""
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
