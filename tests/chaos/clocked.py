"""`kvbus` under a wall clock that somebody else sets: ``python -m tests.chaos.clocked FILE run -c kvbus.yaml``.

FILE is mapped into memory: two doubles, the seconds by which the clock is wrong, and the last time that was told.
Everything in Python that asks for the time of day gets the wrong one; the monotonic clock stays what it is.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from pathlib import Path
from typing import Final

_DOUBLES: Final = struct.Struct("=dd")


class WrongClock:
    """The harness's side: the file that says how wrong a process's clock is."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(_DOUBLES.pack(0.0, 0.0))
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _DOUBLES.size)

    @property
    def offset(self) -> float:
        return _DOUBLES.unpack_from(self._map)[0]

    @property
    def told(self) -> float:
        """The last time the process was told."""
        return _DOUBLES.unpack_from(self._map)[1]

    def set(self, offset: float) -> None:
        struct.pack_into("=d", self._map, 0, offset)

    def close(self) -> None:
        self._map.close()


def install(path: str) -> None:
    """Make this process believe in the wrong clock."""
    real = time.time
    file = Path(path).open("r+b")  # noqa: SIM115 - for as long as the process lives
    shared = mmap.mmap(file.fileno(), _DOUBLES.size)

    def wrong() -> float:
        told = real() + struct.unpack_from("=d", shared)[0]
        struct.pack_into("=d", shared, 8, told)
        return told

    time.time = wrong
    time.time_ns = lambda: int(wrong() * 1e9)


if __name__ == "__main__":
    install(sys.argv.pop(1))
    from kvbus.cli import main

    sys.argv[0] = "kvbus"
    main()
