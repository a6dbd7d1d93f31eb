"""One process at a time: a lock on an open file, which says who has it.

The kernel lets go of the lock when its holder ends, however it ends, so a file that a killed process has left behind is
in nobody's way. The file itself is never deleted: a second process would make another one, and lock that.
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
"""Bytes that say who has the lock."""


def open_file(path: Path) -> int:
    """Open a file to be locked, made if it is not there. Links are not followed, and a child does not inherit it.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PermissionError(1, f"{path.name} is no regular file")
    return fd


def lock(fd: int, what: str, at: int = 0) -> None:
    """Take an open file for this process, until its last descriptor is closed.

    Args:
        fd: of the file.
        what: it stands for, in words.
        at: from this byte on its holder has signed it.

    Raises:
        InUseError: another process has it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InUseError(what, _holder(fd, at)) from None
    except OSError as error:
        reason = error.strerror or error
        log.warning("%s cannot be locked (%s): make sure that no second kvbus uses it", what, reason)


def sign(fd: int, at: int = 0) -> None:
    """Write into a locked file who has it, from byte ``at`` on; what is before stays."""
    with contextlib.suppress(OSError):  # a full disk: whoever is refused is not told by whom
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
        directory: it must be there.
        what: it stands for, in words.

    Raises:
        InUseError: another process has it.
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
        """Let others have it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
