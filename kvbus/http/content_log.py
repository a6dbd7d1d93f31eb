"""The log of who read content over HTTP: callers, paths and amounts, never what was in it.

Amounts are added up, and a line for each caller, path and status is written every few seconds: nothing is left out,
however many ask, and an answer that has not ended is in it so far.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Final

log = logging.getLogger("kvbus.http.content")

EVERY: Final = 10.0
"""Seconds between two times that lines are written."""

MAX_LINES: Final = 1000
"""Callers, paths and statuses for which amounts are kept. One more has them written at once."""


class Reading:
    """One answer with content, while it is given.

    Attributes:
        status: of the answer; 200 until it is known.
        blocks: blocks that it has named since they were last written down.
        bytes: its bytes since then.
    """

    def __init__(self, caller: str, path: str) -> None:
        self.caller = caller
        self.path = path
        self.status = 200
        self.blocks = 0
        self.bytes = 0

    def add(self, blocks: int, size: int) -> None:
        """Count what is being sent."""
        self.blocks += blocks
        self.bytes += size


current: Final[ContextVar[Reading]] = ContextVar("reading")
"""The answer that a task gives."""


class ContentLog:
    """Adds up what is read, and writes it."""

    def __init__(self) -> None:
        self._open: set[Reading] = set()
        self._read: dict[tuple[str, str, int], dict[str, int]] = {}
        self._next = 0.0

    def begin(self, caller: str, path: str) -> Reading:
        """Take note of an answer that the task begins."""
        reading = Reading(caller, path)
        current.set(reading)
        self._open.add(reading)
        return reading

    def end(self, reading: Reading) -> None:
        """Take note of its end."""
        self._open.discard(reading)
        self._add(reading, answers=1)

    def look(self, now: float) -> None:
        """Write what there is, if it is time."""
        if now >= self._next:
            self._next = now + EVERY
            self.write()

    def write(self) -> None:
        """Write what there is."""
        for reading in self._open:
            if reading.bytes:
                self._add(reading, answers=0)
        self._write()

    def _write(self) -> None:
        read, self._read = self._read, {}
        for (caller, path, status), amounts in read.items():
            extra = {"caller": caller, "path": path, "status": status, **amounts}
            log.info("%s read %s", caller, path, extra=extra)

    def _add(self, reading: Reading, *, answers: int) -> None:
        key = (reading.caller, reading.path, reading.status)
        if key not in self._read and len(self._read) >= MAX_LINES:
            self._write()
        amounts = self._read.setdefault(key, {"answers": 0, "blocks": 0, "bytes": 0})
        amounts["answers"] += answers
        amounts["blocks"] += reading.blocks
        amounts["bytes"] += reading.bytes
        reading.blocks = reading.bytes = 0
