"""The lock of a state directory, so that only one process at a time uses the directory.

The lock file holds the name of the process that uses the directory. The kernel releases the lock when the process ends,
even if it is killed, so a remaining lock file does not stop the next process. The file is never deleted. Otherwise a
second process could create and lock a new file while the first process has locked the deleted file.

The file begins with a mark, which shows how far the database was written (:class:`Mark`). kvbus overwrites the mark in
place, which works even if the disk is full.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

from kvbus.common.errors import InUseError

log = logging.getLogger("kvbus.state")

HEAD_BYTES: Final = 64
"""Number of bytes at the beginning of the lock file that hold the :class:`Mark`.

The name of the process follows them.
"""

_MAGIC: Final = b"kvbus-mark-1\n\0\0\0"
_MARK: Final = struct.Struct("=16sQQQQ")
_CRC: Final = struct.Struct("=I")

_MAX_HOLDER: Final = 1024
"""Maximum length in bytes of the process's name in the lock file."""

_SAFELY: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags with which kvbus opens every file of the state.

A symbolic link is refused, because it may lead to any file. Opening a FIFO does not block.
"""


class Mark(NamedTuple):
    """The progress of the database when kvbus last sent a batch. It is stored in the lock file.

    If the database has made less progress than the mark says, it has lost commits.

    Attributes:
        writes: how often the database's row ``head`` was written (:class:`~kvbus.state.database.Head`).
        last: number of the last frame of the write-ahead log.
        highest: the lowest seq that is above the reserved seqs of all streams.
        given_up: whether a write to the database failed, so that the database has no valid state.
    """

    writes: int = 0
    last: int = 0
    highest: int = 0
    given_up: bool = False


class NotAFileError(PermissionError):
    """The path is not a regular file but, for example, a symbolic link, a FIFO, a directory or a device."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EPERM, f"{path.name} is not a regular file")


def open_file(path: Path, how: int) -> int:
    """Open a regular file with the flags ``how``, and refuse any other kind of file. Return the file descriptor.

    If the file is created, only its owner can read it.

    Raises:
        NotAFileError: the path is not a regular file.
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
    """The lock of one directory. It is acquired when the object is created.

    Args:
        directory: the directory, which must exist.
        what: a description of the directory for the message of the InUseError.

    Raises:
        InUseError: another process has the lock.
        OSError: the lock file cannot be created or opened.
    """

    NAME: Final = "lock"

    def __init__(self, directory: Path, what: str) -> None:
        self._fd: int | None = open_file(directory / self.NAME, os.O_RDWR | os.O_CREAT)
        try:
            _flock(self._opened, fcntl.LOCK_EX, what)
            self._sign()
        except BaseException:
            self.close()
            raise

    def _sign(self) -> None:
        command = " ".join(["kvbus", *sys.argv[1:]])
        myself = f"process {os.getpid()} on {socket.gethostname()} ({command})".encode(errors="replace")
        # Ignore a failure: only the error messages of other processes need this process's name in the lock file.
        with contextlib.suppress(OSError):
            os.ftruncate(self._opened, HEAD_BYTES)
            os.pwrite(self._opened, myself[:_MAX_HOLDER], HEAD_BYTES)

    @property
    def _opened(self) -> int:
        if self._fd is None:
            raise OSError(errno.EBADF, "the lock is released")
        return self._fd

    @property
    def is_new(self) -> bool:
        """Whether no mark of the database's progress was ever written to the lock file."""
        return not os.pread(self._opened, HEAD_BYTES, 0).strip(b"\0")

    def read_mark(self) -> Mark | None:
        """Return the mark in the lock file, which says how many writes of the database were complete.

        Return None if the mark is missing or damaged.
        """
        return _read_mark(self._opened)

    def write_mark(self, mark: Mark) -> None:
        """Overwrite the mark in the lock file, which says how far the database was written (:class:`Mark`)."""
        content = _MARK.pack(_MAGIC, *mark)
        content += _CRC.pack(crc32(content))
        if os.pwrite(self._opened, content, 0) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self) -> None:
        """Wait until the lock file is on the disk, with the :class:`Mark` that it contains."""
        os.fsync(self._opened)

    def close(self) -> None:
        """Release the lock, if it is held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@contextlib.contextmanager
def unused(directory: Path, what: str) -> Iterator[None]:
    """Lock a directory, so that no other process can use it until the ``with`` block ends.

    The directory may be read-only, because nothing is written.

    Raises:
        InUseError: another process has the directory's lock.
    """
    try:
        fd = open_file(directory / DirectoryLock.NAME, os.O_RDONLY)
    except FileNotFoundError:
        yield
        return
    try:
        _flock(fd, fcntl.LOCK_SH, what)
        yield
    finally:
        os.close(fd)


def mark_in(directory: Path) -> Mark | None:
    """Return the mark (progress of the database) in the lock file of a directory; None if it is missing or damaged.

    Another process may use the directory.
    """
    try:
        fd = open_file(directory / DirectoryLock.NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        return _read_mark(fd)
    finally:
        os.close(fd)


def _read_mark(fd: int) -> Mark | None:
    content = os.pread(fd, HEAD_BYTES, 0)
    found = content[: _MARK.size]
    if len(found) < _MARK.size or content[_MARK.size :][: _CRC.size] != _CRC.pack(crc32(found)):
        return None
    magic, writes, last, highest, given_up = _MARK.unpack(found)
    return Mark(writes, last, highest, bool(given_up)) if magic == _MAGIC else None


def _flock(fd: int, how: int, what: str) -> None:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(fd, _MAX_HOLDER, HEAD_BYTES).decode(errors="replace")
        holder = text if text.isprintable() and text else "another process"
        raise InUseError(what, holder) from None
    except OSError as error:
        reason = error.strerror or error
        log.warning("%s cannot be locked (%s): make sure that no second kvbus uses it", what, reason)
