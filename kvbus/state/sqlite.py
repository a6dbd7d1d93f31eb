"""The store of a bus in SQLite: ``state.db`` in the directory of the state.

``head`` has one row: the reservations, and which checkpoint is valid. ``slices`` has the checkpoint, ``log`` the frames
since. SQLite commits each burst as one transaction to its write-ahead log. With ``sync`` it waits for the disk, else a
commit outlives the process and not a power cut.

SQLite has no checksum of a page, and it silently drops the end of a damaged write-ahead log. So kvbus checks more: each
row has a CRC-32, numbers have no gaps, and the *mark* says how far the database had got. The mark lies in the lock
file. kvbus overwrites it in place after each commit and before anything is sent. A database that is behind its mark
lacks commits.

The mark also has the highest reservation. If the database cannot be used, kvbus moves it aside and begins an empty one,
in which every stream begins above that number.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import sqlite3
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgspec

from kvbus.core.write_ahead_log import StateError
from kvbus.state.contract import MARGIN, MAX_SEQ, Reserved, StoreError
from kvbus.state.lock import HEAD_BYTES, DirectoryLock, NotAFileError, open_file

log = logging.getLogger("kvbus.state")

NAME: Final = "state.db"
FILES: Final = (NAME, f"{NAME}-wal", f"{NAME}-shm", f"{NAME}-journal")
"""The database and what SQLite keeps beside it."""

VERSION: Final = 1
"""Raise it whenever the tables or the records change."""

CHECKPOINT_AFTER: Final = 128 * 1024 * 1024
RESERVE_AHEAD: Final = 4096

UNKNOWN: Final = 1 << 48
"""Numbers begin here if nothing says what was used: ten million batches a second take a year to get there. The time is
added, in microseconds, so that a second damage leads further on and not back."""

_APPLICATION: Final = 0x6B766273
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_ROWS_AT_A_TIME: Final = 64
"""Rows that are deleted in one transaction."""

_TABLES: Final = (
    "CREATE TABLE head (id INTEGER PRIMARY KEY, crc INTEGER NOT NULL, content BLOB NOT NULL)",
    "CREATE TABLE log (id INTEGER PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL, payloads BLOB NOT NULL)",
    "CREATE TABLE slices (id INTEGER PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL)",
)

_OLD_SEQ: Final = struct.Struct("=16sQQQI")
"""A seq file of kvbus before the state was in SQLite: its magic, a number, two others, a CRC-32."""

_OLD_FILES: Final = re.compile(
    r"state-\d+\.(dump|log|part)(\.refused-\w+)?|log\.spare|commit(\.new)?|kvbus-\w+\.(seq|slots|found)(\.new)?"
)
_OLD_LOCK: Final = b"process "
"""A lock file of that kvbus begins so."""

_REFUSED: Final = ".refused-"


class Head(msgspec.Struct):
    """The row that says what the other rows mean.

    Attributes:
        boot: the boot of the machine in which it was written.
        synced: whether every commit has waited for the disk.
        older: the state is older than what was sent, until the next checkpoint is complete.
        names: the sources and outputs that the state belongs to.
        first: number of the checkpoint's first slice; 0: there is no valid checkpoint.
        count: how many slices it has.
        start: the last frame of the log that the checkpoint includes.
        writes: how often this row was written.
        reserved: the reservations.
    """

    boot: bytes
    synced: bool
    older: bool = False
    names: list[str] = []
    first: int = 0
    count: int = 0
    start: int = 0
    writes: int = 0
    reserved: Reserved = msgspec.field(default_factory=Reserved)


class Mark(NamedTuple):
    """How far the database had got before anything was sent.

    Attributes:
        writes: how often the head was written.
        last: number of the last frame of the log.
        highest: no number from this one on was used on any stream.
        given_up: the database could not be written, so it has no state.
    """

    writes: int = 0
    last: int = 0
    highest: int = 0
    given_up: bool = False


_MAGIC: Final = b"kvbus-mark-1\n\0\0\0"
_MARK: Final = struct.Struct("=16sQQQQ")
_CRC: Final = struct.Struct("=I")


def _packed(mark: Mark) -> bytes:
    content = _MARK.pack(_MAGIC, *mark)
    return content + _CRC.pack(crc32(content))


def _mark_of(content: bytes) -> Mark | None:
    """Return the mark in these bytes; None if there is none, or a damaged one."""
    found = content[: _MARK.size]
    if len(found) < _MARK.size or content[_MARK.size :][: _CRC.size] != _CRC.pack(crc32(found)):
        return None
    magic, writes, last, highest, given_up = _MARK.unpack(found)
    return Mark(writes, last, highest, bool(given_up)) if magic == _MAGIC else None


class _DamagedError(Exception):
    """The database is not what kvbus wrote."""


_NOT_NOW: Final = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_NOMEM,
}
_READING: Final = {sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS}


def _is_damage(error: Exception) -> bool:
    """Return whether the file is to blame, and not the disk or another program."""
    if not isinstance(error, sqlite3.Error):
        return isinstance(error, NotAFileError) or not isinstance(error, OSError)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    if code & 0xFF == sqlite3.SQLITE_IOERR:
        return code in _READING
    return code & 0xFF not in _NOT_NOW


def _is_full(error: Exception) -> bool:
    """Return whether the disk is full, or a limit for files is reached."""
    if isinstance(error, OSError):
        return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    code = getattr(error, "sqlite_errorcode", 0)
    return code == sqlite3.SQLITE_IOERR_WRITE or code & 0xFF == sqlite3.SQLITE_FULL


_FAULTS: Final = (sqlite3.Error, OSError, _DamagedError, StateError, msgspec.MsgspecError, TypeError, ValueError)
"""What a damaged file, a full disk and a disk that is gone raise."""


def boot_id() -> bytes:
    """Return 16 bytes that change whenever the machine is started; zeros where nobody knows."""
    try:
        return uuid.UUID(_BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(16)


class SqliteStore:
    """The store in one directory. See :class:`kvbus.state.contract.Store`.

    Args:
        directory: the directory, which must exist.
        lock: its lock. The store releases it.
        sync: wait for the disk at each commit.
        keeps_state: False: only reservations are kept, and a state that is there is deleted.
        old_directory: where kvbus kept its seq files before the state was in SQLite.
        boot: the boot of the machine; None: ask the kernel.
        repair: False: raise an error if the database is damaged, and change nothing.

    Raises:
        StoreError: the database cannot be opened, and it is not damaged.
    """

    def __init__(
        self,
        directory: Path,
        lock: DirectoryLock,
        *,
        sync: bool = False,
        keeps_state: bool = True,
        old_directory: Path | None = None,
        boot: bytes | None = None,
        repair: bool = True,
    ) -> None:
        self.place = str(directory)
        self.keeps_state = keeps_state
        self.checkpoint_after, self.reserve_ahead = CHECKPOINT_AFTER, RESERVE_AHEAD
        self.refused = 0
        self._directory = directory
        self._path = directory / NAME
        self._lock = lock
        self._sync = sync
        self._boot = boot_id() if boot is None else boot
        self._connection: sqlite3.Connection | None = None
        self._last = 0
        self._newest_slice = 0
        self.older = False
        self.reserved = Reserved()
        self._head = self._new_head()
        self._found = sync, self._boot
        head = lock.read_head()
        mark = _mark_of(head)
        first = not head.strip(b"\0") or head.startswith(_OLD_LOCK)
        try:
            if first and not any(os.path.lexists(directory / name) for name in FILES):
                self._begin_first(old_directory or directory)
            elif mark is not None and mark.given_up and repair:
                self._go_on_empty(mark)
            else:
                self._go_on(mark, repair=repair)
        except _FAULTS as error:
            self._disconnect()
            if not _is_full(error):
                raise self._error(error) from error
            log.error("the disk of %s is full: going on without state", directory)  # noqa: TRY400
            if mark is not None or os.path.lexists(self._path):
                self._skip_ahead()

    # -- opening -----------------------------------------------------------------------------------------------------

    def _new_head(self) -> Head:
        return Head(self._boot, self._sync, reserved=self.reserved)

    def _begin_first(self, old_directory: Path) -> None:
        """Make the first database of a directory. Numbers begin above those of the old seq files."""
        self.reserved.floor = _old_floor(old_directory)
        self._create()
        self._lock.sync_head()  # even without sync, a power cut must not lose that there was a store
        if old_directory == self._directory:
            _delete_old_files(old_directory)

    def _go_on_empty(self, mark: Mark) -> None:
        """Go on after a process that could not write the database."""
        try:
            self._open()
            self.reserved = self._head.reserved
        except _FAULTS as error:
            log.debug("the database of a state that was given up: %s", error)
            self._disconnect()
        self.reserved.raise_to(mark.highest)
        self._create()

    def _go_on(self, mark: Mark | None, *, repair: bool) -> None:
        try:
            self._open()
            head = self._head
            self.reserved = head.reserved
            self.older = head.older or (head.boot != self._boot and not head.synced)
            if mark is None:
                raise _DamagedError("the mark in the lock file is damaged")
            if not self.older and (head.writes < mark.writes or self._last < mark.last):
                raise _DamagedError("its newest commits are missing")
        except _FAULTS as error:
            if not repair or not _is_damage(error):
                raise
            self._refuse(str(error))
            return
        if self.older:
            self.reserved.raise_to(mark.highest)
            self.reserved.add_margin()
        self._found = head.synced, head.boot
        head.boot, head.synced, head.older = self._boot, self._sync, self.older
        if not self.keeps_state and (head.first or self._last > head.start):
            self._delete_state()

    def _open(self) -> None:
        """Open the database that is there, and read its head."""
        for name in FILES:
            if os.path.lexists(path := self._directory / name):
                fd = open_file(path, os.O_RDONLY)
                try:
                    if self._sync:
                        os.fsync(fd)  # an earlier process may have written without waiting for the disk
                finally:
                    os.close(fd)
        if not os.path.lexists(self._path):
            raise _DamagedError("the database is missing")
        self._connect()
        if self._number("PRAGMA application_id") != _APPLICATION:
            raise _DamagedError("it is not a database of kvbus")
        self._use_wal()
        version = self._number("PRAGMA user_version")
        if version != VERSION:
            raise _DamagedError(f"it is of version {version}, and this kvbus reads version {VERSION}")
        row = self._run("SELECT crc, content FROM head WHERE id = 1").fetchone()
        if row is None or crc32(row[1]) != row[0]:
            raise _DamagedError("its head is damaged")
        self._head = msgspec.msgpack.decode(row[1], type=Head)
        self._last = max(self._head.start, self._number("SELECT coalesce(max(id), 0) FROM log"))
        self._newest_slice = self._number("SELECT coalesce(max(id), 0) FROM slices")

    def _connect(self) -> None:
        self._connection = sqlite3.connect(self._path, timeout=0, isolation_level=None, cached_statements=32)
        self._run("PRAGMA locking_mode = EXCLUSIVE")
        self._run("PRAGMA trusted_schema = OFF")
        self._run("PRAGMA cell_size_check = ON")
        self._run(f"PRAGMA synchronous = {'FULL' if self._sync else 'OFF'}")

    def _use_wal(self) -> None:
        self._run("PRAGMA journal_mode = WAL")

    def _create(self) -> None:
        """Make an empty database with the reservations."""
        self._delete_files()
        os.close(open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        self._last = self._newest_slice = 0
        self._head = self._new_head()
        self._connect()
        self._use_wal()
        self._run("BEGIN")
        self._run(f"PRAGMA application_id = {_APPLICATION}")
        self._run(f"PRAGMA user_version = {VERSION}")
        for table in _TABLES:
            self._run(table)
        self._write_head()
        self._run("COMMIT")
        if self._sync:
            fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        self._write_mark()

    def _refuse(self, why: str) -> None:
        """Move the database aside, and begin an empty one with numbers ahead of everything that was sent."""
        self._disconnect()
        self._skip_ahead()
        self.older = False
        self.refused = max(1, self._move_aside(why))
        self._create()

    def _skip_ahead(self) -> None:
        """Raise every reservation above all numbers that can have been used."""
        mark = _mark_of(self._lock.read_head())
        if mark is None or mark.highest >= MAX_SEQ - MARGIN:
            self.reserved.raise_to(UNKNOWN + time.time_ns() // 1000)
        else:
            self.reserved.raise_to(mark.highest + MARGIN)

    def _move_aside(self, why: str) -> int:
        """Rename the files of the database, so that people can look at them. Return how many files that were."""
        stamp = time.strftime("%Y%m%dT%H%M%S")
        text = "the state in %s is refused (%s): moved aside as *%s%s, beginning empty"
        log.error(text, self.place, why, _REFUSED, stamp)
        for path in self._directory.iterdir():
            if _REFUSED in path.name:  # one is enough to see what went wrong, and more would fill the disk
                with contextlib.suppress(IsADirectoryError, PermissionError):
                    path.unlink()
        there = [path for name in FILES if os.path.lexists(path := self._directory / name)]
        for path in there:
            path.rename(path.with_name(f"{path.name}{_REFUSED}{stamp}"))
        return len(there)

    def _delete_files(self) -> None:
        for name in FILES:
            (self._directory / name).unlink(missing_ok=True)

    def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    # -- reading -----------------------------------------------------------------------------------------------------

    def load(self, names: Sequence[str], feed: Callable[[bytes], None], apply: Callable[[bytes, bytes], None]) -> bool:
        """See :meth:`kvbus.state.contract.Store.load`."""
        head = self._head
        if not head.first:
            return False
        if head.names != list(names):
            head.first = 0
            self.refused = 1
            text = "the state in %s is of another configuration: beginning empty, the numbering goes on"
            log.error(text, self.place)
            raise StoreError(f"{self.place}: the state is of another configuration")
        try:
            self._load(head, feed, apply)
        except _FAULTS as error:
            try:
                self._refuse(str(error))
            except _FAULTS as again:
                self._disconnect()
                raise self._error(again) from again
            raise self._error(error) from error
        return True

    def _load(self, head: Head, feed: Callable[[bytes], None], apply: Callable[[bytes, bytes], None]) -> None:
        number = head.first - 1
        end = number + head.count
        query = "SELECT id, crc, body FROM slices WHERE id > ? AND id <= ? ORDER BY id"
        for found, crc, body in self._run(query, number, end):
            number += 1
            if found != number or crc32(body, found & 0xFFFFFFFF) != crc:
                raise _DamagedError(f"slice {number} of the checkpoint is damaged")
            feed(body)
        if number != end:
            raise _DamagedError("the checkpoint has no end")
        number = head.start
        for found, crc, body, payloads in self._run("SELECT * FROM log WHERE id > ? ORDER BY id", number):
            number += 1
            if found != number or crc32(body, found & 0xFFFFFFFF) != crc:
                raise _DamagedError(f"frame {number} of the log is damaged")
            apply(body, payloads)
        if number != self._last:
            raise _DamagedError("the end of the log is missing")

    # -- writing -----------------------------------------------------------------------------------------------------

    def append(self, body: bytes, payloads: bytes) -> None:
        """See :meth:`kvbus.state.contract.Store.append`."""
        number = self._last + 1
        try:
            crc = crc32(body, number & 0xFFFFFFFF)
            self._run("INSERT INTO log VALUES (?, ?, ?, ?)", number, crc, body, payloads)
            self._last = number
            self._write_mark()
        except _FAULTS as error:
            self._fail(error)

    def reserve(self, reserved: Reserved) -> None:
        """See :meth:`kvbus.state.contract.Store.reserve`."""
        self.reserved = self._head.reserved = reserved
        try:
            self._write_head()
            self._write_mark()
        except _FAULTS as error:
            self._fail(error)

    def checkpoint(self, names: Sequence[str], slices: Iterable[bytes], pause: Callable[[], bool]) -> Iterator[None]:
        """See :meth:`kvbus.state.contract.Store.checkpoint`."""
        try:
            if self._connection is None:
                self._create()
            if self._head.names != list(names):
                self._head.first = 0
            self._write_head()
            self._write_mark()
        except _FAULTS as error:
            self._fail(error)
        return self._checkpoint(list(names), slices, pause, self._last)

    def _checkpoint(
        self, names: list[str], slices: Iterable[bytes], pause: Callable[[], bool], start: int
    ) -> Iterator[None]:
        first = number = self._newest_slice + 1
        try:
            self._run("BEGIN")
            for body in slices:
                crc = crc32(body, number & 0xFFFFFFFF)
                self._run("INSERT INTO slices VALUES (?, ?, ?)", number, crc, body)
                self._newest_slice = number
                number += 1
                if pause():
                    self._run("COMMIT")
                    yield
                    self._run("BEGIN")
            head = self._head
            head.names, head.first, head.count, head.start, head.older = names, first, number - first, start, False
            self._write_head()
            self._run("COMMIT")
            self._write_mark()
            for table, last in (("log", start), ("slices", first - 1)):
                while self._delete(table, last):
                    if pause():
                        yield
        except _FAULTS as error:
            self._fail(error)

    def _delete(self, table: str, last: int) -> int:
        """Delete some rows up to a number. Return how many rows that were."""
        some = f"SELECT id FROM {table} WHERE id <= ? LIMIT {_ROWS_AT_A_TIME}"  # noqa: S608 - no name comes from outside
        return self._run(f"DELETE FROM {table} WHERE id IN ({some})", last).rowcount  # noqa: S608

    def _write_head(self) -> None:
        self._head.writes += 1
        content = msgspec.msgpack.encode(self._head)
        self._run("INSERT OR REPLACE INTO head VALUES (1, ?, ?)", crc32(content), content)

    def _write_mark(self, *, given_up: bool = False) -> None:
        self._lock.write_head(_packed(Mark(self._head.writes, self._last, self.reserved.highest, given_up)))

    def _fail(self, error: Exception) -> None:
        """Give up the state, which lacks what could not be written. Free the disk, and keep the reservations.

        Raises:
            StoreError: always.
        """
        self._disconnect()
        try:
            self._write_mark(given_up=True)
            if _is_damage(error):
                self.refused += self._move_aside(str(error))
            self._create()
        except _FAULTS as again:
            log.debug("the reservations are in the mark alone: %s", again)
            self._disconnect()
            with contextlib.suppress(OSError):
                self._write_mark(given_up=True)
        raise self._error(error) from error

    def _delete_state(self) -> None:
        self._head.first, self._head.start = 0, self._last
        self._run("BEGIN")
        self._run("DELETE FROM log")
        self._run("DELETE FROM slices")
        self._write_head()
        self._run("COMMIT")
        self._write_mark()

    def wipe(self) -> None:
        """Delete the state with everything that tells of prompts, and keep the reservations."""
        try:
            self._run("PRAGMA secure_delete = ON")
            self._delete_state()
            self._run("VACUUM")
            self._run("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except _FAULTS as error:
            raise self._error(error) from error

    def contents(self) -> Contents:
        """Return what is in the database."""
        head = self._head
        frames = self._number(f"SELECT count(*) FROM log WHERE id > {head.start}")  # noqa: S608 - a number
        slices = head.count if head.first else 0
        synced, boot = self._found
        return Contents(len(self.reserved.streams), self.reserved.highest, slices, frames, synced, boot == self._boot)

    def close(self) -> None:
        """See :meth:`kvbus.state.contract.Store.close`."""
        self._disconnect()
        self._lock.release()

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if self._connection is None:
            raise OSError("the database is closed")
        return self._connection.execute(statement, values)

    def _number(self, query: str) -> int:
        (number,) = self._run(query).fetchone()
        return int(number)

    def _error(self, error: Exception) -> StoreError:
        text = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return StoreError(f"{self.place}: {text}")


def reached(directory: Path) -> int:
    """Return how far the numbering of a directory has got, 0 where nothing says so. The store may be in use."""
    try:
        fd = open_file(directory / DirectoryLock.NAME, os.O_RDONLY)
        try:
            mark = _mark_of(os.pread(fd, HEAD_BYTES, 0))
        finally:
            os.close(fd)
    except OSError:
        mark = None
    return _old_floor(directory) if mark is None else mark.highest


class Contents(NamedTuple):
    """What a database holds, for people.

    Attributes:
        streams: how many streams have a reservation.
        highest: the highest number that is reserved.
        slices: slices of the checkpoint.
        frames: frames of the log.
        synced: whether every commit has waited for the disk.
        this_boot: whether it was written since the machine was started.
    """

    streams: int
    highest: int
    slices: int
    frames: int
    synced: bool
    this_boot: bool


def files(directory: Path) -> dict[str, int]:
    """Return the files in a directory that hold content, with their sizes."""
    return {
        path.name: path.lstat().st_size
        for path in sorted(directory.iterdir())
        if path.name.partition(_REFUSED)[0] in FILES or _OLD_FILES.fullmatch(path.name)
    }


def delete_refused(directory: Path) -> list[str]:
    """Delete the files that were moved aside, and those of an older kvbus. Return what could not be deleted."""
    left = []
    for name in files(directory):
        if name not in FILES:
            try:
                (directory / name).unlink()
            except OSError as error:
                left.append(f"{name}: {error.strerror or error}")
    return left


def _old_floor(directory: Path) -> int:
    """Return a number above all that an older kvbus has reserved in its seq files; 0 where there are none."""
    highest = 0
    for path in sorted(directory.glob("kvbus-*.seq")):
        try:
            fd = open_file(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_uid != os.getuid():
                continue
            content = os.pread(fd, _OLD_SEQ.size, 0)
        finally:
            os.close(fd)
        number = UNKNOWN + time.time_ns() // 1000
        if len(content) == _OLD_SEQ.size:
            magic, found, _, _, crc = _OLD_SEQ.unpack(content)
            if magic.startswith(b"kvbus-seq-mark") and crc32(content[16:40], crc32(path.name.encode())) == crc:
                number = found
        highest = max(highest, number)
    if highest:
        log.info("%s is of an older kvbus: the numbering goes on above %d", directory, highest)
    return highest + MARGIN if highest else 0


def _delete_old_files(directory: Path) -> None:
    """Delete the files of a kvbus that kept its state in files of its own."""
    for path in directory.iterdir():
        if _OLD_FILES.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()
