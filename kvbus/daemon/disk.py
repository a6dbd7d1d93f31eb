"""The disk: all that kvbus asks of it to keep its state and its numbering.

:class:`Disk` is the real one. A test may give another with the same methods, which loses, tears or reorders what was
not synced. Files are opened by their names in an open directory, and used by their descriptors. A memory map is shared
with the kernel, so what was stored in it outlives the process.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a write fails with on a full disk."""


class Mapped(Protocol):
    """A file in memory."""

    def __getitem__(self, at: slice, /) -> bytes:
        """Return a part of it."""

    def __setitem__(self, at: slice, value: bytes, /) -> None:
        """Store as many bytes as the slice has."""

    def flush(self) -> object:
        """Write it to the disk, and wait until it is there."""

    def close(self) -> None:
        """Give the memory back; what was stored stays."""


class Disk:
    """The real disk. Every method may raise ``OSError``."""

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
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)

    def create(self, directory: int, name: str, *, keep: bool = False) -> int:
        """Open a file for writing at its beginning. It is made if it is not there, and emptied unless ``keep``."""
        how = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if keep else os.O_TRUNC)
        return os.open(name, how, 0o600, dir_fd=directory)

    def share(self, directory: int, name: str) -> int:
        """Open a small file to lock, read, write and map. It is made if it is not there, and must be a regular file."""
        how = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(name, how, 0o600, dir_fd=directory)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise PermissionError(errno.EPERM, f"{name} is no regular file")
        return fd

    def close(self, fd: int) -> None:
        """Close a file or a directory. A lock on it ends, unless it is mapped."""
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

    def pwrite(self, fd: int, data: bytes, at: int) -> int:
        """Write at a position; return how many bytes were written."""
        return os.pwrite(fd, data, at)

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

    def map(self, fd: int, size: int) -> Mapped:
        """Map the beginning of a file into memory. The map keeps the file open, and its lock."""
        return mmap.mmap(fd, size)

    def lock(self, fd: int) -> None:
        """Lock a file until its last descriptor is closed.

        Raises:
            BlockingIOError: another process has the lock.
        """
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def random_bytes(self, count: int) -> bytes:
        """Return bytes that nobody has had before, for the id of a file."""
        return os.urandom(count)
