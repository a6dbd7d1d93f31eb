"""Turns for connections that have more input than one turn of the event loop may take: each gets a fair share."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

SLICE: Final = 0.001
"""Seconds that all of them together may take in one turn of the loop."""


class Reading(Protocol):
    """A connection with undecoded input."""

    def go_on(self) -> bool:
        """Decode a little; return True if there is more."""


class Turns:
    """Let connections decode their input in turn, beside the loop's other work."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Reading] = deque()
        self._handle: asyncio.Handle | None = None

    def add(self, reading: Reading) -> None:
        """Give a connection its turns until it has decoded everything."""
        self._waiting.append(reading)
        if self._handle is None:
            self._handle = self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._handle = None
        until = self._loop.time() + SLICE
        for _ in range(len(self._waiting)):
            reading = self._waiting.popleft()
            if reading.go_on():
                self._waiting.append(reading)
            if self._loop.time() >= until:
                break
        if self._waiting and self._handle is None:
            self._handle = self._loop.call_soon(self._run)
