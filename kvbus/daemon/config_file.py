"""Whether the configuration file is another one: what it holds is compared, because times and sizes may be the same.

In Kubernetes the file is behind a link (``..data``) that is swapped as a whole. Elsewhere somebody may write it in
place, so it counts once it has stayed the same for a while. One read at a time, bounded.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Final

from kvbus.config.yamlfile import MAX_BYTES

SETTLED: Final = 1.0
"""Seconds for which a changed file has to stay as it is."""


class ConfigFile:
    """The configuration's file.

    Args:
        path: where it is; read once at once, so make this before the configuration is loaded.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.loaded = self.content()
        """What it held when it was loaded."""

    def content(self) -> bytes:
        """Return a fingerprint of what the file holds; empty if it cannot be read."""
        try:
            with self._path.open("rb") as file:
                return hashlib.sha256(file.read(MAX_BYTES + 1)).digest()
        except OSError:
            return b""

    async def settled(self, seconds: float = SETTLED) -> bytes | None:
        """Return a fingerprint of what it holds; None if that has changed meanwhile: somebody may be writing it."""
        found = await asyncio.to_thread(self.content)
        if found == self.loaded:
            return found
        await asyncio.sleep(seconds)
        return found if found == await asyncio.to_thread(self.content) else None
