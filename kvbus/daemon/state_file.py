"""A file of the state: a checkpoint or a write-ahead log, as frames behind a header.

The header has a random id, and names the log that comes before: a log the one it goes on from, with its length, and a
checkpoint the log that begins with it. So no file can stand in for another. A frame has the id of its file, its
lengths, a CRC-32 of its records, and a CRC-32 of all this and of its position, so that a damaged length makes nobody
read half a file into memory. The records carry the fingerprints of their payloads. A log may be written over an older
one, whose frames have another id.

A sealed file (:mod:`kvbus.daemon.state_seal`) has a magic of its own, its key in the header, and in each frame the
records and payloads sealed as one. The seal stands for the CRC-32 of the records, which would tell of them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar
from zlib import crc32

from kvbus.core.write_ahead_log import Frame, StateError
from kvbus.daemon.disk import Disk
from kvbus.daemon.state_keys import StateKeys

if TYPE_CHECKING:
    from kvbus.daemon.state_seal import Seal

T = TypeVar("T")

_FAMILY: Final = b"kvbus-state-"
_SEALED_FAMILY: Final = b"kvbus-sealed"
MAGIC: Final = _FAMILY + b"013\n"
SEALED: Final = _SEALED_FAMILY + MAGIC[len(_FAMILY) :]
ID_BYTES: Final = 8

_HEADER: Final = struct.Struct("=16s16s8s8sQ")
"""The version, the identity, the file's id, the id and the length of the log before; the CRC-32 follows."""

_CRC: Final = struct.Struct("=I")
HEADER_SIZE: Final = _HEADER.size + _CRC.size
WRAPPED_BYTES: Final = 72
"""Bytes of a file's sealed key with its nonce, before the CRC-32 of a sealed header."""

SEAL_BYTES: Final = 16
"""Bytes that sealed records and payloads are longer."""

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


def header(
    disk: Disk, keys: StateKeys, whose: bytes, file_id: bytes, before: bytes, length: int
) -> tuple[bytes, Seal | None]:
    """Return the beginning of a file, and its seal.

    Args:
        disk: where random bytes come from.
        keys: what seals it.
        whose: the configuration's :func:`identity`.
        file_id: the file's id.
        before: the id of the log it names.
        length: how long that log is.
    """
    packed = _HEADER.pack(MAGIC if keys.first is None else SEALED, whose, file_id, before, length)
    wrapped, seal = keys.begin(packed, disk.random_bytes)
    packed += wrapped
    return packed + _CRC.pack(crc32(packed)), seal


def described(begin: bytes) -> tuple[str, bool]:
    """Return the version of a file that begins so, empty if it says none, and whether it is sealed."""
    version = begin[len(_FAMILY) : len(MAGIC) - 1]
    ours = begin.startswith((_FAMILY, _SEALED_FAMILY)) and version.isdigit()
    return version.decode() if ours else "", begin.startswith(_SEALED_FAMILY)


def other_version(name: str, begin: bytes) -> str | None:
    """Say of which version a file is that begins so; None if it is this one's, or does not say."""
    found, known = described(begin)[0], MAGIC[len(_FAMILY) : -1].decode()
    return f"{name} is of version {found}, and this kvbus reads version {known}" if found not in {"", known} else None


def _parse(name: str, begin: bytes, whose: bytes) -> tuple[bytes, bytes, int, bytes, bytes]:
    """The file's id, that of the log before and its length; what the seal is bound to, and the sealed key."""
    size = _HEADER.size + (WRAPPED_BYTES if begin.startswith(SEALED) else 0)
    whole = len(begin) >= size + _CRC.size and begin.startswith((MAGIC, SEALED))
    if not whole or _CRC.unpack_from(begin, size)[0] != crc32(begin[:size]):
        raise StateError(f"{name} is damaged")
    _, found, file_id, before, length = _HEADER.unpack_from(begin)
    if found != whose:
        raise StateError(f"{name} is of another configuration")
    return file_id, before, length, begin[: _HEADER.size], begin[_HEADER.size : size]


class StateFile:
    """A file that is read. Its frames can be, once :meth:`unseal` was called.

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
            begin = disk.pread(self._fd, HEADER_SIZE + WRAPPED_BYTES, 0)
            self.id, self.before, self.before_length, self._head, self._wrapped = _parse(name, begin, whose)
            self.size = disk.size(self._fd)
        except BaseException:
            self.close()
            raise
        self._seal: Seal | None = None
        self.end = HEADER_SIZE + len(self._wrapped)
        """How far it was read."""

    def unseal(self, keys: StateKeys) -> None:
        """Take the key that opens it.

        Raises:
            StateKeyError: none does.
        """
        self._seal = keys.open(self._name, self._head, self._wrapped)

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
        more = SEAL_BYTES if self._wrapped else 0
        if found != self.id or size + rest + more > self.size - begin:
            return None
        if self._seal is not None:
            opened = self._seal.open(at, head, self._disk.pread(self._fd, size + rest + more, begin))
            if opened is None:
                return None
            body, payloads = opened[:size], opened[size:]
        else:
            body = self._disk.pread(self._fd, size, begin)
            if crc32(body) != crc:
                return None
            payloads = self._disk.pread(self._fd, rest, begin + size)
        frame = read(body, payloads)
        return None if frame is None else (frame, _HEAD_SIZE + size + rest + more)

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


def write_frame(disk: Disk, fd: int, file_id: bytes, at: int, frame: Frame, seal: Seal | None = None) -> int:
    """Write a frame behind the ``at`` bytes that there are, sealed if the file is; return its number of bytes."""
    body, payloads = frame
    size = sum(map(len, payloads))
    head = _HEAD.pack(file_id, size, len(body), crc32(body) if seal is None else 0)
    head += _head_crc(head, at)
    if seal is not None:
        head += seal.seal(at, head, b"".join((body, *payloads)))
        for first in range(0, len(head), _CALL):
            _write_all(disk, fd, [head[first : first + _CALL]])
        return len(head)
    head += body
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
