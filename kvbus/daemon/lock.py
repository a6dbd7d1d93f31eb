"""One process at a time: a lock on an open file, and in the file the name of the process that has it.

The kernel releases the lock when the process ends, also when it is killed, so a file that is left over locks nobody
out. The file itself is never deleted: a second process would make another one, and lock that.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import sys
from pathlib import Path
from typing import Final

from kvbus.errors import InUseError

log = logging.getLogger("kvbus.daemon.lock")

_MAX_HOLDER: Final = 1024
"""Bytes of the name of the process that has the lock."""


def open_file(path: Path) -> int:
    """Open a file to lock, and make it if it is not there. This follows no link, and a child does not inherit the file.

    Raises:
        OSError: the file cannot be opened, or is no regular file.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PermissionError(1, f"{path.name} is no regular file")
    return fd


def lock(fd: int, what: str, at: int = 0) -> None:
    """Lock an open file for this process, until its last descriptor is closed.

    Args:
        fd: the file's descriptor.
        what: the thing that the lock is for, in words.
        at: position of the process's name in the file.

    Raises:
        InUseError: another process has the lock.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InUseError(what, _holder(fd, at)) from None
    except OSError as error:
        reason = error.strerror or error
        log.warning("%s cannot be locked (%s): make sure that no second kvbus uses it", what, reason)


def sign(fd: int, at: int = 0) -> None:
    """Write this process's name into a locked file at position ``at``; the bytes before it stay."""
    with contextlib.suppress(OSError):  # on a full disk the other process gets no name
        os.ftruncate(fd, at)
        os.pwrite(fd, _myself(), at)


def _myself() -> bytes:
    command = " ".join(["kvbus", *sys.argv[1:]])
    return f"process {os.getpid()} on {socket.gethostname()} ({command})".encode(errors="replace")[:_MAX_HOLDER]


def _holder(fd: int, at: int) -> str:
    text = os.pread(fd, _MAX_HOLDER, at).decode(errors="replace")
    return text if text.isprintable() and text else "another process"


class DirectoryLock:
    """A directory that belongs to one process at a time.

    Args:
        directory: the directory, which must exist.
        what: the thing that the lock is for, in words.

    Raises:
        InUseError: another process has the directory.
        OSError: no lock file can be made in it.
    """

    NAME: Final = "lock"

    def __init__(self, directory: Path, what: str) -> None:
        self._fd: int | None = open_file(directory / self.NAME)
        try:
            lock(self._fd, what)
            sign(self._fd)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
