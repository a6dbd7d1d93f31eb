"""A small file that is read whole and replaced whole: a reader finds the old content or the new one."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from math import inf
from pathlib import Path
from typing import Final

from kvbus.config import Config
from kvbus.daemon.disk import Disk

log = logging.getLogger("kvbus.daemon")

MOST_BYTES: Final = 64 * 1024 * 1024

FIRST_PAUSE: Final = 1.0
LAST_PAUSE: Final = 60.0
"""Seconds before a write that has failed is tried again; they double from one to the other."""


def name_of(config: Config, suffix: str) -> str:
    """Return the name of a file of this user's bus: other buses, and other users, may have theirs beside it."""
    whose = "\n".join([str(os.getuid()), *(f"{output.name} {output.endpoint}" for output in config.outputs)])
    return f"kvbus-{hashlib.sha256(whose.encode()).hexdigest()[:24]}.{suffix}"


def read(disk: Disk, directory: Path, name: str) -> bytes | None:
    """Return what a file holds; None if it cannot be read, or is somebody else's (some places are everybody's)."""
    try:
        there = disk.open_directory(directory)
        try:
            fd = disk.open(there, name)
            try:
                if disk.owner(fd) != os.getuid():
                    return None
                return disk.pread(fd, min(disk.size(fd), MOST_BYTES), 0)
            finally:
                disk.close(fd)
        finally:
            disk.close(there)
    except OSError:
        return None


def replace(disk: Disk, directory: Path, name: str, content: bytes) -> None:
    """Put a file with this content in the place of what has its name.

    Raises:
        OSError: it cannot be written; the one before is as it was.
    """
    new = f"{name}.new"
    there = disk.open_directory(directory)
    try:
        fd = disk.create(there, new)
        try:
            disk.pwrite(fd, content, 0)
            disk.sync(fd)
        finally:
            disk.close(fd)
        disk.rename(there, new, name)
        disk.sync_directory(there)
    finally:
        disk.close(there)


class KeptFile:
    """Keeps the newest content in a file. A write that fails is tried again, until one succeeds or the process ends.

    Args:
        disk: the real one, or a test's.
        directory: where the file is.
        name: of :func:`name_of`.
        cost: what a restart does without it, for people.
        failures: where writes that failed are counted, by the name's suffix.
    """

    def __init__(self, disk: Disk, directory: Path, name: str, cost: str, failures: Counter[str]) -> None:
        self._disk = disk
        self._directory = directory
        self._name = name
        self._cost = cost
        self._failures = failures
        self._content = b""
        self._pause = 0.0
        self._due = inf

    def keep(self, content: bytes, now: float) -> None:
        """Write another content."""
        self._content = content
        self._write(now)

    def look(self, now: float) -> None:
        """Try again what has failed, if it is time."""
        if now >= self._due:
            self._write(now)

    def _write(self, now: float) -> None:
        try:
            replace(self._disk, self._directory, self._name, self._content)
        except OSError as error:
            self._failures[self._name.rpartition(".")[2]] += 1
            if not self._pause:
                log.error("%s cannot be written (%s), trying again: %s", self._name, error, self._cost)  # noqa: TRY400
            self._pause = min(2 * self._pause, LAST_PAUSE) or FIRST_PAUSE
            self._due = now + self._pause
            return
        if self._pause:
            log.info("%s is written", self._name)
        self._pause, self._due = 0.0, inf
