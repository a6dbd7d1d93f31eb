"""The files of a state directory: which generations there are, and in which order their logs follow each other.

``state-N.dump`` is a checkpoint, ``state-N.part`` one that is not complete yet, ``state-N.log`` a write-ahead log.
What they mean together is in :mod:`kvbus.daemon.state_store`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvbus.common.errors import StateKeyError
from kvbus.core.write_ahead_log import StateError
from kvbus.daemon.commit_record import Committed
from kvbus.daemon.disk import Disk
from kvbus.daemon.state_file import HEADER_SIZE, StateFile, described, other_version
from kvbus.daemon.state_keys import StateKeys

log = logging.getLogger("kvbus.state")

SPARE: Final = "log.spare"
"""The last log that was rotated out. The next log is written over it, because new pages are most of a log's cost."""


def name_of(generation: int | str, kind: str) -> str:
    """The file name of one generation."""
    return f"state-{generation}.{kind}"


class Generations:
    """One directory.

    Args:
        disk: the real one, or a test's.
        path: of the directory.
        identity: whose state it is; a file of another one cannot be opened.
        keys: what seals files and opens them.
    """

    def __init__(self, disk: Disk, path: Path, identity: bytes, keys: StateKeys) -> None:
        self._keys = keys
        self._disk = disk
        self._path = path
        self.identity = identity
        self.directory = -1
        """The open directory, between :meth:`enter` and :meth:`leave`."""

    def enter(self) -> None:
        """Open the directory, and make it if it is not there.

        Raises:
            OSError: it cannot be made or opened.
        """
        self._disk.make_directory(self._path)
        self.directory = self._disk.open_directory(self._path)

    def leave(self) -> None:
        """Close the directory."""
        if self.directory >= 0:
            self._disk.close(self.directory)
            self.directory = -1

    def numbers(self, kind: str) -> list[int]:
        """The generations that have a file of this kind, in any order."""
        found = []
        for name in self._disk.names(self.directory):
            number = name.removeprefix("state-").removesuffix(f".{kind}")
            if name == name_of(number, kind) and number.isdecimal():
                found.append(int(number))
        return found

    def newest(self) -> int:
        """The newest generation that has a checkpoint or a log; 0 if none has."""
        return max([0, *self.numbers("dump"), *self.numbers("log")])

    def open(self, name: str) -> StateFile:
        """Open a file to read it.

        Raises:
            StateKeyError: none of the keys opens it.
        """
        file = self._headed(name)
        try:
            file.unseal(self._keys)
        except BaseException:
            file.close()
            raise
        return file

    def _headed(self, name: str) -> StateFile:
        return StateFile(self._disk, self.directory, name, self.identity)

    def check_keys(self) -> None:
        """Look whether a key is missing, before a state is refused for another reason.

        Raises:
            StateKeyError: a file is whole as far as can be seen, and none of the keys opens it.
        """
        for name in self._files():
            with contextlib.suppress(StateError, OSError):
                self.open(name).close()

    def _files(self) -> list[str]:
        return [name_of(generation, kind) for kind in ("dump", "log") for generation in self.numbers(kind)]

    def other_version(self) -> str | None:
        """Say which file is of which other version; None if none is."""
        for name in self._files():
            with contextlib.suppress(OSError):
                fd = self._disk.open(self.directory, name)
                try:
                    said = other_version(name, self._disk.pread(fd, HEADER_SIZE, 0))
                finally:
                    self._disk.close(fd)
                if said is not None:
                    return said
        return None

    def chain(self, first: bytes, found: Committed) -> list[tuple[str, int]]:
        """Return the logs from the checkpoint's on, each with the length it must have.

        Raises:
            StateError: one is missing.
        """
        logs = {}
        for generation in self.numbers("log"):
            if generation <= found.generation:
                read = self._headed(name_of(generation, "log"))
                read.close()
                logs[read.id] = name_of(generation, "log"), read.before, read.before_length
        chain: list[tuple[str, int]] = []
        file_id, length = found.log_id, found.length
        while file_id in logs:
            name, before, before_length = logs.pop(file_id)
            chain.append((name, length))
            if file_id == first:
                return chain[::-1]
            file_id, length = before, before_length
        raise StateError("a write-ahead log is missing")

    def move_aside(self, why: str) -> int:
        """Rename a state that cannot be used, so that people can look at it; how many files that were."""
        stamp = time.strftime("%Y%m%dT%H%M%S")
        log.error("state refused (%s): moved aside as *.refused-%s, beginning empty", why, stamp)
        names = self._disk.names(self.directory)
        for name in names:
            if ".refused-" in name:
                # one is enough to see what went wrong; more would fill the disk
                with contextlib.suppress(IsADirectoryError):
                    self._disk.unlink(self.directory, name)
        moved = 0
        for name in names:
            if name.startswith("state-") and name.endswith((".dump", ".log")):
                self._disk.rename(self.directory, name, f"{name}.refused-{stamp}")
                moved += 1
        self._disk.unlink(self.directory, SPARE)
        return moved

    def drop(self, needless: Callable[[int], bool]) -> None:
        """Delete the files of generations that nobody needs; the last log is kept to be written over."""
        for kind in ("dump", "log", "part"):
            for generation in filter(needless, sorted(self.numbers(kind))):
                name = name_of(generation, kind)
                if kind == "log" and not self._foreign(name):
                    self._disk.rename(self.directory, name, SPARE)
                else:
                    self._disk.unlink(self.directory, name)

    def drop_foreign(self) -> None:
        """Delete what an earlier process left and nobody needs, where it is not sealed as files are now."""
        for name in self._disk.names(self.directory):
            if (name == SPARE and self._foreign(name)) or (".refused-" in name and self._in_clear(name)):
                self._disk.unlink(self.directory, name)

    def _foreign(self, name: str) -> bool:
        """Whether a file is not sealed as files are now: it may not be written over, where its end would stay."""
        keys = self._keys
        if not keys.all:
            return False
        only = StateKeys(keys.first, keys.all[:1] if keys.first is not None else (), clear=keys.first is None)
        try:
            file = self._headed(name)
        except (StateError, OSError):
            return True
        try:
            file.unseal(only)
        except StateKeyError:
            return True
        finally:
            file.close()
        return False

    def _in_clear(self, name: str) -> bool:
        """Whether a file has in clear what is sealed now."""
        if self._keys.first is None:
            return False
        try:
            fd = self._disk.open(self.directory, name)
        except OSError:
            return False
        try:
            return not described(self._disk.pread(fd, HEADER_SIZE, 0))[1]
        finally:
            self._disk.close(fd)
