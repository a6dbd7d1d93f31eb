"""Who listens on a port of this machine, as far as the system says so."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

_LISTENING: Final = "0A"
_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def holder(port: int) -> str:
    """Return the process that listens on a TCP port, in words; empty where the system does not say.

    Only root sees the sockets of other users' processes.
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
