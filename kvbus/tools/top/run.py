"""The loops of ``kvbus top``: read the state of the bus repeatedly, and draw it or write it until the user quits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from rich.console import Console
from rich.live import Live

from kvbus.tools.asking import Login, NoAnswerError
from kvbus.tools.terminal import glyphs_for
from kvbus.tools.top.moment import History, read
from kvbus.tools.top.view import SORTS, Choice, document, lines, render

_ENTER: Final = ("\r", "\n")
_ESCAPE: Final = "\x1b"
_BACKSPACE: Final = ("\x7f", "\b")
_MAX_FILTER: Final = 60
_ARROWS: Final = {"\x1b[A": "k", "\x1bOA": "k", "\x1b[B": "j", "\x1bOB": "j", "\x1b[5~": "\x02", "\x1b[6~": "\x06"}
"""By the bytes that a terminal sends for an arrow or page key: the one-character key that has the same effect."""
_SCROLLS: Final = {"j": 1, "k": -1, "\x06": 10, "\x02": -10}
"""By key: the number of rows by which it scrolls. Ctrl-F and Ctrl-B have the same effect as the page keys."""


def pressed(choice: Choice, key: str, last: int = 0) -> Choice | None:
    """Return what the user wants to see after pressing a key: ``choice`` with the key's change; None if the key quits.

    Args:
        choice: the user's choice before the key.
        key: the pressed key.
        last: index of the last row of the longest table, beyond which the screen does not scroll.
    """
    if choice.typing:
        if key in _ENTER:
            return replace(choice, typing=False)
        if key == _ESCAPE:
            return replace(choice, typing=False, wanted="")
        if key in _BACKSPACE:
            return replace(choice, wanted=choice.wanted[:-1])
        wanted = choice.wanted + key if key.isprintable() else choice.wanted
        return replace(choice, wanted=wanted[:_MAX_FILTER])
    if key == "q":
        return None
    if key in ("?", "h") or choice.help:
        return replace(choice, help=not choice.help)
    if key in _SCROLLS:
        return replace(choice, first=max(0, min(choice.first + _SCROLLS[key], last)))
    if key == "s":
        return replace(choice, sort=SORTS[(SORTS.index(choice.sort) + 1) % len(SORTS)])
    if key == "/":
        return replace(choice, typing=True, wanted="")
    if key == _ESCAPE:
        return replace(choice, wanted="")
    if key in ("p", " "):
        return replace(choice, paused=not choice.paused)
    return choice


@contextlib.contextmanager
def keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_key`` for each pressed key while the block runs.

    Ctrl-C raises its signal as usual. If standard input is not a terminal, no key is read.
    """
    if not sys.stdin.isatty():
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    loop = asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(fd, 64).decode("utf-8", "ignore")
        if not typed:
            loop.remove_reader(fd)  # the terminal has been closed
        # Ignore other special keys. They begin with Escape, too, so only a single Escape is the Escape key.
        for key in [_ESCAPE] if typed == _ESCAPE else _ARROWS.get(typed, "") if typed.startswith(_ESCAPE) else typed:
            on_key(key)

    tty.setcbreak(fd)
    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@dataclass(frozen=True, slots=True)
class Watch:
    """The bus that ``kvbus top`` watches, and the options of the command.

    Attributes:
        url: base URL of the bus.
        interval: seconds between two readings.
        count: number of readings; None for no limit.
        choice: what the screen shows at the start; the user can change it.
        login: credentials for the bus.
        as_json: whether each reading is written as a JSON object instead of text lines.
    """

    url: str
    interval: float
    count: int | None
    choice: Choice
    login: Login = field(default_factory=Login)
    as_json: bool = False


async def on_screen(watch: Watch, console: Console, stop: asyncio.Event) -> None:
    """Draw the bus on the terminal until ``stop`` is set or ``watch.count`` readings are made.

    The key ``q`` sets ``stop``.

    Raises:
        NoAnswerError: the first reading fails. If a later reading fails, the screen shows the reason, and the next
            reading is made as usual.
    """
    history, trouble, choice = History(), None, watch.choice
    loop, glyphs = asyncio.get_running_loop(), glyphs_for(console)
    async with watch.login.session() as session:
        history.add(await read(session, watch.url))
        with Live(console=console, screen=True, auto_refresh=False) as live:

            def draw() -> None:
                width, height = console.size
                drawn = render(
                    history, choice, watch.url, trouble, loop.time(), width=width, height=height, glyphs=glyphs
                )
                live.update(drawn, refresh=True)

            def on_key(key: str) -> None:
                nonlocal choice
                newest = history.moments[-1]
                wanted = pressed(choice, key, max(len(newest.sources), len(newest.routers)) - 1)
                if wanted is None:
                    stop.set()
                    return
                choice = wanted
                draw()

            looks = 1
            with keys(on_key):
                draw()
                while not stop.is_set() and (watch.count is None or looks < watch.count):
                    await _pause(stop, watch.interval)
                    if not choice.paused and not stop.is_set():
                        try:
                            history.add(await read(session, watch.url))
                            trouble = None
                        except NoAnswerError as error:
                            trouble = str(error)
                        looks += 1
                    draw()


async def as_lines(watch: Watch, write: Callable[[str], None], stop: asyncio.Event) -> None:
    """Write the state of the bus after each reading, as text lines or as a JSON object.

    The first reading is not written. It is only needed to compute the rates at the second one.

    Raises:
        NoAnswerError: a reading fails.
    """
    history, looks = History(), 0
    async with watch.login.session() as session:
        history.add(await read(session, watch.url))
        await _pause(stop, watch.interval)
        while not stop.is_set():
            history.add(await read(session, watch.url))
            looks += 1
            if watch.as_json:
                write(json.dumps(document(history, watch.choice, watch.url)))
            else:
                if looks > 1:
                    write("")
                for line in lines(history, watch.choice, watch.url):
                    write(line)
            if looks == watch.count:
                return
            await _pause(stop, watch.interval)


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
