"""Read the output of a test program in another language, which prints one JSON object in a line for each event."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.doubles.child import Child


class Talker:
    """The events that a running program has printed.

    Attributes:
        child: the program's process, whose output is a pipe.
        said: number of events of each kind.
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
        """Apply one event that the test program has printed as JSON."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop reading the program's output."""
        self.reading.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)
