"""The show on a terminal at least 80 columns wide, or as plain lines."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvbus.tools.demo.show import Line, Row, Show, Tone, Verdict
from kvbus.tools.terminal import Glyphs, counted, glyphs_for, is_screen, panel, plain_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console


_STYLES: Final = {Tone.SCENE: "", Tone.FAULT: "yellow", Tone.KVBUS: "green", Tone.DIRECT: "red", Tone.WRONG: "red bold"}
_LEGEND: Final = Text(" missing: only the engine has the block. dead: only the router has it ", "dim")
_MIN_STORY: Final = 4


def render(show: Show, story: Sequence[Line], width: int, height: int, glyphs: Glyphs) -> RenderableType:
    """Draw the stage for a terminal of this size."""
    stage = Table.grid(expand=True)
    for ratio in (5, 4, 7):
        stage.add_column(ratio=ratio)
    stage.add_row(
        panel(_engines(show), f"engines {glyphs.arrow}", "cyan"),
        panel(_bus(show, glyphs), f"kvbus {glyphs.arrow}", "yellow"),
        panel(_routers(show.rows, glyphs), "routers", "green"),
    )
    used = 1 + 6 + len(show.rows) + 2
    lines = [_line(line, glyphs) for line in story[-max(_MIN_STORY, height - used - 2) :]]
    for line in lines:
        line.truncate(width - 4, overflow="ellipsis")
    lines += [Text()] * (max(_MIN_STORY, height - used - 2) - len(lines))
    return Group(
        _head(show),
        stage,
        panel(
            _chart(show, width, glyphs), "wrong blocks of each router (missing + dead), over time", "magenta", _LEGEND
        ),
        panel(Group(*lines), "what happens", "yellow"),
    )


def render_story(story: Sequence[Line], glyphs: Glyphs) -> RenderableType:
    """Draw the story, for the end."""
    return panel(Group(*(_line(line, glyphs) for line in story)), "what happened", "yellow")


def render_verdict(verdict: Verdict, glyphs: Glyphs) -> RenderableType:
    """Draw the verdict, for the end."""
    colour = {True: "green", False: "red", None: "yellow"}[verdict.exact]
    *said, last = verdict.sentences()
    body = Group(_routers(verdict.rows, glyphs, expand=False), Text(), *said, Text(last, f"{colour} bold"))
    return panel(body, "verdict: each router against the engines' own caches", colour)


def plain_line(line: Line) -> str:
    """Format an event of the story for a file or a pipe."""
    return f"[{line.at:5.1f}s] {line.tone.value}: {line.text}"


def plain_verdict(verdict: Verdict) -> list[str]:
    """Format the verdict for a file or a pipe."""
    return [f"verdict: {sentence}" for sentence in verdict.sentences()]


def _head(show: Show) -> Table:
    head = Table.grid(expand=True)
    head.add_column(no_wrap=True)
    head.add_column(justify="right", no_wrap=True)
    endless = show.seconds == float("inf")
    end = "  Ctrl-C ends it" if endless else f" of {show.seconds:g}"
    title = Text.assemble((" kvbus demo ", "reverse bold"), (f" {show.elapsed():4.0f} s{end}", "dim"))
    head.add_row(title, Text.assemble(("status page ", "dim"), (f"{show.bus.url}/", "underline")))
    return head


def _engines(show: Show) -> Table:
    table = plain_table()
    for name in ("", "blocks", "batch/s"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for engine in show.engines:
        table.add_row(Text(engine.name, "bold"), f"{len(engine.blocks):,}", f"{show.rate(engine.name):.0f}")
    return table


def _bus(show: Show, glyphs: Glyphs) -> Table:
    table = Table.grid(expand=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    up = show.bus.up
    state = Text(f"{glyphs.dot} running", "green bold") if up else Text(f"{glyphs.bad} down", "red bold")
    table.add_row(state, "")
    table.add_row("batch/s", f"{show.rate('kvbus'):.0f}")
    table.add_row("recovered", counted(show.bus.total("recovered"), "green"))
    table.add_row("restarts", counted(show.bus.total("restarts"), "green"))
    return table


def _routers(rows: Sequence[Row], glyphs: Glyphs, *, expand: bool = True) -> Table:
    table = plain_table(expand=expand)
    for name in ("", "blocks", "missing", "dead", ""):
        table.add_column(name, justify="right", no_wrap=True)
    table.columns[0].justify = "left"
    for row in rows:
        who = Text(row.name, "bold")
        if row.started:
            sign = Text(glyphs.bad, "red bold") if row.wrong else Text(glyphs.good, "green bold")
            wrong = (counted(count, "red bold") for count in (row.missing, row.dead))
            table.add_row(who, f"{row.blocks:,}", *wrong, sign)
        else:
            table.add_row(who, Text("later", "dim"))
    return table


def _chart(show: Show, width: int, glyphs: Glyphs) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    top = max((value or 0 for values in show.history.values() for value in values), default=0)
    for name, values in show.history.items():
        bar = Text()
        for value in list(values)[-(width - 16) :]:
            if value is None:
                bar.append(" ")
            elif value == 0:
                bar.append(glyphs.levels[1], "green")
            else:
                bar.append(glyphs.levels[2 + value * (len(glyphs.levels) - 3) // top], "red")
        table.add_row(Text(name, "bold"), bar)
    return table


def _line(line: Line, glyphs: Glyphs) -> Text:
    signs = {Tone.SCENE: glyphs.away, Tone.FAULT: glyphs.fault, Tone.KVBUS: glyphs.good}
    style = _STYLES[line.tone]
    text = Text.assemble((f"{line.at:5.1f} ", "dim"), (f"{signs.get(line.tone, glyphs.bad)} ", style))
    if line.tone is Tone.KVBUS:
        text.append("kvbus: ", "bold")
    return text.append(line.text, style)


_FRAME_SECONDS: Final = 0.2


async def play(
    console: Console,
    write: Callable[[str], None],
    directory: str,
    stop: asyncio.Event,
    *,
    seconds: float,
    seed: int,
    plain: bool,
) -> bool | None:
    """Play the show, and return whether it was exact; None if it was ended in the middle of a repair.

    Args:
        console: the terminal.
        write: writes a line, where the console is not a capable terminal.
        directory: a temporary directory.
        stop: set it to end the show early.
        seconds: length of the show.
        seed: seed of the engines' requests.
        plain: True writes lines even to a terminal.

    Raises:
        BusError: ``kvbus run`` did not start.
        BrokenPipeError: the reader of the lines is gone.
    """
    as_lines = plain or not is_screen(console)
    story: deque[Line] = deque(maxlen=30)

    def tell(line: Line) -> None:
        story.append(line)
        if as_lines:
            write(plain_line(line))

    show = Show(seconds, seed, directory, tell, stop)
    glyphs = glyphs_for(console)
    # the event loop draws: a thread could draw while the state changes
    live = Live(console=console, screen=True, auto_refresh=False)

    async def draw() -> None:
        while True:
            width, height = console.size
            live.update(render(show, list(story), width, height, glyphs), refresh=True)
            await asyncio.sleep(_FRAME_SECONDS)

    if as_lines:
        write("kvbus demo: engines -> kvbus -> routers, all on this machine")
        write(f"status page: {show.bus.url}/")
    else:
        live.start()
    try:
        async with asyncio.TaskGroup() as group:
            drawing = None if as_lines else group.create_task(draw())
            try:
                verdict = await show.play(group)
            finally:
                await show.close()
                if drawing is not None:
                    drawing.cancel()
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    finally:
        live.stop()
    if as_lines:
        for line in plain_verdict(verdict):
            write(line)
    else:
        console.print(render_story(list(story), glyphs), render_verdict(verdict, glyphs), sep="")
    return verdict.exact
