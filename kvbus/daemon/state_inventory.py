"""The files of a state directory, looked at and removed by people: ``kvbus state show`` and ``kvbus state wipe``.

Looking tells what the files are and nothing of what is in them. Removing leaves the numbering: the seq reservations and
the commit record stay, because a router drops what has a lower seq than it has seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvbus.core.write_ahead_log import StateError
from kvbus.daemon import commit_record
from kvbus.daemon.commit_record import NO_LOG, CommitRecord, Committed
from kvbus.daemon.disk import Disk
from kvbus.daemon.generations import SPARE
from kvbus.daemon.seq_reservation import reached
from kvbus.daemon.state_file import HEADER_SIZE, described

_OURS: Final = re.compile(rf"state-\d+\.(dump|log|part)(\.refused-\w+)?|{re.escape(SPARE)}|commit\.new")


class Found(NamedTuple):
    """A file of the state.

    Attributes:
        name: its name.
        size: in bytes.
        version: of the format; empty where it says none.
        sealed: whether a key is needed to read it.
    """

    name: str
    size: int
    version: str
    sealed: bool


class Inventory(NamedTuple):
    """A state directory.

    Attributes:
        files: what holds content, by name.
        others: names of what does not: the numbering, the lock, and whatever is somebody else's.
        streams: how many streams have a seq reservation.
        highest: the highest seq that is reserved.
        committed: what the commit record says; None where there is none.
        damaged: what is wrong with the commit record; empty if nothing is.
    """

    files: Sequence[Found]
    others: Sequence[str]
    streams: int
    highest: int
    committed: Committed | None
    damaged: str


def look(path: Path, disk: Disk | None = None) -> Inventory:
    """Look at a directory; nothing is changed.

    Raises:
        OSError: it is none, or cannot be read.
    """
    disk = disk or Disk()
    directory = disk.open_directory(path)
    try:
        names = sorted(disk.names(directory))
        files = [_found(disk, directory, name) for name in names if _OURS.fullmatch(name)]
        committed, damaged = None, ""
        try:
            committed = commit_record.read(disk, directory)
        except StateError as error:
            damaged = str(error)
    finally:
        disk.close(directory)
    seqs = sum(name.startswith("kvbus-") and name.endswith(".seq") for name in names)
    highest = max(reached(path, disk), committed.highest if committed is not None else 0)
    others = [name for name in names if not _OURS.fullmatch(name)]
    return Inventory(files, others, seqs, highest, committed, damaged)


def _found(disk: Disk, directory: int, name: str) -> Found:
    try:
        fd = disk.open(directory, name)
    except OSError:  # a link or a directory has the name: it can be removed, and not looked into
        return Found(name, 0, "", sealed=False)
    try:
        return Found(name, disk.size(fd), *described(disk.pread(fd, HEADER_SIZE, 0)))
    finally:
        disk.close(fd)


def wipe(path: Path, inventory: Inventory, disk: Disk | None = None) -> list[str]:
    """Remove what holds content; return what could not be removed, with the reason. The caller has the lock.

    Raises:
        OSError: the numbering cannot be kept, and nothing was removed.
    """
    disk = disk or Disk()
    directory = disk.open_directory(path)
    left = []
    try:
        if inventory.committed is not None or inventory.damaged:
            # before anything goes: a process that finds some files and no log would say that they are damaged
            said = inventory.committed or Committed()
            said = said._replace(generation=0, log_id=NO_LOG, length=0, highest=inventory.highest)
            CommitRecord(disk, directory, said).close()
        for file in inventory.files:
            try:
                disk.unlink(directory, file.name)
            except OSError as error:
                left.append(f"{file.name}: {error.strerror or error}")
        disk.sync_directory(directory)
    finally:
        disk.close(directory)
    return left
