"""The disk: all that kvbus asks of it to keep its state and its numbering.

:class:`Disk` is the real one. A test may give another with the same methods, which loses, tears or reorders what was
not synced. Files are opened by their names in an open directory, and used by their descriptors.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a write fails with on a full disk."""


_SAFELY: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link leads anywhere, and a FIFO may keep whoever opens it waiting for ever."""


class NotAFileError(PermissionError):
    """A link, a FIFO, a directory or a device has the name of a file."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.EPERM, f"{name} is no regular file")


class Disk:
    """The real disk. Every method may raise ``OSError``.

    What is opened is a regular file of that very name, or :class:`NotAFileError` is raised.
    """

    def make_directory(self, path: Path) -> None:
        """Make a directory and those above it, unless they are there."""
        path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def open_directory(self, path: Path) -> int:
        """Open a directory, in which the other methods find files by their names."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def names(self, directory: int) -> list[str]:
        """Return the names of what is in a directory."""
        return os.listdir(directory)

    def open(self, directory: int, name: str) -> int:
        """Open a file for reading."""
        return _open(directory, name, os.O_RDONLY)

    def create(self, directory: int, name: str) -> int:
        """Make a file, in place of one of that name, and open it for writing."""
        self.unlink(directory, name)
        return _open(directory, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def reuse(self, directory: int, name: str) -> int | None:
        """Open an old file for writing at its beginning; None if there is none that nobody else could miss."""
        try:
            fd = _open(directory, name, os.O_WRONLY)
        except (FileNotFoundError, NotAFileError):
            return None
        if os.fstat(fd).st_nlink > 1:
            os.close(fd)
            return None
        return fd

    def share(self, directory: int, name: str) -> int:
        """Open a small file to lock, read and write. It is made if it is not there."""
        return _open(directory, name, os.O_RDWR | os.O_CREAT)

    def close(self, fd: int) -> None:
        """Close a file or a directory. A lock on it ends."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Return a file's length."""
        return os.fstat(fd).st_size

    def owner(self, fd: int) -> int:
        """Return the user whose file it is."""
        return os.fstat(fd).st_uid

    def pread(self, fd: int, size: int, at: int) -> bytes:
        """Read up to ``size`` bytes at a position; fewer only at the end."""
        return os.pread(fd, size, at)

    def pwrite(self, fd: int, data: bytes, at: int) -> None:
        """Write a few bytes at a position, all or none of them."""
        if os.pwrite(fd, data, at) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def writev(self, fd: int, pieces: Sequence[bytes | memoryview]) -> int:
        """Write behind what was written last; return how many bytes were written."""
        return os.writev(fd, pieces)

    def truncate(self, fd: int, size: int) -> None:
        """Make a file as long as this."""
        os.ftruncate(fd, size)

    def rename(self, directory: int, name: str, to: str) -> None:
        """Give a file another name in its directory, in place of a file that had it."""
        os.rename(name, to, src_dir_fd=directory, dst_dir_fd=directory)

    def unlink(self, directory: int, name: str) -> None:
        """Delete a file; one that is not there is no error."""
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            return

    def sync(self, fd: int) -> None:
        """Wait until what was written to a file is on the disk, and can be read after a power cut."""
        os.fdatasync(fd)

    def sync_directory(self, directory: int) -> None:
        """Wait until the names in a directory are on the disk."""
        os.fsync(directory)

    def lock(self, fd: int) -> None:
        """Lock a file until its last descriptor is closed.

        Raises:
            BlockingIOError: another process has the lock.
        """
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def random_bytes(self, count: int) -> bytes:
        """Return bytes that nobody has had before, for the id of a file."""
        return os.urandom(count)


def _open(directory: int, name: str, how: int) -> int:
    try:
        fd = os.open(name, how | _SAFELY, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EISDIR, errno.ENXIO}:
            raise NotAFileError(name) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotAFileError(name)
    return fd
