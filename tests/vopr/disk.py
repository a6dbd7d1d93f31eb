"""A simulated disk, with no more than POSIX promises.

What a process has written is there for the next one, whatever kills it. A power cut is another matter: of what was not
synced, any write may be missing, or torn at any byte, and so may any change of a name, in any combination.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

from kvbus.daemon.disk import Disk


class File:
    """An inode: its content as processes see it, and what of that the disk has."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = bytearray()
        self.pending: list[tuple[int, bytes | None]] = []
        """Writes since the last sync: where, and what; None shortens the file to that."""
        self.holder: Opened | None = None

    def write(self, at: int, data: bytes | None) -> None:
        _apply(self.data, at, data)
        self.pending.append((at, data))

    def sync(self) -> None:
        for at, data in self.pending:
            _apply(self.durable, at, data)
        self.pending.clear()

    def cut(self, chance: random.Random) -> None:
        """The power is cut."""
        how = chance.choice(["all", "first", "some", "none"])
        count = chance.randrange(len(self.pending) + 1)
        for number, (at, data) in enumerate(self.pending):
            if how == "none" or (how == "first" and number > count) or (how == "some" and chance.random() < 0.5):
                continue
            torn = data is not None and ((how == "first" and number == count) or chance.random() < 0.02)
            _apply(self.durable, at, data[: chance.randrange(len(data) + 1)] if torn and data is not None else data)
        self.pending.clear()
        self.data = bytearray(self.durable)
        self.holder = None


def _apply(content: bytearray, at: int, data: bytes | None) -> None:
    if data is None:
        del content[at:]
        content.extend(bytes(max(0, at - len(content))))
        return
    content.extend(bytes(max(0, at - len(content))))
    content[at : at + len(data)] = data


class Opened:
    """An open file description: a file, and a position."""

    def __init__(self, file: File) -> None:
        self.file, self.at = file, 0

    def close(self) -> None:
        if self.file.holder is self:
            self.file.holder = None


