"""What a process leaves in a directory: rows of its database, and reservations of streams."""

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
from kvbus.state.lock import DirectoryLock
from kvbus.state.place import Base, name_of
from kvbus.state.reservations import SeqReservations
from kvbus.state.sqlite import SqliteStore


def rows(directory: Path) -> list[str]:
    """Return everything that the database of a directory holds, as SQL. The files are copied and stay as they are."""
    with tempfile.TemporaryDirectory() as copy:
        for path in directory.glob(f"{NAME}*"):
            if path.is_file():
                shutil.copy(path, copy)
        with contextlib.closing(sqlite3.connect(Path(copy) / NAME)) as connection:
            return list(connection.iterdump())


@contextlib.contextmanager
def opened(directory: Path, *, sync: bool = False, boot: bytes | None = None) -> Iterator[SqliteStore]:
    """Open the store of a directory, and close it as a kill does: nothing more is written."""
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
    """Nobody can write or delete a file meanwhile, not even root."""
    if subprocess.run(["chattr", "+i", path], capture_output=True, check=False).returncode:
        pytest.skip("this file system has no immutable files")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


def reserve(directory: Path, name: str, seq: int) -> None:
    """Reserve a stream's numbers as a process does that sends this seq, and is killed then."""
    with opened(directory) as store:
        reservations = SeqReservations(store)
        reservations.add(0, 0, name)
        reservations.use(0, 0, seq)


def without_state(config: Config, base: Path) -> Path:
    """Return the directory of the reservations of a bus that keeps no state."""
    return base / name_of(config, Base(base))
