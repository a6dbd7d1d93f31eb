"""Seq reservations: no output stream's numbering ever goes back, not even over a SIGKILL.

Each stream has one small file. kvbus writes a number into it *before* it uses the numbers below, a few thousand at a
time. The kernel keeps it even if the process is killed. After a kill the numbering goes on at the number in the file.
After a graceful shutdown it goes on exactly where it stopped. The number is there twice, each with a checksum of its
own; where neither is right, the numbering goes on far ahead of all that can have been used.
The file of a merged stream also has how many sources it ever carried. So a source that is taken away while kvbus is
down is cleared when kvbus is back.
A process locks the files it uses: two processes would overwrite each other's reservations.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zlib import crc32

from kvbus.daemon.disk import Disk, NotAFileError
from kvbus.daemon.lock import lock, sign

log = logging.getLogger("kvbus.daemon.seq_reservation")

AHEAD: Final = 4096
"""Numbers reserved at a time: the gap a kill leaves, which replay answers fill with empty batches."""

UNKNOWN: Final = 1 << 48
"""Where the numbering goes on if its reservation is damaged: ten million batches a second take a year to get there. The
time is added, in microseconds, so that a second damage leads further on, and not back to where the first one led."""

MARGIN: Final = 1 << 32
"""How much further the numbering goes on where the reservations themselves may be older than what was sent."""

_MAGIC: Final = b"kvbus-seq-mark-3"
_COPY: Final = struct.Struct("=QQQ")
"""The number, the lowest number that a state may go on with, and how many slots a merged stream ever had; the CRC-32 of
all and of the stream follows."""

_CRC: Final = struct.Struct("=I")
_COPY_SIZE: Final = _COPY.size + _CRC.size
_SIZE: Final = len(_MAGIC) + 2 * _COPY_SIZE
"""Bytes of a reservation. The name of the process that has the file follows."""

MOST: Final = 1 << 62
"""No number is as high as this."""

StreamKey = tuple[int, int]
"""A stream: its output's number in the configuration, and its slot (0 on a merged output)."""