class Platter:
    """What outlives processes: directories with their files.

    Args:
        chance: what a power cut leaves.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.directories: dict[str, dict[str, File]] = {}
        self.durable: dict[str, dict[str, File]] = {}
        self.changes: dict[str, list[tuple[str, File | None]]] = {}
        """Names since the last sync of their directory: which file they are of, None for none."""
        self.room: int | None = None
        """Bytes until the disk is full; None for as many as it takes."""

    def files(self) -> list[tuple[str, File]]:
        """Return every file by its path, in a fixed order."""
        return sorted(
            ((f"{path}/{name}", file) for path, names in self.directories.items() for name, file in names.items()),
            key=lambda found: found[0],
        )

    def power_cut(self) -> None:
        """Everything that was not synced is in doubt."""
        for path, names in self.directories.items():
            durable = self.durable.setdefault(path, {})
            how = self.chance.choice(["all", "first", "some"])
            changes = self.changes.pop(path, [])
            count = self.chance.randrange(len(changes) + 1)
            for number, (name, file) in enumerate(changes):
                if (how == "first" and number > count) or (how == "some" and self.chance.random() < 0.5):
                    continue
                if file is None:
                    durable.pop(name, None)
                else:
                    durable[name] = file
            names.clear()
            names.update(durable)
        for _, file in self.files():
            file.cut(self.chance)

    def flip_a_bit(self, number: int) -> None:
        """One bit of one file is another one from now on."""
        files = [file for name, file in self.files() if file.data and not name.endswith("/lock")]
        if files:
            file = files[number % len(files)]
            at = self.chance.randrange(len(file.data))
            file.write(at, bytes([file.data[at] ^ (1 << self.chance.randrange(8))]))
            file.sync()

    def cut_a_log(self) -> None:
        """The end of the newest log is gone, or all of it."""
        logs = [(len(name), name, file) for name, file in self.files() if name.endswith(".log")]
        if logs:
            file = max(logs, key=lambda found: found[:2])[2]
            file.write(self.chance.choice([0, self.chance.randrange(len(file.data) + 1)]), None)
            file.sync()

    def change(self, path: str, name: str, file: File | None) -> None:
        """Give a name to a file, or to none."""
        if file is None:
            del self.directories[path][name]
        else:
            self.directories[path][name] = file
        self.changes.setdefault(path, []).append((name, file))

    def sync_names(self, path: str) -> None:
        """The names in a directory are on the disk."""
        self.durable[path] = dict(self.directories[path])
        self.changes.pop(path, None)

    def take(self, size: int, *, whole: bool = False) -> int:
        """Use up room; return how much there is, or fail if there is none (``whole``: not enough)."""
        if self.room is None:
            return size
        taken = min(size, self.room)
        if whole and taken < size:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= taken
        if size and not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return taken


class SimDisk(Disk):
    """One process's descriptors; see :class:`kvbus.daemon.disk.Disk`."""

    def __init__(self, platter: Platter) -> None:
        self._platter = platter
        self._opened: dict[int, Opened | str] = {}
        self._next = 3

    def die(self) -> None:
        """The process is gone, and the kernel closes what it had open."""
        for opened in self._opened.values():
            if isinstance(opened, Opened):
                opened.close()
        self._opened.clear()

    def _descriptor(self, opened: Opened | str) -> int:
        self._next += 1
        self._opened[self._next] = opened
        return self._next

    def _get(self, fd: int) -> Opened:
        opened = self._opened.get(fd)
        if not isinstance(opened, Opened):
            raise OSError(errno.EBADF, "Bad file descriptor")
        return opened

    def _names(self, directory: int) -> tuple[str, dict[str, File]]:
        path = self._opened.get(directory)
        if not isinstance(path, str):
            raise OSError(errno.EBADF, "Bad file descriptor")
        return path, self._platter.directories[path]

    def make_directory(self, path: Path) -> None:
        self._platter.directories.setdefault(str(path), {})

    def open_directory(self, path: Path) -> int:
        if str(path) not in self._platter.directories:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return self._descriptor(str(path))

    def names(self, directory: int) -> list[str]:
        return sorted(self._names(directory)[1])

    def open(self, directory: int, name: str) -> int:
        file = self._names(directory)[1].get(name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return self._descriptor(Opened(file))

    def create(self, directory: int, name: str) -> int:
        self.unlink(directory, name)
        return self.share(directory, name)

    def reuse(self, directory: int, name: str) -> int | None:
        return self.open(directory, name) if name in self._names(directory)[1] else None

    def share(self, directory: int, name: str) -> int:
        path, names = self._names(directory)
        if name not in names:
            self._platter.take(1)
            self._platter.change(path, name, File())
        return self._descriptor(Opened(names[name]))

    def close(self, fd: int) -> None:
        opened = self._opened.pop(fd, None)
        if isinstance(opened, Opened):
            opened.close()

    def size(self, fd: int) -> int:
        return len(self._get(fd).file.data)

    def owner(self, fd: int) -> int:
        del fd
        return os.getuid()

    def pread(self, fd: int, size: int, at: int) -> bytes:
        return bytes(self._get(fd).file.data[at : at + size])

    def pwrite(self, fd: int, data: bytes, at: int) -> None:
        file = self._get(fd).file
        self._platter.take(max(0, at + len(data) - len(file.data)), whole=True)
        file.write(at, bytes(data))

    def writev(self, fd: int, pieces: Sequence[bytes | memoryview]) -> int:
        opened = self._get(fd)
        data = b"".join(pieces)
        taken = self._platter.take(len(data))
        opened.file.write(opened.at, data[:taken])
        opened.at += taken
        return taken

    def truncate(self, fd: int, size: int) -> None:
        self._get(fd).file.write(size, None)

    def rename(self, directory: int, name: str, to: str) -> None:
        path, names = self._names(directory)
        if name not in names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        file = names[name]
        self._platter.change(path, name, None)
        self._platter.change(path, to, file)

    def unlink(self, directory: int, name: str) -> None:
        path, names = self._names(directory)
        if name in names:
            self._platter.change(path, name, None)

    def sync(self, fd: int) -> None:
        self._get(fd).file.sync()

    def sync_directory(self, directory: int) -> None:
        self._platter.sync_names(self._names(directory)[0])

    def lock(self, fd: int) -> None:
        opened = self._get(fd)
        if opened.file.holder not in (None, opened):
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        opened.file.holder = opened

    def random_bytes(self, count: int) -> bytes:
        return self._platter.chance.randbytes(count)
