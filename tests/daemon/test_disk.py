"""The real disk does what it says; nothing else tests what a test's own disk has to be like."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbus.daemon.disk import Disk, NotAFileError


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def directory(disk: Disk, tmp_path: Path) -> Iterator[int]:
    disk.make_directory(tmp_path / "a" / "b")
    fd = disk.open_directory(tmp_path / "a" / "b")
    yield fd
    disk.close(fd)


def make(disk: Disk, directory: int, name: str, *pieces: bytes) -> None:
    fd = disk.create(directory, name)
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


def test_a_file_that_is_made_takes_the_place_of_an_older_one(disk: Disk, directory: int) -> None:
    make(disk, directory, "x", b"abcdefg")
    make(disk, directory, "x", b"12")
    assert read(disk, directory, "x") == b"12"


def test_an_old_file_is_used_again_if_nobody_else_could_miss_it(disk: Disk, directory: int, tmp_path: Path) -> None:
    assert disk.reuse(directory, "x") is None
    make(disk, directory, "x", b"abcdefg")
    fd = disk.reuse(directory, "x")
    assert fd is not None
    disk.writev(fd, [b"12"])
    disk.close(fd)
    assert read(disk, directory, "x") == b"12cdefg"
    os.link(tmp_path / "a" / "b" / "x", tmp_path / "backup")
    assert disk.reuse(directory, "x") is None


OTHER_THAN_A_FILE: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, victim: path.symlink_to(victim),
    "link to nowhere": lambda path, _: path.symlink_to("nowhere"),
    "FIFO": lambda path, _: os.mkfifo(path),
    "directory": lambda path, _: path.mkdir(),
    "device": lambda path, _: path.symlink_to("/dev/zero"),
    "socket": lambda path, _: os.mknod(path, stat.S_IFSOCK | 0o600),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", OTHER_THAN_A_FILE)
def test_what_is_no_file_is_not_opened(disk: Disk, directory: int, tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = tmp_path / "a" / "b" / "x"
    OTHER_THAN_A_FILE[kind](path, victim)
    with pytest.raises(NotAFileError, match="x is no regular file"):
        disk.open(directory, "x")
    with pytest.raises(NotAFileError, match="x is no regular file"):
        disk.share(directory, "x")
    assert disk.reuse(directory, "x") is None
    if kind == "directory":
        with pytest.raises(IsADirectoryError):
            disk.create(directory, "x")
    else:
        make(disk, directory, "x", b"new")
        assert read(disk, directory, "x") == b"new"
    assert victim.read_bytes() == b"precious"


def test_a_name_moves_and_goes(disk: Disk, directory: int) -> None:
    make(disk, directory, "x", b"new")
    make(disk, directory, "y", b"old")
    disk.rename(directory, "x", "y")
    assert disk.names(directory) == ["y"]
    assert read(disk, directory, "y") == b"new"
    disk.unlink(directory, "y")
    disk.unlink(directory, "y")
    assert disk.names(directory) == []


def test_a_small_file_is_written_in_place_whole_or_not_at_all(disk: Disk, directory: int) -> None:
    fd = disk.share(directory, "x")
    disk.truncate(fd, 16)
    disk.pwrite(fd, b"ab", 3)
    assert disk.pread(fd, 4, 2) == b"\0ab\0"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (17, hard))
    try:
        with pytest.raises(OSError, match="No space left"):
            disk.pwrite(fd, b"abc", 15)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    disk.close(fd)


def test_a_lock_ends_with_its_descriptor(disk: Disk, directory: int) -> None:
    first, second = disk.share(directory, "x"), disk.share(directory, "x")
    disk.lock(first)
    with pytest.raises(BlockingIOError):
        disk.lock(second)
    disk.close(first)
    disk.lock(second)
    disk.close(second)


def test_no_two_ids_are_the_same(disk: Disk) -> None:
    assert len({disk.random_bytes(8) for _ in range(100)}) == 100
    assert len(disk.random_bytes(8)) == 8