def default_directory() -> Path | None:
    """Return a directory in memory: the user's runtime directory, else /dev/shm; None if there is neither."""
    for candidate in (os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm"):  # noqa: S108 - opened safely, see _open
        if candidate and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    return None


@dataclass(slots=True)
class _Reservation:
    """A stream's reservation, and its file.

    Attributes:
        fd: the file, locked; None where nothing is kept.
        seed: what the stream adds to the checksums, so that no other stream's file is taken for its own.
        number: no number from this one on was used.
        lowest: a state with a lower number is older than what was sent.
        slots: of a merged stream, one past the highest slot whose rank routers may know.
        used: this process may use the numbers below this one.
        file: the file's name.
    """

    fd: int | None = None
    seed: int = 0
    number: int = 0
    lowest: int = 0
    slots: int = 0
    used: int = 0
    file: str = ""


class SeqReservations:
    """The reservations of all outgoing streams, by output and slot.

    Args:
        directory: where the files are, made if it is not there; None: the reservations end with the process.
        disk: the real one, or a test's.
        sync: wait until a number is on the disk, before it counts.

    Attributes:
        also: called with each number that is reserved, before it counts.
    """

    def __init__(self, directory: Path | None, disk: Disk | None = None, *, sync: bool = False) -> None:
        self._sync = sync
        self._disk = disk or Disk()
        self._directory = directory
        self._streams: dict[StreamKey, _Reservation] = {}
        self.also: Callable[[int], None] | None = None

    def add(self, output: int, slot: int, name: str, least: int = 0) -> None:
        """Add a stream, unless it is there. The same name finds the same file, whatever other streams there are.

        Args:
            output: the output's number in the configuration.
            slot: the stream's slot.
            name: what the file is found by.
            least: where a stream begins that has no file yet.

        Raises:
            InUseError: another process numbers this stream; nothing has changed.
        """
        key = output, slot
        if key in self._streams:
            return
        stream = _Reservation(number=least)
        directory = self._directory
        if directory is not None:
            try:
                self._disk.make_directory(directory)
                stream = _open(self._disk, directory, name, least)
            except OSError as error:
                reason = error.strerror
                log.warning("seq reservations cannot be kept in %s: %s; a restart begins at 0", directory, reason)
                self._directory = None
                self.release()
        self._streams[key] = stream

    def drop(self, output: int, next_seqs: Mapping[StreamKey, int]) -> None:
        """Close the files of an output's streams, as :meth:`close` does: nobody is served there any more."""
        for key in [key for key in self._streams if key[0] == output]:
            stream = self._streams.pop(key)
            if key in next_seqs:
                self._set(stream, next_seqs[key], next_seqs[key])
            self._close_file(stream)

    def forget(self, output: int, slot: int) -> None:
        """Take a stream away, with its file."""
        stream = self._streams.pop((output, slot))
        if stream.fd is not None and self._directory is not None:
            try:
                there = self._disk.open_directory(self._directory)
                try:
                    self._disk.unlink(there, stream.file)
                finally:
                    self._disk.close(there)
            except OSError as error:
                log.warning("%s is not needed any more, delete it: %s", self._directory / stream.file, error)
            self._disk.close(stream.fd)

    def first(self, output: int, slot: int) -> int:
        """Return the number a stream begins with: 0, or past all numbers that an earlier process can have used."""
        stream = self._streams.get((output, slot))
        return stream.number if stream is not None else 0

    def lowest(self, output: int, slot: int) -> int:
        """Return the lowest number a state may go on with. One with a lower number is older than what was sent."""
        return self._streams[output, slot].lowest

    def skip(self, to: int, *, margin: bool = False, output: int | None = None) -> int:
        """Let every stream, or those of one output, begin at ``to`` or later.

        On disk nothing changes until a number is used.

        It returns the highest number that a stream begins with.

        Args:
            to: a number that may have been reached.
            margin: all of these numbers may be older than what was sent.
            output: the output; None: all of them.
        """
        for stream in [stream for key, stream in self._streams.items() if output in {None, key[0]}]:
            stream.number = max(stream.number, to) + margin * MARGIN
        return max((stream.number for stream in self._streams.values()), default=to)

    def use(self, output: int, slot: int, seq: int) -> None:
        """Reserve ``seq`` and numbers after it, if it is not reserved. Called before ``seq`` is sent."""
        stream = self._streams[output, slot]
        if seq >= stream.used:
            stream.used = seq + AHEAD
            if self.also is not None:
                self.also(stream.used)
            # a burst of batches is numbered before the first of them is in the state
            self._set(stream, stream.used, max(0, seq - AHEAD))

    def slots(self, output: int) -> int:
        """Return how many slots a merged output has ever had."""
        stream = self._streams.get((output, 0))
        return stream.slots if stream is not None else 0

    def widen(self, output: int, slots: int) -> None:
        """Keep that a merged output has so many slots. Called before anything of them is sent."""
        stream = self._streams[output, 0]
        if slots > stream.slots:
            stream.slots = slots
            self._set(stream, stream.number, stream.lowest)

    def close(self, next_seqs: Mapping[StreamKey, int]) -> None:
        """Close the files. The next process begins each stream with the number given here.

        Args:
            next_seqs: numbers by stream. A stream that is not in it keeps its reservation, and one that was never
                added here is left alone.
        """
        for key in next_seqs.keys() & self._streams.keys():
            self._set(self._streams[key], next_seqs[key], next_seqs[key])
        self.release()

    def release(self) -> None:
        """Close the files as they are: the reservations stay, and other processes may use them."""
        for stream in self._streams.values():
            self._close_file(stream)

    def _close_file(self, stream: _Reservation) -> None:
        if stream.fd is not None:
            self._disk.close(stream.fd)
            stream.fd = None

    def _set(self, stream: _Reservation, number: int, lowest: int) -> None:
        stream.number, stream.lowest = number, lowest
        if stream.fd is not None:
            try:
                _store(self._disk, stream.fd, stream.seed, number, lowest, stream.slots)
                if self._sync:
                    self._disk.sync(stream.fd)
            except OSError as error:
                log.error("seq %d is not reserved (%s): after a kill the numbering may go back", number, error)  # noqa: TRY400


def reached(directory: Path, disk: Disk | None = None) -> int:
    """Return the highest reservation in a directory, 0 where there is none."""
    disk = disk or Disk()
    highest = 0
    there = disk.open_directory(directory)
    try:
        for name in disk.names(there):
            if name.startswith("kvbus-") and name.endswith(".seq"):
                highest = max(highest, _reached(disk, there, name))
    finally:
        disk.close(there)
    return highest


def _reached(disk: Disk, directory: int, name: str) -> int:
    try:
        fd = disk.open(directory, name)
    except OSError:
        return 0
    try:
        found = _read(disk.pread(fd, _SIZE, 0), _seed(name))
    except OSError:
        return 0
    finally:
        disk.close(fd)
    return 0 if found is None else found[0]


def _digest(name: str) -> str:
    return hashlib.sha256(f"{os.getuid()}\n{name}".encode()).hexdigest()[:24]


def _seed(file: str) -> int:
    return crc32(file.encode())


def _open(disk: Disk, directory: Path, name: str, least: int) -> _Reservation:
    """Open a stream's file and lock it. Make a new one where there is none, or where the one there is damaged.

    Everybody may be able to write to the directory: this follows no link, and refuses another user's file. What is no
    file is deleted, and counts as a damaged one.
    """
    file = f"kvbus-{_digest(name)}.seq"
    there = disk.open_directory(directory)
    try:
        existed = file in disk.names(there)
        try:
            fd = disk.share(there, file)
        except NotAFileError:
            disk.unlink(there, file)
            fd = disk.share(there, file)
        try:
            _check_owner(disk, fd)
            lock(disk, fd, f"the numbering of {name} ({directory / file})", _SIZE)
            seed = _seed(file)
            found = _read(disk.pread(fd, _SIZE, 0), seed)
            if found is None:
                found = UNKNOWN + time.time_ns() // 1000 if existed else least, 0, 0
                if existed:
                    log.warning(
                        "%s is no seq reservation, or a damaged one: the numbering goes on at %d", file, found[0]
                    )
                disk.pwrite(fd, _MAGIC, 0)
                _store(disk, fd, seed, *found)
                disk.sync(fd)  # that there is one is not forgotten, whatever else is synced
                disk.sync_directory(there)
            sign(disk, fd, _SIZE)
        except BaseException:
            disk.close(fd)
            raise
    finally:
        disk.close(there)
    return _Reservation(fd, seed, *found, file=file)


def _check_owner(disk: Disk, fd: int) -> None:
    if disk.owner(fd) != os.getuid():
        raise PermissionError(1, "the file there is somebody else's")


def _store(disk: Disk, fd: int, seed: int, number: int, lowest: int, slots: int) -> None:
    copy = _COPY.pack(number, lowest, slots)
    copy += _CRC.pack(crc32(copy, seed))
    for at in (0, _COPY_SIZE):  # one of them is whole, wherever a kill comes
        disk.pwrite(fd, copy, len(_MAGIC) + at)


def _read(content: bytes, seed: int) -> tuple[int, int, int] | None:
    """Return a file's number, the lowest of a state, and the slots; None if it is damaged."""
    if len(content) < _SIZE or not content.startswith(_MAGIC):
        return None
    found = []
    for at in (len(_MAGIC), len(_MAGIC) + _COPY_SIZE):
        copy = content[at : at + _COPY.size]
        if crc32(copy, seed) == _CRC.unpack_from(content, at + _COPY.size)[0]:
            found.append(_COPY.unpack(copy))
    newest = max(found, default=(MOST, 0, 0))
    return newest if newest[0] < MOST else None
