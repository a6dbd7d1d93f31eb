"""One process at a time: a lock on an open file, and in the file the name of the process that has it.

The kernel releases the lock when the process ends, also when it is killed, so a file that is left over locks nobody
out. The file itself is never deleted: a second process would make another one, and lock that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Final

from kvbus.common.errors import InUseError
from kvbus.daemon.disk import Disk

log = logging.getLogger("kvbus.daemon.lock")

_MAX_HOLDER: Final = 1024
"""Bytes of the name of the process that has the lock."""


def lock(disk: Disk, fd: int, what: str, at: int = 0) -> None:
    """Lock an open file for this process, until its last descriptor is closed.

    Args:
        disk: the disk it is on.
        fd: the file's descriptor.
        what: the thing that the lock is for, in words.
        at: position of the process's name in the file.

    Raises:
        InUseError: another process has the lock.
    """
    try:
        disk.lock(fd)
    except BlockingIOError:
        raise InUseError(what, _holder(disk, fd, at)) from None
    except OSError as error:
        reason = error.strerror or error
        log.warning("%s cannot be locked (%s): make sure that no second kvbus uses it", what, reason)


def sign(disk: Disk, fd: int, at: int = 0) -> None:
    """Write this process's name into a locked file at position ``at``; the bytes before it stay."""
    with contextlib.suppress(OSError):  # on a full disk the other process gets no name
        disk.truncate(fd, at)
        disk.pwrite(fd, _myself(), at)


def _myself() -> bytes:
    command = " ".join(["kvbus", *sys.argv[1:]])
    return f"process {os.getpid()} on {socket.gethostname()} ({command})".encode(errors="replace")[:_MAX_HOLDER]


def _holder(disk: Disk, fd: int, at: int) -> str:
    text = disk.pread(fd, _MAX_HOLDER, at).decode(errors="replace")
    return text if text.isprintable() and text else "another process"


class DirectoryLock:
    """A directory that belongs to one process at a time.

    Args:
        directory: the directory, which must exist.
        what: the thing that the lock is for, in words.
        disk: the real one, or a test's.

    Raises:
        InUseError: another process has the directory.
        OSError: no lock file can be made in it.
    """

    NAME: Final = "lock"

    def __init__(self, directory: Path, what: str, disk: Disk | None = None) -> None:
        self._disk = disk or Disk()
        there = self._disk.open_directory(directory)
        try:
            self._fd: int | None = self._disk.share(there, self.NAME)
        finally:
            self._disk.close(there)
        try:
            lock(self._disk, self._fd, what)
            sign(self._disk, self._fd)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            self._disk.close(self._fd)
            self._fd = None
