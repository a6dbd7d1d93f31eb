"""Play the scene in front of somebody: a terminal, or whoever reads the lines."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from rich.console import Console
from rich.live import Live

from kvbus.demo import plain, view
from kvbus.demo.frame import Frame
from kvbus.demo.scene import Scene
from kvbus.demo.story import Line, StoryHandler
from kvbus.demo.verdict import Verdict

_FRAME_S: Final = 0.2
_STORY_AT_THE_END: Final = 30


class Reporter(Protocol):
    """Who shows what happens."""

    interval: float

    def open(self, frame: Frame) -> None:
        """Begin."""

    def tell(self, line: Line) -> None:
        """Take a line of the story, as it is told."""

    def draw(self, frame: Frame) -> None:
        """Show one moment."""

    def close(self) -> None:
        """Give the terminal back."""

    def end(self, verdict: Verdict) -> None:
        """Show the end, after `close`."""


class Lines:
    """Plain lines."""

    interval = 1.0

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def open(self, frame: Frame) -> None:
        """Say what this is."""
        for line in plain.opening(frame.url):
            self._write(line)

    def tell(self, line: Line) -> None:
        """Write a line of the story."""
        self._write(plain.story_line(line))

    def draw(self, frame: Frame) -> None:
        """Write the state."""
        self._write(plain.status_line(frame))

    def close(self) -> None:
        """Nothing to give back."""

    def end(self, verdict: Verdict) -> None:
        """Write the verdict."""
        for line in plain.verdict_lines(verdict):
            self._write(line)


class Screen:
    """The whole terminal while it plays; story and verdict stay behind in its scrollback."""

    interval = _FRAME_S

    def __init__(self, console: Console) -> None:
        self._console = console
        self._glyphs = view.glyphs_for(console)
        self._told: deque[Line] = deque(maxlen=_STORY_AT_THE_END)
        # drawn by the loop itself: a thread of its own would show halves of moments
        self._live = Live(console=console, screen=True, auto_refresh=False)

    def open(self, frame: Frame) -> None:
        """Take the terminal."""
        self._live.start()
        self.draw(frame)

    def tell(self, line: Line) -> None:
        """Keep it for the end; the next frame shows it anyway."""
        self._told.append(line)

    def draw(self, frame: Frame) -> None:
        """Draw a frame."""
        width, height = self._console.size
        self._live.update(view.render(frame, width=width, height=height, glyphs=self._glyphs), refresh=True)

    def close(self) -> None:
        """Give the terminal back."""
        self._live.stop()

    def end(self, verdict: Verdict) -> None:
        """Print what was told last, and the verdict."""
        self._console.print(view.render_story(list(self._told), self._glyphs))
        self._console.print(view.render_verdict(verdict, self._glyphs))


def reporter_for(console: Console, write: Callable[[str], None]) -> Reporter:
    """A screen if standard output is a terminal that can show one, else lines."""
    if sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal:
        return Screen(console)
    return Lines(write)


async def perform(scene: Scene, reporter: Reporter, stop: asyncio.Event) -> Verdict:
    """Play a scene to its end and show it.

    Args:
        scene: not open yet; it is closed afterwards in any case.
        reporter: who shows it.
        stop: set to end before the time.

    Raises:
        BindError: no ports could be had.
        BrokenPipeError: nobody reads the lines any more.
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
    scene.story.listener = reporter.tell
    reporter.open(scene.observe())
    try:
        async with asyncio.TaskGroup() as group:
            drawing = group.create_task(_draw(scene, reporter), name="drawing")
            await scene.play(group, stop)
            unsettled = await scene.settle()
            drawing.cancel()
            verdict = scene.verdict(unsettled)
            reporter.draw(scene.observe())
            for router in scene.routers:
                await router.leave()
    finally:
        reporter.close()
    return verdict


async def _draw(scene: Scene, reporter: Reporter) -> None:
    while True:
        await asyncio.sleep(reporter.interval)
        reporter.draw(scene.observe())
