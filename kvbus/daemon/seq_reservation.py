"""Where each output stream's numbering has got to, so that it never goes back, not even over a SIGKILL.

One small file per stream, mapped into memory: raising a mark is a store of eight bytes, which the kernel keeps
whatever becomes of the process. A mark is raised *before* the numbers below it are used, a few thousand at a time:
after a kill the numbering goes on at the mark, after an orderly end exactly where it stopped.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

log = logging.getLogger("kvbus.marks")

AHEAD: Final = 4096
"""Numbers reserved at a time: the gap a kill leaves, which replay answers fill with empty batches."""

_MAGIC: Final = b"kvbus-seq-mark-1"
_U64: Final = struct.Struct("=Q")


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
    """

    def __init__(self, directory: Path | None, names: Sequence[str]) -> None:
        self._limits: list[int] = []
        self._maps: list[mmap.mmap] = []
        self._directory = directory
        for name in names:
            self.add(name)

    def add(self, name: str) -> int:
        """One more stream; its place."""
        directory = self._directory
        self._limits.append(0)
        if directory is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._maps.append(_open(directory / f"kvbus-{_digest(name)}.seq"))
            except OSError as error:
                log.warning("seq marks cannot be kept in %s: %s; a restart begins at 0", directory, error.strerror)
                self._directory = None
                self._release()
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


def _digest(name: str) -> str:
    return hashlib.sha256(f"{os.getuid()}\n{name}".encode()).hexdigest()[:24]


def _open(path: Path) -> mmap.mmap:
    """The mapped file, made anew where there is none or where it is not one of ours.

    The directory may be everybody's: links are not followed, and somebody else's file is not trusted.
    """
    size = len(_MAGIC) + _U64.size
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
            raise PermissionError(1, "the file there is somebody else's")
        if info.st_size != size or os.pread(fd, len(_MAGIC), 0) != _MAGIC:
            if info.st_size:
                log.warning("%s is no file of seq marks; made anew", path.name)
            os.ftruncate(fd, 0)
            os.pwrite(fd, _MAGIC + bytes(_U64.size), 0)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
