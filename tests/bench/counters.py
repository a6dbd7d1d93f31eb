"""Numbers that processes share: how far each router is, by which the engine paces itself."""

from __future__ import annotations

import mmap
from pathlib import Path


class Counters:
    """Unsigned 64-bit integers in a file mapped by every process; each has one writer."""

    def __init__(self, path: Path, count: int | None = None) -> None:
        if count is not None:
            path.write_bytes(bytes(8 * count))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self.values = memoryview(self._memory).cast("Q")
