"""Single keys from a terminal, without Enter."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from kvbus.tools.top.view import SORTS, Choice

_ENTER: Final = ("\r", "\n")
_ESCAPE: Final = "\x1b"
_BACKSPACE: Final = ("\x7f", "\b")
_MAX_FILTER: Final = 60


def pressed(choice: Choice, key: str) -> Choice | None:
    """What the user wants after a key; None: to leave."""
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
    """Call ``on_key`` for each key. Signals work as before; where standard input is no terminal there are no keys."""
    if not sys.stdin.isatty():
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    loop = asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(fd, 64).decode("utf-8", "ignore")
        if not typed:
            loop.remove_reader(fd)  # the terminal has gone
        # an arrow is Escape and more: it means nothing here
        for key in [_ESCAPE] if typed == _ESCAPE else [] if typed.startswith(_ESCAPE) else typed:
            on_key(key)

    tty.setcbreak(fd)
    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
