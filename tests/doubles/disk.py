"""A disk in memory that keeps what was synced, and of the rest what chance leaves of it.

As POSIX has it: writes of one file, and names in one directory, reach the disk in any order or not at all until they are
synced; a write may be torn between sectors. What a process wrote is there for the next one, unless the power was cut.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

from kvbus.daemon.disk import Disk

SECTOR = 512


class PowerCut(Exception):  # noqa: N818
    """The machine is off."""


class Inode:
    """A file: what processes see, what is on the disk, and the writes in between."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.kept = bytearray()
        self.between: list[tuple[int, bytes] | int] = []
        self.locker: MemoryDisk | None = None

    def write(self, data: bytes, at: int) -> None:
        _put(self.seen, data, at)
        self.between.append((at, data))

    def truncate(self, size: int) -> None:
        _cut(self.seen, size)
        self.between.append(size)

    def sync(self) -> None:
        self.kept, self.between = bytearray(self.seen), []

    def cut(self, chance: random.Random) -> None:
        """Keep some of the writes that were not synced, in some order, and of the last ones some sectors."""
        writes = [write for write in self.between if chance.random() < 0.6]
        if chance.random() < 0.5:
            chance.shuffle(writes)
        for write in writes:
            if isinstance(write, int):
                _cut(self.kept, write)
            elif chance.random() < 0.7:
                _put(self.kept, write[1], write[0])
            else:
                at, data = write
                for first in range(0, len(data), SECTOR):
                    if chance.random() < 0.5:
                        _put(self.kept, data[first : first + SECTOR], at + first)
        self.seen, self.between = bytearray(self.kept), []


def _put(content: bytearray, data: bytes, at: int) -> None:
    if len(content) < at:
        content.extend(bytes(at - len(content)))
    content[at : at + len(data)] = data


def _cut(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


class Folder:
    """A directory: its names as processes see them, as they are on the disk, and the changes in between."""

    def __init__(self) -> None:
        self.seen: dict[str, Inode] = {}
        self.kept: dict[str, Inode] = {}
        self.between: list[dict[str, Inode | None]] = []

    def change(self, **names: Inode | None) -> None:
        _rename(self.seen, names)
        self.between.append(names)

    def sync(self) -> None:
        self.kept, self.between = dict(self.seen), []

    def cut(self, chance: random.Random) -> None:
        for names in self.between:
            if chance.random() < 0.6:
                _rename(self.kept, names)
        self.seen, self.between = dict(self.kept), []
        for inode in self.seen.values():
            inode.cut(chance)


def _rename(names: dict[str, Inode], changes: dict[str, Inode | None]) -> None:
    for name, inode in changes.items():
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


class Machine:
    """What outlives a process: the directories, and which boot it is."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.folders: dict[Path, Folder] = {}
        self.boot = 1

    def cut_power(self) -> None:
        """Turn it off and on."""
        self.boot += 1
        for folder in self.folders.values():
            folder.cut(self.chance)


class MemoryDisk(Disk):
    """The disk of a machine as one process sees it.

    Args:
        machine: the machine.
        operations: the power is cut at the last of so many changes; none at all: never.
    """

    def __init__(self, machine: Machine, operations: int | None = None) -> None:
        self._machine = machine
        self._left = operations
        self._open: dict[int, Folder | Inode] = {}
        self._at: dict[int, int] = {}
        self._next = 1000
        self.off = False

    def _step(self) -> bool:
        """Return whether a change takes place; raise where the power is cut at it."""
        if self.off:
            return False
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self.off = True
                raise PowerCut
        return True

    def _fd(self, what: Folder | Inode) -> int:
        self._next += 1
        self._open[self._next] = what
        self._at[self._next] = 0
        return self._next

    def _folder(self, fd: int) -> Folder:
        found = self._open[fd]
        assert isinstance(found, Folder)
        return found

    def _file(self, fd: int) -> Inode:
        found = self._open[fd]
        assert isinstance(found, Inode)
        return found

    def make_directory(self, path: Path) -> None:
        self._machine.folders.setdefault(path, Folder())

    def open_directory(self, path: Path) -> int:
        return self._fd(self._machine.folders[path])

    def names(self, directory: int) -> list[str]:
        return list(self._folder(directory).seen)

    def open(self, directory: int, name: str) -> int:
        if name not in self._folder(directory).seen:
            raise FileNotFoundError(errno.ENOENT, name)
        return self._fd(self._folder(directory).seen[name])

    def create(self, directory: int, name: str) -> int:
        inode = Inode()
        if self._step():
            self._folder(directory).change(**{name: inode})
        return self._fd(inode)

    def reuse(self, directory: int, name: str) -> int | None:
        return self.open(directory, name) if name in self._folder(directory).seen else None

    def share(self, directory: int, name: str) -> int:
        if name not in self._folder(directory).seen:
            return self.create(directory, name)
        return self.open(directory, name)

    def close(self, fd: int) -> None:
        found = self._open.pop(fd)
        if isinstance(found, Inode) and found.locker is self:
            found.locker = None

    def size(self, fd: int) -> int:
        return len(self._file(fd).seen)

    def owner(self, fd: int) -> int:
        del fd
        return os.getuid()

    def pread(self, fd: int, size: int, at: int) -> bytes:
        return bytes(self._file(fd).seen[at : at + size])

    def pwrite(self, fd: int, data: bytes, at: int) -> None:
        if self._step():
            self._file(fd).write(data, at)

    def writev(self, fd: int, pieces: Sequence[bytes | memoryview]) -> int:
        data = b"".join(pieces)
        if self._step():
            self._file(fd).write(data, self._at[fd])
        self._at[fd] += len(data)
        return len(data)

    def truncate(self, fd: int, size: int) -> None:
        if self._step():
            self._file(fd).truncate(size)

    def rename(self, directory: int, name: str, to: str) -> None:
        folder = self._folder(directory)
        if self._step():
            folder.change(**{to: folder.seen[name], name: None})

    def unlink(self, directory: int, name: str) -> None:
        folder = self._folder(directory)
        if name in folder.seen and self._step():
            folder.change(**{name: None})

    def sync(self, fd: int) -> None:
        if self._step():
            self._file(fd).sync()

    def sync_directory(self, directory: int) -> None:
        if self._step():
            self._folder(directory).sync()

    def lock(self, fd: int) -> None:
        locker = self._file(fd).locker
        if locker is not None and not locker.off:
            raise BlockingIOError
        self._file(fd).locker = self

    def boot_id(self) -> bytes:
        return self._machine.boot.to_bytes(16, "big")

    def random_bytes(self, count: int) -> bytes:
        return self._machine.chance.randbytes(count)
