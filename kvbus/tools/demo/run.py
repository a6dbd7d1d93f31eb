"""Play the scene on a terminal, or as plain lines."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from rich.console import Console
from rich.live import Live

from kvbus.tools.demo import plain, view
from kvbus.tools.demo.scene import Scene
from kvbus.tools.demo.screen import Screen
from kvbus.tools.demo.story import Line, StoryHandler
from kvbus.tools.demo.verdict import Verdict
from kvbus.tools.terminal import glyphs_for, is_screen

_FRAME_S: Final = 0.2
_STORY_AT_THE_END: Final = 30


class Lines:
    """Plain lines."""

    interval = 1.0

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def open(self, screen: Screen) -> None:
        """Write the first lines."""
        for line in plain.opening(screen.url):
            self._write(line)

    def add(self, line: Line) -> None:
        """Write a line of the story."""
        self._write(plain.story_line(line))

    def draw(self, screen: Screen) -> None:
        """Write the state."""
        self._write(plain.status_line(screen))

    def close(self) -> None:
        """Do nothing: there is no terminal to restore."""

    def end(self, verdict: Verdict) -> None:
        """Write the verdict."""
        for line in plain.verdict_lines(verdict):
            self._write(line)


class Terminal:
    """The whole terminal while the demo plays. Story and verdict stay in its scrollback."""

    interval = _FRAME_S

    def __init__(self, console: Console) -> None:
        self._console = console
        self._glyphs = glyphs_for(console)
        self._lines: deque[Line] = deque(maxlen=_STORY_AT_THE_END)
        # the event loop draws: a thread could draw while the state changes
        self._live = Live(console=console, screen=True, auto_refresh=False)

    def open(self, screen: Screen) -> None:
        """Switch the terminal to the demo's screen."""
        self._live.start()
        self.draw(screen)

    def add(self, line: Line) -> None:
        """Keep it for the end; the next screen shows it anyway."""
        self._lines.append(line)

    def draw(self, screen: Screen) -> None:
        """Draw a screen."""
        width, height = self._console.size
        self._live.update(view.render(screen, width=width, height=height, glyphs=self._glyphs), refresh=True)

    def close(self) -> None:
        """Restore the terminal."""
        self._live.stop()

    def end(self, verdict: Verdict) -> None:
        """Print the newest lines of the story, and the verdict."""
        self._console.print(view.render_story(list(self._lines), self._glyphs))
        self._console.print(view.render_verdict(verdict, self._glyphs))


Reporter = Lines | Terminal
"""Shows the demo: `open`, then `add` and `draw` as often as there is something, `close`, and `end` with the verdict."""


def reporter_for(console: Console, write: Callable[[str], None], *, plain: bool) -> Reporter:
    """Return a `Terminal` if standard output is a capable terminal, else `Lines`; ``plain`` is always `Lines`."""
    if is_screen(console) and not plain:
        return Terminal(console)
    return Lines(write)


async def perform(scene: Scene, reporter: Reporter, stop: asyncio.Event) -> Verdict:
    """Play a scene to its end and show it.

    Args:
        scene: the scene, not open yet; `perform` closes it in any case.
        reporter: shows the scene.
        stop: set it to end early.

    Raises:
        BindError: there are no free ports.
        BrokenPipeError: the reader of the lines is gone.
    """
    logger = logging.getLogger("kvbus")
    handler = StoryHandler(scene.story)
    logger.addHandler(handler)
    try:
        await scene.open()
        try:
            verdict = await _perform(scene, reporter, stop)
        finally:
            await scene.close()
    except BaseExceptionGroup as group:
        if group.subgroup(BrokenPipeError) is not None:
            raise BrokenPipeError from group
        raise
    finally:
        logger.removeHandler(handler)
    reporter.end(verdict)
    return verdict


async def _perform(scene: Scene, reporter: Reporter, stop: asyncio.Event) -> Verdict:
    scene.story.listener = reporter.add
    reporter.open(scene.observe())
    try:
        async with asyncio.TaskGroup() as group:
            drawing = group.create_task(_draw(scene, reporter), name="drawing")
            await scene.play(group, stop)
            unsettled = await scene.settle()
            drawing.cancel()
            verdict = scene.verdict(unsettled)
            reporter.draw(scene.observe())
            await scene.leave()
    finally:
        reporter.close()
    return verdict


async def _draw(scene: Scene, reporter: Reporter) -> None:
    while True:
        await asyncio.sleep(reporter.interval)
        reporter.draw(scene.observe())
