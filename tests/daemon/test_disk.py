"""The real disk does what it says; nothing else tests what a test's own disk has to be like."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.daemon.disk import Disk


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def directory(disk: Disk, tmp_path: Path) -> Iterator[int]:
    disk.make_directory(tmp_path / "a" / "b")
    fd = disk.open_directory(tmp_path / "a" / "b")
    yield fd
    disk.close(fd)


def make(disk: Disk, directory: int, name: str, *pieces: bytes, keep: bool = False) -> None:
    fd = disk.create(directory, name, keep=keep)
    assert disk.writev(fd, pieces) == sum(map(len, pieces))
    disk.sync(fd)
    disk.close(fd)
    disk.sync_directory(directory)


def read(disk: Disk, directory: int, name: str) -> bytes:
    fd = disk.open(directory, name)
    content = disk.pread(fd, disk.size(fd), 0)
    disk.close(fd)
    return content


def test_a_file_is_written_in_pieces_and_read_at_any_place(disk: Disk, directory: int) -> None:
    make(disk, directory, "x", b"abc", b"defg")
    fd = disk.open(directory, "x")
    assert (disk.size(fd), disk.pread(fd, 3, 2), disk.pread(fd, 9, 5), disk.pread(fd, 9, 7)) == (7, b"cde", b"fg", b"")
    disk.close(fd)


def test_a_file_that_is_made_is_emptied_unless_it_is_kept(disk: Disk, directory: int) -> None:
    make(disk, directory, "x", b"abcdefg")
    make(disk, directory, "x", b"12", keep=True)
    assert read(disk, directory, "x") == b"12cdefg"
    make(disk, directory, "x", b"34")
    assert read(disk, directory, "x") == b"34"


def test_a_name_moves_and_goes(disk: Disk, directory: int) -> None:
    make(disk, directory, "x", b"new")
    make(disk, directory, "y", b"old")
    disk.rename(directory, "x", "y")
    assert disk.names(directory) == ["y"]
    assert read(disk, directory, "y") == b"new"
    disk.unlink(directory, "y")
    disk.unlink(directory, "y")
    assert disk.names(directory) == []


def test_what_is_stored_in_a_map_is_in_the_file(disk: Disk, directory: int) -> None:
    fd = disk.share(directory, "x")
    disk.truncate(fd, 16)
    assert disk.pwrite(fd, b"ab", 3) == 2
    mapped = disk.map(fd, 16)
    disk.close(fd)
    assert mapped[3:5] == b"ab"
    mapped[3:5] = b"cd"
    mapped.flush()
    assert read(disk, directory, "x")[3:5] == b"cd"
    mapped.close()


def test_a_lock_ends_with_the_last_descriptor(disk: Disk, directory: int) -> None:
    first, second = disk.share(directory, "x"), disk.share(directory, "x")
    disk.truncate(first, 1)
    mapped = disk.map(first, 1)
    disk.lock(first)
    disk.close(first)
    with pytest.raises(BlockingIOError):
        disk.lock(second)
    mapped.close()
    disk.lock(second)
    disk.close(second)


def test_no_two_ids_are_the_same(disk: Disk) -> None:
    assert len({disk.random_bytes(8) for _ in range(100)}) == 100
    assert len(disk.random_bytes(8)) == 8
