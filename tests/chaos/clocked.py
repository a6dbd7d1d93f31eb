"""`kvbus` with a wall clock that is set from outside: ``python -m tests.chaos.clocked FILE run -c kvbus.yaml``.

FILE is mapped into memory and holds two doubles: the clock's offset in seconds, and the last time that was returned.
All Python code that reads the wall clock gets the shifted time. The monotonic clock is not changed.
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
    """The campaign's access to the file with a process's clock offset."""

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
        """The last time that the process was given."""
        return _DOUBLES.unpack_from(self._map)[1]

    def set(self, offset: float) -> None:
        struct.pack_into("=d", self._map, 0, offset)

    def close(self) -> None:
        self._map.close()


def install(path: str) -> None:
    """Shift the wall clock of this process."""
    real = time.time
    file = Path(path).open("r+b")  # noqa: SIM115 - it stays open as long as the process lives
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
