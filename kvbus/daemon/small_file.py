"""A small file that is read whole and replaced whole: a reader finds the old content or the new one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

from kvbus.config import Config
from kvbus.daemon.disk import Disk

MOST_BYTES: Final = 64 * 1024 * 1024


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
