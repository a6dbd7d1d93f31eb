"""The file of a saved state: the SQLite database ``state.db`` in the directory of the state.

The table ``head`` has a single row: the reservations, and which checkpoint is valid. The table ``slices`` has the
checkpoint. The table ``log`` has kvbus's write-ahead log since the checkpoint: each row is one frame, which has the
records of a burst of batches. SQLite commits each burst as one transaction, for which it uses a log file of its own
(``state.db-wal``). With ``sync`` each commit waits for the disk. Without ``sync`` a commit survives a kill of the
process, but not a power cut.

SQLite computes no checksums of its pages. So each row has a CRC-32, and the numbers of rows have no gaps.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgspec

from kvbus.core.write_ahead_log import StateError
from kvbus.state.contract import Reserved
from kvbus.state.lock import NotAFileError, open_file

NAME: Final = "state.db"
FILES: Final = (NAME, f"{NAME}-wal", f"{NAME}-shm", f"{NAME}-journal")
"""Names of the database file and of the files that SQLite creates next to it."""

VERSION: Final = 2
"""Version number of the database's tables and of the encoded records. Raise it whenever one of them changes."""

_APPLICATION: Final = 0x6B766273
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_ROWS_AT_A_TIME: Final = 64
"""Maximum number of rows that one transaction deletes."""

_TABLES: Final = (
    "CREATE TABLE head (id INTEGER PRIMARY KEY, crc INTEGER NOT NULL, content BLOB NOT NULL)",
    "CREATE TABLE log (id INTEGER PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL, payloads BLOB NOT NULL)",
    "CREATE TABLE slices (id INTEGER PRIMARY KEY, crc INTEGER NOT NULL, body BLOB NOT NULL)",
)


class Head(msgspec.Struct):
    """The row of the table ``head``, which says how to read the other tables.

    Attributes:
        boot: id of the machine's boot during which the row was written.
        synced: whether every commit has waited for the disk.
        older: whether the state may lack batches that kvbus has sent. A complete checkpoint resets it.
        names: names of the sources and outputs that the state belongs to.
        first: number of the checkpoint's first slice; 0 if there is no valid checkpoint.
        count: number of slices in the checkpoint.
        start: number of the last frame of the write-ahead log that the checkpoint includes.
        writes: how often this row was written.
        reserved: the seqs reserved for each stream, and other data that stays valid if the state cannot be used.
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


class DamagedError(Exception):
    """The database is damaged: its content is not the content that kvbus wrote."""


class NewerError(Exception):
    """The database was written by a newer version of kvbus, which this version cannot read."""


FAULTS: Final = (
    sqlite3.Error,
    OSError,
    DamagedError,
    NewerError,
    StateError,
    msgspec.MsgspecError,
    TypeError,
    ValueError,
)
"""The exceptions that methods of the database can raise if the file is damaged, or the disk is full or missing."""

_READING: Final = {sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS}
_READ_ONLY: Final = "it cannot be written: it is read-only, or it belongs to another user"
_IN_USE: Final = "another program has it open"
_NOT_NOW: Final = {
    sqlite3.SQLITE_BUSY: _IN_USE,
    sqlite3.SQLITE_LOCKED: _IN_USE,
    sqlite3.SQLITE_FULL: "no space left on device",
    sqlite3.SQLITE_CANTOPEN: _READ_ONLY,
    sqlite3.SQLITE_PERM: _READ_ONLY,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_NOMEM: "there is no memory left",
}
"""Messages for SQLite errors that do not mean a damaged file, by SQLite's error code."""


def is_damage(error: Exception) -> bool:
    """Return whether an error means that the database is damaged.

    An error of the disk, or of another program that uses the database, does not mean damage.
    """
    if not isinstance(error, sqlite3.Error):
        return isinstance(error, NotAFileError) or not isinstance(error, OSError | NewerError)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    if code & 0xFF == sqlite3.SQLITE_IOERR:
        return code in _READING
    return code & 0xFF not in _NOT_NOW


def is_full(error: Exception) -> bool:
    """Return whether an error means that the disk is full, or that a quota or a limit of file sizes is reached."""
    if isinstance(error, OSError):
        return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    code = getattr(error, "sqlite_errorcode", 0)
    return code == sqlite3.SQLITE_IOERR_WRITE or code & 0xFF == sqlite3.SQLITE_FULL


