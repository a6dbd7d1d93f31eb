"""The commit record: which write-ahead log is the current one, and how much of it was written before anything was sent.

A log alone cannot tell a torn end from one that was taken away. So kvbus writes here, behind each frame of the log and
before anything that follows from it is sent, how long the log is now. What is shorter was damaged; what is behind that
length was never sent and may be torn. The record also has the highest seq reservation of all streams.

A killed process may have stored one half of a write, and a bit may flip, so everything is there twice. The length has a
place for logs of even and of odd generations: the place of a new log is filled before the record names it.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple
from zlib import crc32

from kvbus.core.write_ahead_log import StateError
from kvbus.daemon.disk import Disk

NAME: Final = "commit"
NO_LOG: Final = bytes(8)
"""In place of a log's id: there is no state."""

NEW: Final = "commit.new"
"""What a record is called until it is complete."""

_MAGIC: Final = b"kvbus-commit-01\n"
_ENTRY: Final = struct.Struct("=QQ8sQ")
"""Version, generation, the log's id, the highest seq reservation; the CRC-32 follows. The higher version counts."""

_CRC: Final = struct.Struct("=I")
_LENGTH: Final = struct.Struct("=QQ")
"""A length, and the same with the bits of the log's id turned."""

_ENTRY_SIZE: Final = _ENTRY.size + _CRC.size
_LENGTHS: Final = len(_MAGIC) + 2 * _ENTRY_SIZE
_SIZE: Final = _LENGTHS + 4 * _LENGTH.size
_pack_twice: Final = struct.Struct("=QQQQ").pack


class Committed(NamedTuple):
    """What a commit record says."""

    generation: int = 0
    log_id: bytes = NO_LOG
    length: int = 0
    highest: int = 0


def read(disk: Disk, directory: int) -> Committed | None:
    """Read the record of a directory; None if it has none.

    Raises:
        StateError: it is damaged.
    """
    try:
        fd = disk.open(directory, NAME)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"the commit record cannot be read: {error.strerror or error}") from error
    try:
        found = disk.pread(fd, _SIZE + 1, 0)
    finally:
        disk.close(fd)
    entries = [_entry(found, len(_MAGIC) + copy * _ENTRY_SIZE) for copy in (0, 1)] if len(found) == _SIZE else []
    valid = [entry for entry in entries if entry is not None]
    if not valid or not found.startswith(_MAGIC):
        raise StateError("the commit record is damaged, or of another version")
    _, generation, log_id, _ = max(valid)
    highest = max(entry[-1] for entry in valid)
    if log_id == NO_LOG:
        return Committed(generation, highest=highest)
    at = _place(generation)
    lengths = [_LENGTH.unpack_from(found, at + copy * _LENGTH.size) for copy in (0, 1)]
    key = int.from_bytes(log_id, "little")
    length = max((length for length, check in lengths if check == length ^ key), default=0)
    return Committed(generation, log_id, length, highest)


def _entry(found: bytes, at: int) -> tuple[int, int, bytes, int] | None:
    entry = found[at : at + _ENTRY.size]
    return _ENTRY.unpack(entry) if _CRC.unpack_from(found, at + _ENTRY.size)[0] == crc32(entry) else None


def _place(generation: int) -> int:
    return _LENGTHS + (generation & 1) * 2 * _LENGTH.size


class CommitRecord:
    """A directory's record, written by its only process.

    Args:
        disk: the disk.
        directory: the open directory. A record that is there is replaced.
        committed: what the new record says at first.
    """

    def __init__(self, disk: Disk, directory: int, committed: Committed) -> None:
        self._disk = disk
        self._version = 0
        self._said = committed
        self._fd = disk.create(directory, NEW)
        try:
            disk.pwrite(self._fd, _MAGIC + bytes(_SIZE - len(_MAGIC)), 0)
            self._at = self._key = 0
            self.switch(committed)
            disk.rename(directory, NEW, NAME)
        except BaseException:
            disk.close(self._fd)
            raise

    def switch(self, committed: Committed) -> None:
        """Name another log; the highest reservation stays if it is higher."""
        self._at = _place(committed.generation)
        self._key = int.from_bytes(committed.log_id, "little")
        self.commit(committed.length)
        self._say(committed._replace(highest=max(committed.highest, self._said.highest)))

    def commit(self, length: int) -> None:
        """Say how long the log is: all of it was written, and what follows from it may be sent."""
        check = length ^ self._key
        self._disk.pwrite(self._fd, _pack_twice(length, check, length, check), self._at)

    def reserve(self, seq: int) -> None:
        """Say that some stream has reserved the numbers below ``seq``."""
        if seq > self._said.highest:
            self._say(self._said._replace(highest=seq))

    def _say(self, committed: Committed) -> None:
        self._said = committed
        self._version += 1
        entry = _ENTRY.pack(self._version, committed.generation, committed.log_id, committed.highest)
        entry += _CRC.pack(crc32(entry))
        for copy in (0, 1):
            self._disk.pwrite(self._fd, entry, len(_MAGIC) + copy * _ENTRY_SIZE)

    def close(self) -> None:
        """Close the file."""
        self._disk.close(self._fd)
