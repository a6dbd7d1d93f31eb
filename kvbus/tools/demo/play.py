"""Play the show on a terminal, or as plain lines."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from rich.live import Live

from kvbus.tools.demo.screen import plain_line, plain_verdict, render, render_story, render_verdict
from kvbus.tools.demo.show import Line, Show
from kvbus.tools.terminal import glyphs_for, is_screen

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

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
