"""The commit record: what it says is what was stored last, wherever a kill came, or it is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.core.write_ahead_log import StateError
from kvbus.daemon.commit_record import NAME, NEW, CommitRecord, Committed, read
from kvbus.daemon.disk import Disk

LOG = Committed(7, b"log no 7", 1000, 5)


class Killed(Exception):  # noqa: N818
    """The process ends here."""


class Mortal(Disk):
    """It lets so many writes through, and then the process is killed."""

    def __init__(self) -> None:
        self.writes = 10**9

    def pwrite(self, fd: int, data: bytes, at: int) -> None:
        if not self.writes:
            raise Killed
        self.writes -= 1
        super().pwrite(fd, data, at)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = Disk().open_directory(tmp_path)
    yield fd
    Disk().close(fd)


def test_a_directory_has_none_at_first(directory: int) -> None:
    assert read(Disk(), directory) is None


def test_it_says_what_was_stored_last(directory: int) -> None:
    record = CommitRecord(Disk(), directory, LOG)
    assert read(Disk(), directory) == LOG
    record.commit(1100)
    record.reserve(9)
    record.reserve(8)
    assert read(Disk(), directory) == LOG._replace(length=1100, highest=9)
    record.switch(Committed(8, b"log no 8", 60))
    assert read(Disk(), directory) == Committed(8, b"log no 8", 60, 9)
    record.close()
    CommitRecord(Disk(), directory, Committed(highest=9)).close()
    assert read(Disk(), directory) == Committed(highest=9)


def test_a_kill_leaves_what_was_before_or_what_comes_after(directory: int) -> None:
    disk = Mortal()
    record = CommitRecord(disk, directory, LOG)
    after = Committed(8, b"log no 8", 60, 12)
    for writes in range(4):
        record.switch(LOG)
        disk.writes = writes
        try:
            record.switch(after)
        except Killed:
            assert read(disk, directory) in (LOG, LOG._replace(highest=12), after)
        else:
            assert read(disk, directory) == after
        disk.writes = 10**9
    record.close()


def test_a_kill_while_a_new_one_is_made_leaves_the_old_one(directory: int, tmp_path: Path) -> None:
    disk = Mortal()
    CommitRecord(disk, directory, LOG).close()
    disk.writes = 2
    with pytest.raises(Killed):
        CommitRecord(disk, directory, Committed(highest=5))
    assert read(disk, directory) == LOG
    assert (tmp_path / NEW).exists()


def test_any_bit_may_flip(directory: int, tmp_path: Path) -> None:
    CommitRecord(Disk(), directory, LOG).close()
    whole = (tmp_path / NAME).read_bytes()
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / NAME).write_bytes(changed)
        if bit < 128:
            with pytest.raises(StateError, match="damaged, or of another version"):
                read(Disk(), directory)
        else:
            assert read(Disk(), directory) == LOG


def test_one_that_is_no_file_is_no_record(directory: int, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(StateError, match="the commit record cannot be read: commit is no regular file"):
        read(Disk(), directory)