def text_of(error: Exception) -> str:
    """Return a message for log lines that describes an error of the database."""
    if isinstance(error, sqlite3.Error):
        plain = _NOT_NOW.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
        return f"{NAME}: {plain or error}"
    if isinstance(error, OSError):
        if error.filename is not None and error.errno in {errno.EPERM, errno.EACCES, errno.EROFS}:
            return f"{Path(error.filename).name}: {_READ_ONLY}"
        return error.strerror or str(error)
    return str(error)


def boot_id() -> bytes:
    """Return 16 bytes that identify the current boot of the machine; zeros if the kernel does not provide them."""
    try:
        return uuid.UUID(_BOOT_ID.read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(16)


class Database:
    """The SQLite database of one directory. It is closed until :meth:`open` or :meth:`create` is called.

    Each method may raise one of :data:`FAULTS`.

    Args:
        directory: the directory of the database.
        sync: whether each commit waits for the disk.
    """

    def __init__(self, directory: Path, *, sync: bool = False) -> None:
        self._directory = directory
        self._path = directory / NAME
        self._sync = sync
        self._connection: sqlite3.Connection | None = None
        self.last = 0
        """Number of the last frame in the table ``log``."""
        self.newest_slice = 0

    @property
    def files(self) -> list[Path]:
        """The files of the database that exist now."""
        return [path for name in FILES if os.path.lexists(path := self._directory / name)]

    @property
    def is_open(self) -> bool:
        """Whether the database is open."""
        return self._connection is not None

    def open(self) -> Head:
        """Open the existing database. Return its head, which says how to read it."""
        for path in self.files:
            # Open each file here first, because the error of os.open says why a file cannot be written. SQLite's error
            # does not.
            fd = open_file(path, os.O_RDWR)
            try:
                if self._sync:
                    os.fsync(fd)  # an earlier process may have written without waiting for the disk
            finally:
                os.close(fd)
        if not os.path.lexists(self._path):
            raise DamagedError("the database is missing")
        self._connect()
        if self.number("PRAGMA application_id") != _APPLICATION:
            raise DamagedError("the file is not a database of kvbus")
        version = self.number("PRAGMA user_version")
        if version > VERSION:
            raise NewerError(
                f"{NAME} is of version {version} and this kvbus reads version {VERSION}: "
                "use the kvbus that wrote it, or another state_dir"
            )
        if version != VERSION:
            raise DamagedError(f"the database is of version {version}, and this kvbus reads version {VERSION}")
        self.run("PRAGMA journal_mode = WAL")
        row = self.run("SELECT crc, content FROM head WHERE id = 1").fetchone()
        if row is None or crc32(row[1]) != row[0]:
            raise DamagedError("its head is damaged")
        head = msgspec.msgpack.decode(row[1], type=Head)
        self.last = max(head.start, self.number("SELECT coalesce(max(id), 0) FROM log"))
        self.newest_slice = self.number("SELECT coalesce(max(id), 0) FROM slices")
        return head

    def delete(self) -> None:
        """Close the database, and delete its files."""
        self.close()
        for path in self.files:
            path.unlink()

    def create(self, head: Head) -> None:
        """Create an empty database whose table ``head`` has this row. An existing database is deleted."""
        self.delete()
        os.close(open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        self.last = self.newest_slice = 0
        self._connect()
        self.run("PRAGMA journal_mode = WAL")
        self.run("BEGIN")
        self.run(f"PRAGMA application_id = {_APPLICATION}")
        self.run(f"PRAGMA user_version = {VERSION}")
        for table in _TABLES:
            self.run(table)
        self.write_head(head)
        self.run("COMMIT")
        if self._sync:
            fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _connect(self) -> None:
        self._connection = sqlite3.connect(self._path, timeout=0, isolation_level=None, cached_statements=32)
        self.run("PRAGMA locking_mode = EXCLUSIVE")
        self.run("PRAGMA trusted_schema = OFF")
        self.run("PRAGMA cell_size_check = ON")
        self.run(f"PRAGMA synchronous = {'FULL' if self._sync else 'OFF'}")

    def close(self) -> None:
        """Close the database if it is open."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """Execute one SQL statement with ``values`` for its placeholders. Return its cursor."""
        if self._connection is None:
            raise OSError("the database is closed")
        return self._connection.execute(statement, values)

    def number(self, query: str) -> int:
        """Return the result of a query that selects a single number."""
        (number,) = self.run(query).fetchone()
        return int(number)

    def slices(self, head: Head) -> Iterator[bytes]:
        """Yield the slices of the checkpoint that ``head`` describes, in order."""
        number = head.first - 1
        end = number + head.count
        query = "SELECT id, crc, body FROM slices WHERE id > ? AND id <= ? ORDER BY id"
        for found, crc, body in self.run(query, number, end):
            number += 1
            if found != number or crc32(body, found & 0xFFFFFFFF) != crc:
                raise DamagedError(f"slice {number} of the checkpoint is damaged")
            yield body
        if number != end:
            raise DamagedError("the end of the checkpoint is missing")

    def frames(self, head: Head) -> Iterator[tuple[bytes, bytes]]:
        """Yield the frames of the write-ahead log since the checkpoint.

        Each frame is a pair: the encoded records of a burst of batches, and the payloads of these batches in one bytes
        object.
        """
        number = head.start
        for found, crc, body, payloads in self.run("SELECT * FROM log WHERE id > ? ORDER BY id", number):
            number += 1
            if found != number or crc32(body, found & 0xFFFFFFFF) != crc:
                raise DamagedError(f"frame {number} of the write-ahead log is damaged")
            yield body, payloads
        if number != self.last:
            raise DamagedError("the end of the write-ahead log is missing")

    def write_head(self, head: Head) -> None:
        """Write the row of the table ``head``, in place of the previous row."""
        head.writes += 1
        content = msgspec.msgpack.encode(head)
        self.run("INSERT OR REPLACE INTO head VALUES (1, ?, ?)", crc32(content), content)

    def add_frame(self, body: bytes, payloads: bytes) -> None:
        """Add a frame to the write-ahead log: the records of a burst of batches, and the payloads of these batches.

        Args:
            body: the encoded records.
            payloads: the payloads, joined in one bytes object.
        """
        number = self.last + 1
        self.run("INSERT INTO log VALUES (?, ?, ?, ?)", number, crc32(body, number & 0xFFFFFFFF), body, payloads)
        self.last = number

    def add_slice(self, body: bytes) -> None:
        """Add a slice to the checkpoint that is being written."""
        number = self.newest_slice + 1
        self.run("INSERT INTO slices VALUES (?, ?, ?)", number, crc32(body, number & 0xFFFFFFFF), body)
        self.newest_slice = number

    def delete_some(self, table: str, last: int) -> bool:
        """Delete up to :data:`_ROWS_AT_A_TIME` rows of a table whose number is ``last`` or lower.

        Return whether any row was deleted. The caller can do other work between two calls.
        """
        some = f"SELECT id FROM {table} WHERE id <= ? LIMIT {_ROWS_AT_A_TIME}"  # noqa: S608 - no name comes from outside
        return self.run(f"DELETE FROM {table} WHERE id IN ({some})", last).rowcount > 0  # noqa: S608

    def delete_state(self, head: Head) -> None:
        """Delete the checkpoint and the write-ahead log from the database. The reservations remain."""
        head.first, head.start = 0, self.last
        self.run("BEGIN")
        self.run("DELETE FROM log")
        self.run("DELETE FROM slices")
        self.write_head(head)
        self.run("COMMIT")


class Contents(NamedTuple):
    """What a database contains, for the output of ``kvbus state``.

    Attributes:
        streams: number of streams with a reservation.
        highest: the lowest seq that is above the reserved seqs of all streams.
        slices: number of slices in the checkpoint.
        frames: number of frames in the write-ahead log after the checkpoint.
        synced: whether every commit has waited for the disk.
        this_boot: whether kvbus has used the database since the machine was started.
    """

    streams: int
    highest: int
    slices: int
    frames: int
    synced: bool
    this_boot: bool


def contents(directory: Path) -> Contents:
    """Return what the database of a directory contains. Nothing in the directory is changed, so it may be read-only.

    SQLite needs write access even to read a database with a write-ahead log. So kvbus opens a temporary copy.

    Raises:
        OSError, sqlite3.Error, DamagedError, NewerError, msgspec.MsgspecError: the database cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="kvbus-state-") as copy:
        for path in Database(directory).files:
            with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file, (Path(copy) / path.name).open("wb") as into:
                shutil.copyfileobj(file, into)
        database = Database(Path(copy))
        try:
            head = database.open()
            frames = sum(1 for _ in database.frames(head))
        finally:
            database.close()
    reserved = head.reserved
    slices = head.count if head.first else 0
    return Contents(len(reserved.streams), reserved.highest, slices, frames, head.synced, head.boot == boot_id())
