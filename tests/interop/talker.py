"""A program of another language that prints a JSON object in a line for each thing that happens to it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.doubles.child import Child


class Talker:
    """What a running program has said so far.

    Attributes:
        child: its process, with a pipe.
        said: how often it has said what.
    """

    def __init__(self, child: Child) -> None:
        self.child = child
        self.said: Counter[str] = Counter()
        self.reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        assert self.child.process is not None
        assert self.child.process.stdout is not None
        async for line in self.child.process.stdout:
            said = json.loads(line)
            self.said[said["what"]] += 1
            self.heard(said)

    def heard(self, said: dict[str, Any]) -> None:
        """Take in what it says."""
        raise NotImplementedError

    async def close(self) -> None:
        """Read no more."""
        self.reading.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)
