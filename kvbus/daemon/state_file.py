"""A file of the state: a checkpoint or a write-ahead log, as frames behind a header.

The header has a random id, and names the log that comes before: a log the one it goes on from, with its length, and a
checkpoint the log that begins with it. So no file can stand in for another. A frame has the id of its file, its
lengths, a CRC-32 of its records, and a CRC-32 of all this and of its position, so that a damaged length makes nobody
read half a file into memory. The records carry the fingerprints of their payloads. A log may be written over an older
one, whose frames have another id.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar
from zlib import crc32

from kvbus.core.write_ahead_log import Frame, StateError
from kvbus.daemon.disk import Disk

T = TypeVar("T")

_FAMILY: Final = b"kvbus-state-"
MAGIC: Final = _FAMILY + b"011\n"
ID_BYTES: Final = 8

_HEADER: Final = struct.Struct("=16s16s8s8sQ")
"""The version, the identity, the file's id, the id and the length of the log before; the CRC-32 follows."""

_CRC: Final = struct.Struct("=I")
HEADER_SIZE: Final = _HEADER.size + _CRC.size

_HEAD: Final = struct.Struct("=8sQII")
"""The file's id, length of the payloads, length of the body, the body's CRC-32. The CRC-32 of this follows, then body
and payloads."""

_HEAD_SIZE: Final = _HEAD.size + _CRC.size

_SMALL: Final = 1024
"""Up to this many bytes, copying a payload costs less than handing it to the kernel separately."""

_CALL: Final = 96 * 1024
"""Bytes written in one call, about. Larger writes make the kernel use larger areas of free memory. In a virtual machine
the host has often taken those back, and each of their pages costs several times as much."""

_WINDOW: Final = 1024 * 1024
"""Bytes of a torn end that are looked through at a time."""


def identity(names: Sequence[str]) -> bytes:
    """Return what the files of one configuration have in common."""
    return hashlib.sha256("\n".join(names).encode()).digest()[:16]


def header(whose: bytes, file_id: bytes, before: bytes, length: int) -> bytes:
    """Return the beginning of a file.

    Args:
        whose: the configuration's :func:`identity`.
        file_id: the file's id.
        before: the id of the log it names.
        length: how long that log is.
    """
    packed = _HEADER.pack(MAGIC, whose, file_id, before, length)
    return packed + _CRC.pack(crc32(packed))


def other_version(name: str, begin: bytes) -> str | None:
    """Say of which version a file is that begins so; None if it is this one's, or does not say."""
    found, known = begin[len(_FAMILY) : len(MAGIC) - 1], MAGIC[len(_FAMILY) : -1]
    if not begin.startswith(_FAMILY) or found == known or not found.isdigit():
        return None
    return f"{name} is of version {found.decode()}, and this kvbus reads version {known.decode()}"


def _parse(name: str, begin: bytes, whose: bytes) -> tuple[bytes, bytes, int]:
    whole = len(begin) == HEADER_SIZE and begin.startswith(MAGIC)
    if not whole or _CRC.unpack_from(begin, _HEADER.size)[0] != crc32(begin[: _HEADER.size]):
        raise StateError(f"{name} is damaged")
    _, found, file_id, before, length = _HEADER.unpack_from(begin)
    if found != whose:
        raise StateError(f"{name} is of another configuration")
    return file_id, before, length


class StateFile:
    """A file that is read.

    Args:
        disk: the disk.
        directory: the open directory.
        name: the file's name.
        whose: the configuration's :func:`identity`.

    Raises:
        StateError: its header is damaged, or another version's or configuration's.
        OSError: it cannot be read.
    """

    def __init__(self, disk: Disk, directory: int, name: str, whose: bytes) -> None:
        self._disk = disk
        self._name = name
        self._fd = disk.open(directory, name)
        try:
            begin = disk.pread(self._fd, HEADER_SIZE, 0)
            self.id, self.before, self.before_length = _parse(name, begin, whose)
            self.size = disk.size(self._fd)
        except BaseException:
            self.close()
            raise
        self.end = HEADER_SIZE
        """How far it was read."""

    def close(self) -> None:
        """Close it."""
        self._disk.close(self._fd)

    def frames(
        self, read: Callable[[bytes, bytes], T | None], committed: int, *, open_end: bool = False
    ) -> Iterator[T]:
        """Yield what ``read`` makes of each frame's body and payloads (None: they are damaged).

        Args:
            read: decodes a frame.
            committed: the length that must be there, in whole frames.
            open_end: whether there may be more frames behind it, and a torn one at the end.

        Raises:
            StateError: it is damaged.
        """
        while open_end or self.end < committed:
            found = self._frame(read)
            if found is None:
                break
            frame, size = found
            if self.end < committed < self.end + size:
                raise self._damaged()
            self.end += size
            yield frame
        if self.end < committed or (open_end and self._goes_on()):
            raise self._damaged()

    def _frame(self, read: Callable[[bytes, bytes], T | None]) -> tuple[T, int] | None:
        at = self.end
        head = self._disk.pread(self._fd, _HEAD_SIZE, at)
        if len(head) < _HEAD_SIZE or _head_crc(head[: _HEAD.size], at) != head[_HEAD.size :]:
            return None
        found, rest, size, crc = _HEAD.unpack_from(head)
        begin = at + _HEAD_SIZE
        if found != self.id or size + rest > self.size - begin:
            return None
        body = self._disk.pread(self._fd, size, begin)
        if crc32(body) != crc:
            return None
        frame = read(body, self._disk.pread(self._fd, rest, begin + size))
        return None if frame is None else (frame, _HEAD_SIZE + size + rest)

    def _goes_on(self) -> bool:
        """Whether there is another frame behind one that cannot be read: a torn one is the last."""
        at = self.end + ID_BYTES
        while window := self._disk.pread(self._fd, _WINDOW, at):
            if self.id in window:
                return True
            at += max(len(window) - ID_BYTES + 1, 1)
        return False

    def _damaged(self) -> StateError:
        return StateError(f"{self._name} is damaged")


def write_frame(disk: Disk, fd: int, file_id: bytes, at: int, frame: Frame) -> int:
    """Write a frame behind the ``at`` bytes that there are; return its number of bytes."""
    body, payloads = frame
    size = sum(map(len, payloads))
    head = _HEAD.pack(file_id, size, len(body), crc32(body))
    head += _head_crc(head, at) + body
    if size <= _SMALL * len(payloads):
        _write_all(disk, fd, [head + b"".join(payloads)])
    else:
        pieces, together = [head, *payloads], max(1, _CALL * len(payloads) // size)
        for first in range(0, len(pieces), together):
            _write_all(disk, fd, pieces[first : first + together])
    return len(head) + size


def _head_crc(head: bytes, at: int) -> bytes:
    return _CRC.pack(crc32(head, at & 0xFFFFFFFF))


def _write_all(disk: Disk, fd: int, pieces: Sequence[bytes]) -> None:
    written = disk.writev(fd, pieces)
    if written < sum(map(len, pieces)):  # a signal came, or the disk is nearly full
        view = memoryview(b"".join(pieces))[written:]
        while view:
            view = view[disk.writev(fd, [view]) :]
