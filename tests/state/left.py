"""Helpers that read and change what a kvbus process leaves in its state directory.

They concern the rows of its database, and its reservations of seqs.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.config import Config
from kvbus.state.database import NAME
from kvbus.state.directory import Base, name_of
from kvbus.state.lock import DirectoryLock
from kvbus.state.reservations import SeqReservations
from kvbus.state.sqlite import SqliteStore


def rows(directory: Path) -> list[str]:
    """Return all rows of the database in a state directory, as SQL.

    It is read from a copy, so that the files do not change.
    """
    with tempfile.TemporaryDirectory() as copy:
        for path in directory.glob(f"{NAME}*"):
            if path.is_file():
                shutil.copy(path, copy)
        with contextlib.closing(sqlite3.connect(Path(copy) / NAME)) as connection:
            return list(connection.iterdump())


@contextlib.contextmanager
def opened(directory: Path, *, sync: bool = False, boot: bytes | None = None) -> Iterator[SqliteStore]:
    """Open the store of a directory. At the end, close it as a kill does, without writing anything."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = DirectoryLock(directory, "the state")
    try:
        store = SqliteStore(directory, lock, sync=sync, boot=boot)
    except BaseException:
        lock.close()
        raise
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def immutable(path: Path) -> Iterator[None]:
    """Prevent every process, even of root, from writing or deleting a file."""
    if subprocess.run(["chattr", "+i", path], capture_output=True, check=False).returncode:
        pytest.skip("this file system has no immutable files")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


def reserve(directory: Path, name: str, seq: int) -> None:
    """Reserve seqs of a stream like a process that sends the batch ``seq`` and is killed after it."""
    with opened(directory) as store:
        reservations = SeqReservations(store)
        reservations.add(0, 0, name)
        reservations.use(0, 0, seq)


def without_state(config: Config, base: Path) -> Path:
    """Return the directory in which a bus without a saved state keeps its seq reservations."""
    return base / name_of(config, Base(base))
