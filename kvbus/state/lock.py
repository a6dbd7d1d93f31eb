"""One process at a time: a lock on a file in the directory, and in the file the name of the process that has it.

The kernel releases the lock when the process ends, even if it is killed, so a file that is left over locks nobody out.
The file is never deleted: a second process would make another one and lock that.

The file begins with a few bytes for the store, which it may overwrite in place while a disk is full.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import sys
from pathlib import Path
from typing import Final

from kvbus.common.errors import InUseError

log = logging.getLogger("kvbus.state")

HEAD_BYTES: Final = 64
"""Bytes for the store. The name of the process follows."""

_MAX_HOLDER: Final = 1024
"""Bytes of the name of the process that has the lock."""

_SAFELY: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link leads anywhere, and opening a FIFO may wait for ever."""


class NotAFileError(PermissionError):
    """A link, a FIFO, a directory or a device has the name of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EPERM, f"{path.name} is not a regular file")


def open_file(path: Path, how: int) -> int:
    """Open a regular file that only its owner may read, and nothing else.

    Raises:
        NotAFileError: something else has this name.
    """
    try:
        fd = os.open(path, how | _SAFELY, 0o600)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EISDIR, errno.ENXIO}:
            raise NotAFileError(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotAFileError(path)
    return fd


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
        self._fd: int | None = open_file(directory / self.NAME, os.O_RDWR | os.O_CREAT)
        try:
            self._lock(what)
            self._sign()
        except BaseException:
            self.release()
            raise

    def _lock(self, what: str) -> None:
        fd = self._opened
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, _MAX_HOLDER, HEAD_BYTES).decode(errors="replace")
            holder = text if text.isprintable() and text else "another process"
            raise InUseError(what, holder) from None
        except OSError as error:
            reason = error.strerror or error
            log.warning("%s cannot be locked (%s): make sure that no second kvbus uses it", what, reason)

    def _sign(self) -> None:
        command = " ".join(["kvbus", *sys.argv[1:]])
        myself = f"process {os.getpid()} on {socket.gethostname()} ({command})".encode(errors="replace")
        with contextlib.suppress(OSError):  # on a full disk the other process gets no name
            os.ftruncate(self._opened, HEAD_BYTES)
            os.pwrite(self._opened, myself[:_MAX_HOLDER], HEAD_BYTES)

    @property
    def _opened(self) -> int:
        if self._fd is None:
            raise OSError(errno.EBADF, "the lock is released")
        return self._fd

    def read_head(self) -> bytes:
        """Read the store's bytes."""
        return os.pread(self._opened, HEAD_BYTES, 0)

    def write_head(self, content: bytes) -> None:
        """Overwrite the store's bytes."""
        if os.pwrite(self._opened, content, 0) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync_head(self) -> None:
        """Wait until the store's bytes are on the disk."""
        os.fsync(self._opened)

    def release(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
