"""Checks of this machine: libzmq, the configuration's files, the state directory, and the process on a busy port."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path
from typing import Final

from kvbus.common.errors import UnsupportedError
from kvbus.config import Config
from kvbus.core.findings import bus as catalogue
from kvbus.core.findings.finding import Finding
from kvbus.daemon.files import look
from kvbus.daemon.keys import Keys
from kvbus.state.directory import unusable
from kvbus.transport.sockets import check_library


def library() -> list[Finding]:
    """Return a finding if the version of libzmq is too old for kvbus."""
    try:
        check_library()
    except UnsupportedError as error:
        return [catalogue.LIBZMQ_TOO_OLD(why=error)]
    return []


def files(config: Config) -> tuple[Keys, list[Finding]]:
    """Read the files that the configuration names.

    Return the CURVE keys, and a finding for each file or directory that would make ``kvbus run`` fail.
    """
    keys, problems = look(config)
    return keys, [catalogue.FILE_UNUSABLE(key=each.key, value=each.value, why=each.wrong) for each in problems]


def state(config: Config, *, running: bool) -> list[Finding]:
    """Check the directory in which kvbus keeps its state (the configuration key ``state_dir``).

    Return a finding if the key is ``auto`` and no directory is usable, or if other users have access to the directory.
    Do nothing while a bus runs.
    """
    if config.state_dir is None or running:
        return []
    if config.state_dir == "auto":
        problems = unusable(config)
        if problems is None:
            return []
        return [catalogue.STATE_DIR_NOT_FOUND(why="; ".join(problems) or "no candidate exists")]
    path = Path(config.state_dir)
    mode = stat.S_IMODE(path.stat().st_mode) if path.is_dir() else 0
    if not mode & 0o007:
        return []
    return [catalogue.STATE_DIR_OPEN(path=path, mode=mode)]


_LISTENING: Final = "0A"
_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def holder(port: int) -> str:
    """Return a description of the process that listens on a TCP port of this machine; empty if it is unknown.

    Only root can see the sockets of other users' processes.
    """
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    if not sockets:
        return ""
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            for each in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(each.readlink()) in sockets:
                        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        return f"process {process.name} ({command.strip()[:80]})"
    return ""


def _inodes(port: int) -> set[str]:
    found = set()
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found
