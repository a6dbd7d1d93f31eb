"""The log of the answers with blocks or batches that clients read over HTTP.

It names callers and paths, and counts answers, blocks and bytes. It never contains the blocks or batches themselves.

Every few seconds kvbus writes one line for each caller, path and status, with the counts since the last such line. So
every answer is in the log, but many answers do not make many lines. The blocks and bytes of an answer that is not
complete yet, or was aborted, are counted as far as they were sent.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Final

log = logging.getLogger("kvbus.http.content")

EVERY: Final = 10.0
"""Seconds between two writes of the content log. Each write has the lines collected since the previous one."""

MAX_LINES: Final = 1000
"""Maximum number of lines that kvbus collects, one for each caller, path and status.

When it is reached, kvbus writes the lines immediately and begins again.
"""


class Reading:
    """An HTTP answer with blocks or batches that is being sent to a client, and its counters for the content log.

    Attributes:
        status: the answer's HTTP status. It is 200 until the answer is complete, because only then kvbus records the
            real status.
        blocks: number of blocks sent since the last log line that counted this answer.
        bytes: number of bytes sent since that log line.
    """

    def __init__(self, caller: str, path: str) -> None:
        self.caller = caller
        self.path = path
        self.status = 200
        self.blocks = 0
        self.bytes = 0

    def add(self, blocks: int, size: int) -> None:
        """Count the blocks and bytes of a part of the answer."""
        self.blocks += blocks
        self.bytes += size


current: Final[ContextVar[Reading]] = ContextVar("reading")
"""The answer that the current task sends."""


class ContentLog:
    """The log of the answers, blocks and bytes that clients read over HTTP.

    It collects the counts, and writes them as log lines every :data:`EVERY` seconds.
    """

    def __init__(self) -> None:
        self._open: set[Reading] = set()
        self._read: dict[tuple[str, str, int], dict[str, int]] = {}
        self._next = 0.0

    def begin(self, caller: str, path: str) -> Reading:
        """Record that the current task begins to send an answer to the client ``caller``.

        Return the object that counts the blocks and bytes of this answer.
        """
        reading = Reading(caller, path)
        current.set(reading)
        self._open.add(reading)
        return reading

    def end(self, reading: Reading) -> None:
        """Record that an answer is complete or was aborted."""
        self._open.discard(reading)
        self._add(reading, answers=1)

    def look(self, now: float) -> None:
        """Write the log lines about the answers to clients if :data:`EVERY` seconds have passed since the last time."""
        if now >= self._next:
            self._next = now + EVERY
            self.write()

    def write(self) -> None:
        """Write the log lines about the answers to clients now.

        They include the blocks and bytes of unfinished answers.
        """
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
