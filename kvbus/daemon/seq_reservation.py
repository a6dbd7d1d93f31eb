"""Seq reservations: no output stream's numbering ever goes back, not even over a SIGKILL.

Each stream has one small file, mapped into memory. kvbus writes a number into it *before* it uses the numbers below,
a few thousand at a time. That is a store of eight bytes, which the kernel keeps even if the process is killed. After
a kill the numbering goes on at the number in the file. After a graceful shutdown it goes on exactly where it stopped.
A process locks the files it uses: two processes would overwrite each other's reservations.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvbus.daemon.disk import Disk, Mapped
from kvbus.daemon.lock import lock, sign

log = logging.getLogger("kvbus.daemon.seq_reservation")

AHEAD: Final = 4096
"""Numbers reserved at a time: the gap a kill leaves, which replay answers fill with empty batches."""

_MAGIC: Final = b"kvbus-seq-mark-1"
_U64: Final = struct.Struct("=Q")
_SIZE: Final = len(_MAGIC) + _U64.size
"""Bytes of a reservation. The name of the process that has the file follows."""

StreamKey = tuple[int, int]
"""A stream: its output's number in the configuration, and its slot (0 on a merged output)."""


def default_directory() -> Path | None:
    """Return a directory in memory: the user's runtime directory, else /dev/shm; None if there is neither."""
    for candidate in (os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm"):  # noqa: S108 - opened safely, see _open
        if candidate and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    return None


class SeqReservations:
    """The reservations of all outgoing streams, by output and slot.

    Args:
        directory: where the files are, made if it is not there; None: the reservations end with the process.
        disk: the real one, or a test's.
    """

    def __init__(self, directory: Path | None, disk: Disk | None = None) -> None:
        self._disk = disk or Disk()
        self._directory = directory
        self._reserved: dict[StreamKey, int] = {}
        """This process may use each stream's numbers below this one."""
        self._maps: dict[StreamKey, Mapped] = {}
        """The mapped files; empty where nothing is kept."""

    def add(self, output: int, slot: int, name: str) -> None:
        """Add a stream, unless it is there. The same name finds the same file, whatever other streams there are.

        Raises:
            InUseError: another process numbers this stream; nothing has changed.
        """
        key = output, slot
        if key in self._reserved:
            return
        directory = self._directory
        if directory is not None:
            try:
                self._disk.make_directory(directory)
                self._maps[key] = _open(self._disk, directory, name)
            except OSError as error:
                reason = error.strerror
                log.warning("seq reservations cannot be kept in %s: %s; a restart begins at 0", directory, reason)
                self._directory = None
                self.release()
        self._reserved[key] = 0

    def first(self, output: int, slot: int) -> int:
        """Return the number a stream begins with: 0, or past all numbers that an earlier process can have used."""
        mapped = self._maps.get((output, slot))
        return int(_U64.unpack(mapped[len(_MAGIC) : _SIZE])[0]) if mapped is not None else 0

    def lowest(self, output: int, slot: int) -> int:
        """Return the lowest number a stream may go on with. A state with a lower one is older than what was sent."""
        return max(0, self.first(output, slot) - AHEAD)

    def use(self, output: int, slot: int, seq: int) -> None:
        """Reserve ``seq`` and numbers after it, if it is not reserved. Called before ``seq`` is sent."""
        key = output, slot
        if seq >= self._reserved[key]:
            self._set(key, seq + AHEAD)

    def close(self, next_seqs: Mapping[StreamKey, int]) -> None:
        """Close the files. The next process begins each stream with the number given here.

        Args:
            next_seqs: numbers by stream. A stream that is not in it keeps its reservation, and one that was never
                added here is left alone.
        """
        for key in next_seqs.keys() & self._reserved.keys():
            self._set(key, next_seqs[key])
        self.release()

    def release(self) -> None:
        """Close the files as they are: the reservations stay, and other processes may use them."""
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()

    def _set(self, key: StreamKey, value: int) -> None:
        self._reserved[key] = value
        mapped = self._maps.get(key)
        if mapped is not None:
            mapped[len(_MAGIC) : _SIZE] = _U64.pack(value)


def reached(directory: Path, disk: Disk | None = None) -> int:
    """Return the highest reservation in a directory, 0 where there is none."""
    disk = disk or Disk()
    highest = 0
    there = disk.open_directory(directory)
    try:
        for name in disk.names(there):
            if name.startswith("kvbus-") and name.endswith(".seq"):
                highest = max(highest, _reserved(disk, there, name))
    finally:
        disk.close(there)
    return highest


def _reserved(disk: Disk, directory: int, name: str) -> int:
    try:
        fd = disk.open(directory, name)
    except OSError:
        return 0
    try:
        found = disk.pread(fd, _SIZE, 0)
    except OSError:
        return 0
    finally:
        disk.close(fd)
    return int(_U64.unpack_from(found, len(_MAGIC))[0]) if found.startswith(_MAGIC) and len(found) == _SIZE else 0


def _digest(name: str) -> str:
    return hashlib.sha256(f"{os.getuid()}\n{name}".encode()).hexdigest()[:24]


def _open(disk: Disk, directory: Path, name: str) -> Mapped:
    """Map the file. Make a new one where there is none, or where the one there holds no reservation.

    Everybody may be able to write to the directory: this follows no link, and refuses another user's file.
    """
    file = f"kvbus-{_digest(name)}.seq"
    there = disk.open_directory(directory)
    try:
        fd = disk.share(there, file)
    finally:
        disk.close(there)
    try:
        if disk.owner(fd) != os.getuid():
            raise PermissionError(1, "the file there is somebody else's")
        lock(disk, fd, f"the numbering of {name} ({directory / file})", _SIZE)
        found = disk.pread(fd, _SIZE, 0)
        if len(found) < _SIZE or not found.startswith(_MAGIC):
            if found:
                log.warning("%s is no file of seq reservations; made anew", file)
            disk.truncate(fd, 0)
            disk.pwrite(fd, _MAGIC + bytes(_U64.size), 0)
        sign(disk, fd, _SIZE)
        return disk.map(fd, _SIZE)  # has a descriptor of its own, which keeps the lock
    finally:
        disk.close(fd)
