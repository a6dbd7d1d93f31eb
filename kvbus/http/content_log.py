"""The log of the clients that read content over HTTP: callers, paths and amounts, never the content.

Amounts are added up. Every few seconds there is one line for each caller, path and status. So nothing is omitted,
however many clients ask, and the line includes the part of an unfinished answer that was sent.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Final

log = logging.getLogger("kvbus.http.content")

EVERY: Final = 10.0
"""Seconds between two writes of the lines."""

MAX_LINES: Final = 1000
"""Maximum number of combinations of caller, path and status. At the maximum the lines are written at once."""


class Reading:
    """An answer with content that is being sent.

    Attributes:
        status: the answer's status; 200 until it is known.
        blocks: number of blocks sent since the last line in the log.
        bytes: number of bytes sent since then.
    """

    def __init__(self, caller: str, path: str) -> None:
        self.caller = caller
        self.path = path
        self.status = 200
        self.blocks = 0
        self.bytes = 0

    def add(self, blocks: int, size: int) -> None:
        """Count blocks and bytes that are being sent."""
        self.blocks += blocks
        self.bytes += size


current: Final[ContextVar[Reading]] = ContextVar("reading")
"""The answer that the current task sends."""


class ContentLog:
    """The sums of the content that is read over HTTP, and their log."""

    def __init__(self) -> None:
        self._open: set[Reading] = set()
        self._read: dict[tuple[str, str, int], dict[str, int]] = {}
        self._next = 0.0

    def begin(self, caller: str, path: str) -> Reading:
        """Record an answer that the current task begins."""
        reading = Reading(caller, path)
        current.set(reading)
        self._open.add(reading)
        return reading

    def end(self, reading: Reading) -> None:
        """Record the end of an answer."""
        self._open.discard(reading)
        self._add(reading, answers=1)

    def look(self, now: float) -> None:
        """Write the lines if they are due."""
        if now >= self._next:
            self._next = now + EVERY
            self.write()

    def write(self) -> None:
        """Write the lines now."""
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
