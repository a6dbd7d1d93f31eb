"""The store of a bus's state in SQLite: a database in the directory of the state, and a mark in the lock file.

If SQLite's own write-ahead log is damaged, SQLite silently drops its end. To notice this, kvbus writes the progress of
the database into the lock file: the *mark*. It overwrites the mark after each commit, before it sends anything. If the
database has fewer writes than the mark, it has lost commits.

The mark also has the highest reserved number. If the database cannot be used, kvbus moves it aside and begins an empty
database, in which every stream begins above that number.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kvbus.state.contract import MARGIN, MAX_SEQ, Reserved, StoreError
from kvbus.state.database import (
    FAULTS,
    FILES,
    DamagedError,
    Database,
    Head,
    NewerError,
    boot_id,
    is_damage,
    is_full,
    text_of,
)
from kvbus.state.lock import DirectoryLock, Mark, mark_in

log = logging.getLogger("kvbus.state")

CHECKPOINT_AFTER: Final = 128 * 1024 * 1024
RESERVE_AHEAD: Final = 4096

UNKNOWN: Final = 1 << 48
"""Lowest first seq of a stream if kvbus cannot find out which seqs earlier processes have used.

At ten million batches a second, a stream reaches this number only after a year. kvbus adds the current time in
microseconds, so that seqs rise even if the database is damaged again.
"""

_OLD: Final = "kvbus-*.seq"
"""File name pattern of the files in which older versions of kvbus kept the seq reservations."""

_REFUSED: Final = ".refused-"


class NewerStateError(StoreError):
    """The state was written by a newer version of kvbus. kvbus leaves it unchanged."""


class SqliteStore:
    """The store of a bus's state in one directory. See :class:`kvbus.state.contract.Store`.

    Args:
        directory: the directory, which must exist.
        lock: the lock of the directory. The store releases it when it is closed.
        sync: whether each commit waits for the disk.
        keeps_state: whether the store keeps the state. If it is False, an existing state is deleted, and only
            reservations are kept.
        old_directory: the directory in which older versions of kvbus kept the reservations.
        boot: the id of the machine's boot. None means that it is read from the kernel.

    Raises:
        NewerStateError: a newer version of kvbus has written the state.
        StoreError: the database cannot be opened, although it is not damaged.
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
    ) -> None:
        self.location = str(directory)
        self.keeps_state = keeps_state
        self.checkpoint_after, self.reserve_ahead = CHECKPOINT_AFTER, RESERVE_AHEAD
        self.refused = 0
        self.older = False
        self.reserved = Reserved()
        self.database = Database(directory, sync=sync)
        self._directory = directory
        self._lock = lock
        self._sync = sync
        self._boot = boot_id() if boot is None else boot
        self._head = self._new_head()
        self._highest = 0
        """The highest reservation that was written to the database."""
        mark = lock.read_mark()
        try:
            if lock.is_new and not self.database.files:
                self._begin_first(old_directory or directory)
            elif mark is not None and mark.given_up and self.database.files:
                self._go_on_empty(mark)
            else:
                self._go_on(mark)
        except FAULTS as error:
            self.database.close()
            if not is_full(error):
                raise self._error(error) from error
            log.error("the disk of %s is full: kvbus continues without a state", directory)  # noqa: TRY400
            if mark is not None or self.database.files:
                self._skip_ahead()
        self._highest = self.reserved.highest

    # -- opening -----------------------------------------------------------------------------------------------------

    def _new_head(self) -> Head:
        return Head(self._boot, self._sync, reserved=self.reserved)

    def _create(self) -> None:
        """Create a database that has only the reservations, and no state."""
        self._head = self._new_head()
        self.database.create(self._head)
        self._write_mark()

    def _begin_first(self, old_directory: Path) -> None:
        """Create the first database of a directory.

        If the directory of an older version of kvbus has files, begin above all seqs that the older version may have
        used.
        """
        if any(old_directory.glob(_OLD)):
            self.reserved.floor = _unknown()
            log.info(
                "%s is of an older kvbus: the seqs of the outputs continue above %d", old_directory, self.reserved.floor
            )
        self._create()
        self._lock.sync()  # even after a power cut, the lock file must show that this directory had a database

    def _go_on_empty(self, mark: Mark) -> None:
        """Create an empty database, because an earlier process failed to write to its database. Keep the reservations.

        They are read from the old database, if it is readable, and from ``mark``, the record in the lock file
        (:class:`~kvbus.state.lock.Mark`).
        """
        try:
            self.reserved = self.database.open().reserved
        except NewerError:
            raise
        except FAULTS as error:
            log.debug("the database to which an earlier process could not write cannot be read either: %s", error)
        self.reserved.raise_to(mark.highest)
        self._create()

    def _go_on(self, mark: Mark | None) -> None:
        try:
            self._head = head = self.database.open()
            self.reserved = head.reserved
            self.older = head.older or (head.boot != self._boot and not head.synced)
            if mark is None:
                raise DamagedError("the lock file does not show how far the database was written")
            if not self.older and (head.writes < mark.writes or self.database.last < mark.last):
                raise DamagedError("the newest commits of the database are missing")
        except FAULTS as error:
            if not is_damage(error):
                raise
            self._refuse(str(error))
            return
        if self.older:
            self.reserved.raise_to(mark.highest)
            self.reserved.add_margin()
        head.boot, head.synced, head.older = self._boot, self._sync, self.older
        if not self.keeps_state and (head.first or self.database.last > head.start):
            self.database.delete_state(head)
            self._write_mark()

    def _refuse(self, why: str) -> None:
        """Move the database aside, because it cannot be used for the reason ``why``.

        Create an empty database in which every stream begins above all seqs that kvbus has sent.
        """
        self.database.close()
        self._skip_ahead()
        self.older = False
        self.refused = max(1, self._move_aside(why))
        self._create()

    def _skip_ahead(self) -> None:
        """Raise the reservation of every stream above all seqs that kvbus may have used."""
        mark = self._lock.read_mark()
        known = mark is not None and mark.highest < MAX_SEQ - MARGIN
        self.reserved.raise_to(mark.highest + MARGIN if mark is not None and known else _unknown())

    def _move_aside(self, why: str) -> int:
        """Rename the files of the database, so that an operator can examine them. Return the number of files."""
        stamp = time.strftime("%Y%m%dT%H%M%S")
        existing = self.database.files
        if existing:
            text = "the state in %s is refused (%s): kvbus renames it to *%s%s, and begins without a state"
            log.error(text, self.location, why, _REFUSED, stamp)
        else:
            text = "the state in %s is missing: kvbus begins without a state, and skips the seqs that it may have used"
            log.error(text, self.location)
        delete_refused(self._directory)  # keep only one refused database: several could fill the disk
        for path in existing:
            path.rename(path.with_name(f"{path.name}{_REFUSED}{stamp}"))
        return len(existing)

    # -- reading -----------------------------------------------------------------------------------------------------

    def load(self, names: Sequence[str], feed: Callable[[bytes], None], apply: Callable[[bytes, bytes], None]) -> bool:
        """Read the checkpoint and then the write-ahead log from the database.

        See :meth:`kvbus.state.contract.Store.load`.
        """
        head = self._head
        if not head.first:
            return False
        if head.names != list(names):
            head.first = 0
            self.refused = 1
            text = "the state in %s is of another configuration: kvbus begins without a state; the numbering continues"
            log.error(text, self.location)
            raise StoreError(f"{self.location}: the state is of another configuration")
        try:
            for body in self.database.slices(head):
                feed(body)
            for body, payloads in self.database.frames(head):
                apply(body, payloads)
        except FAULTS as error:
            try:
                self._refuse(str(error))
            except FAULTS as again:
                self.database.close()
                raise self._error(again) from again
            raise self._error(error) from error
        return True

    # -- writing -----------------------------------------------------------------------------------------------------

    def append(self, body: bytes, payloads: bytes) -> None:
        """Add a frame to the write-ahead log, and write to the lock file how far the database was written (the mark).

        See :meth:`kvbus.state.contract.Store.append`.
        """
        try:
            self.database.add_frame(body, payloads)
            self._lock.write_mark(Mark(self._head.writes, self.database.last, self._highest, False))
        except FAULTS as error:
            self._fail(error)

    def reserve(self, reserved: Reserved) -> None:
        """Write the reservations into the database's head, and the mark (the database's progress) into the lock file.

        See :meth:`kvbus.state.contract.Store.reserve`.
        """
        self.reserved = self._head.reserved = reserved
        try:
            self._write_head()
        except FAULTS as error:
            self._fail(error)

    def checkpoint(self, names: Sequence[str], slices: Iterable[bytes], pause: Callable[[], bool]) -> Iterator[None]:
        """Write a new checkpoint step by step. If the database is closed, create an empty database first.

        See :meth:`kvbus.state.contract.Store.checkpoint`.
        """
        try:
            if not self.database.is_open:
                self._create()
            if self._head.names != list(names):
                self._head.first = 0
            self._write_head()
        except FAULTS as error:
            self._fail(error)
        return self._checkpoint(list(names), slices, pause, self.database.last)

    def _checkpoint(
        self, names: list[str], slices: Iterable[bytes], pause: Callable[[], bool], start: int
    ) -> Iterator[None]:
        database, before = self.database, self.database.newest_slice
        try:
            database.run("BEGIN")
            for body in slices:
                database.add_slice(body)
                if pause():
                    database.run("COMMIT")
                    yield
                    database.run("BEGIN")
            head = self._head
            head.names, head.start, head.older = names, start, False
            head.first, head.count = before + 1, database.newest_slice - before
            database.write_head(head)
            database.run("COMMIT")
            self._write_mark()
            for table, last in (("log", start), ("slices", before)):
                while database.delete_some(table, last):
                    if pause():
                        yield
        except FAULTS as error:
            self._fail(error)

    def _write_head(self) -> None:
        self.database.write_head(self._head)
        self._write_mark()

    def _write_mark(self, *, given_up: bool = False) -> None:
        self._highest = self.reserved.highest
        self._lock.write_mark(Mark(self._head.writes, self.database.last, self._highest, given_up))

    def _fail(self, error: Exception) -> None:
        """Delete the state after a failed write, to free its disk space. Keep the reservations.

        Raises:
            StoreError: always, with the error of the write.
        """
        self.database.close()
        try:
            self._write_mark(given_up=True)
            if is_damage(error):
                self.refused += self._move_aside(str(error))
            self._create()
        except FAULTS as again:
            log.debug(
                "the state was deleted after a failed write, and no new database can be created (%s): only the lock "
                "file shows which seqs are reserved",
                again,
            )
            self._abandon()
        raise self._error(error) from error

    def _abandon(self) -> None:
        """Prevent the next process from using the database, which will lack all batches sent from now on."""
        try:
            self.database.close()
            self._write_mark(given_up=True)
        except OSError:
            try:
                self.database.delete()
            except OSError as error:
                text = "the state in %s can be neither written nor deleted (%s): after a kill the numbering may go back"
                log.error(text, self.location, error)  # noqa: TRY400

    def wipe(self) -> list[str]:
        """Delete the state, which may hold content of prompts, from the database file. Keep the reservations.

        Returns:
            The files that cannot be deleted, each with the reason.

        Raises:
            StoreError: the database cannot be written.
        """
        try:
            self.database.run("PRAGMA secure_delete = ON")
            self.database.delete_state(self._head)
            self._write_mark()
            self.database.run("VACUUM")
            self.database.run("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except FAULTS as error:
            raise self._error(error) from error
        return delete_refused(self._directory)

    def close(self) -> None:
        """Close the database, and release the lock of the directory."""
        self.database.close()
        self._lock.close()

    def _error(self, error: Exception) -> StoreError:
        kind = NewerStateError if isinstance(error, NewerError) else StoreError
        return kind(f"{self.location}: {text_of(error)}")


def _unknown() -> int:
    return UNKNOWN + time.time_ns() // 1000


def reached(directory: Path) -> int:
    """Return the lowest seq that was not reserved in a directory, according to its lock file.

    Return 0 if the lock file does not say it (it has no :class:`~kvbus.state.lock.Mark`).

    It can be called while another process uses the directory.
    """
    mark = mark_in(directory)
    return 0 if mark is None else mark.highest


def files(directory: Path) -> dict[str, int]:
    """Return the sizes in bytes of the state's files in a directory, by file name.

    The renamed files of a refused state are included.
    """
    return {
        path.name: path.lstat().st_size
        for path in sorted(directory.iterdir())
        if path.name.partition(_REFUSED)[0] in FILES
    }


def delete_refused(directory: Path) -> list[str]:
    """Delete the files of states that kvbus could not use at an earlier start and therefore moved aside.

    Return the files that cannot be deleted, with the reasons.
    """
    left = []
    for name in files(directory):
        if name not in FILES:
            path = directory / name
            try:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            except OSError as error:
                left.append(f"{name}: {error.strerror or error}")
    return left
