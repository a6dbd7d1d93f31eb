"""Where each output stream's numbering has got to, so that it never goes back, not even over a SIGKILL.

One small file per stream, mapped into memory: raising a mark is a store of eight bytes, which the kernel keeps
whatever becomes of the process. A mark is raised *before* the numbers below it are used, a few thousand at a time:
after a kill the numbering goes on at the mark, after an orderly end exactly where it stopped. A file is locked while it
is used: two processes would lower each other's marks.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from kvbus.daemon.lock import lock, open_file, sign

log = logging.getLogger("kvbus.daemon.seq_reservation")

AHEAD: Final = 4096
"""Numbers reserved at a time: the gap a kill leaves, which replay answers fill with empty batches."""

_MAGIC: Final = b"kvbus-seq-mark-1"
_U64: Final = struct.Struct("=Q")
_SIZE: Final = len(_MAGIC) + _U64.size
"""Bytes of a mark; who has the file stands behind it."""


def default_directory() -> Path | None:
    """Memory-backed and out of the way: the user's runtime directory, else /dev/shm; None if there is neither."""
    for candidate in (os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm"):  # noqa: S108 - opened safely, see SeqMarks
        if candidate and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    return None


class SeqMarks:
    """Marks of a list of streams.

    Args:
        directory: where the files are kept, made if it is not there; None: marks are forgotten with the process.
        names: of the streams; the same name finds the same mark again, whatever other streams there are.

    Raises:
        InUseError: another process numbers one of these streams.
    """

    def __init__(self, directory: Path | None, names: Sequence[str]) -> None:
        self._limits: list[int] = []
        self._maps: list[mmap.mmap] = []
        self._directory = directory
        for name in names:
            self.add(name)

    def add(self, name: str) -> int:
        """One more stream; its place.

        Raises:
            InUseError: another process numbers it; nothing has changed.
        """
        directory = self._directory
        if directory is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._maps.append(_open(directory / f"kvbus-{_digest(name)}.seq", name))
            except OSError as error:
                log.warning(
                    "seq reservations cannot be kept in %s: %s; a restart begins at 0", directory, error.strerror
                )
                self._directory = None
                self._release()
        self._limits.append(0)
        return len(self._limits) - 1

    @property
    def kept(self) -> bool:
        """Whether a restart will find the marks."""
        return bool(self._maps)

    def first(self, stream: int) -> int:
        """The number a stream begins with: 0, or past everything a former process can have used."""
        return int(_U64.unpack_from(self._maps[stream], len(_MAGIC))[0]) if self._maps else 0

    def least(self, stream: int) -> int:
        """The lowest number a stream may go on with: a state that says less is older than what was sent."""
        return max(0, self.first(stream) - AHEAD)

    def use(self, stream: int, seq: int) -> None:
        """Called before ``seq`` is sent."""
        if seq >= self._limits[stream]:
            self._set(stream, seq + AHEAD)

    def close(self, following: Sequence[int]) -> None:
        """An orderly end: ``following[stream]`` is the number the next process shall begin with."""
        for stream, seq in enumerate(following):
            self._set(stream, seq)
        self._release()

    def _set(self, stream: int, value: int) -> None:
        self._limits[stream] = value
        if self._maps:
            _U64.pack_into(self._maps[stream], len(_MAGIC), value)

    def _release(self) -> None:
        for mapped in self._maps:
            mapped.close()
        self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()


def reached(directory: Path) -> int:
    """How far the numbering has got that is kept in a directory: its highest mark, 0 where there is none."""
    highest = 0
    for path in directory.glob("kvbus-*.seq"):
        try:
            found = path.read_bytes()[:_SIZE]
        except OSError:
            continue
        if found.startswith(_MAGIC) and len(found) == _SIZE:
            highest = max(highest, _U64.unpack_from(found, len(_MAGIC))[0])
    return highest


def _digest(name: str) -> str:
    return hashlib.sha256(f"{os.getuid()}\n{name}".encode()).hexdigest()[:24]


def _open(path: Path, name: str) -> mmap.mmap:
    """The mapped file, made anew where there is none or where it is not one of ours.

    The directory may be everybody's: links are not followed, and somebody else's file is not trusted.
    """
    fd = open_file(path)
    try:
        if os.fstat(fd).st_uid != os.getuid():
            raise PermissionError(1, "the file there is somebody else's")
        lock(fd, f"the numbering of {name} ({path})", _SIZE)
        found = os.pread(fd, _SIZE, 0)
        if len(found) < _SIZE or not found.startswith(_MAGIC):
            if found:
                log.warning("%s is no file of seq reservations; made anew", path.name)
            os.ftruncate(fd, 0)
            os.pwrite(fd, _MAGIC + bytes(_U64.size), 0)
        sign(fd, _SIZE)
        return mmap.mmap(fd, _SIZE)  # has a descriptor of its own, which keeps the lock
    finally:
        os.close(fd)
