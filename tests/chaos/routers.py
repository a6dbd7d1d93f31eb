"""A handle by which the chaos campaign starts a router process, and sends requests to it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.chaos.namespaces import Namespaces
from tests.chaos.router import Key
from tests.doubles.child import Child, python


class Router:
    """A router process of the chaos test, which sends requests to it.

    Args:
        name: name of the process.
        streams: the streams that the router reads, see `tests.chaos.router`.
    """

    def __init__(
        self, name: str, streams: list[dict[str, Any]], directory: Path, place: Namespaces | None = None
    ) -> None:
        command = python("tests.chaos.router", json.dumps(streams))
        self.child = Child(name, place.inside(command) if place else command, directory, piped=True)
        self._asking = asyncio.Lock()

    async def start(self) -> None:
        await self.child.start()

    async def restart(self) -> None:
        """Kill the process, and start a new one with an empty view."""
        async with self._asking:
            await self.child.kill()
            await self.child.start()

    async def _ask(self, word: str) -> Any:
        async with self._asking, asyncio.timeout(60):
            process = self.child.process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(word.encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
            assert line, f"{self.child.name} ended by itself: {self.child.log.read_text()[-2000:]}"
            return json.loads(line)

    async def report(self) -> dict[str, Any]:
        return await self._ask("report")

    async def dump(self, name: str) -> dict[str, set[Key]]:
        """Return the key of every block in a router's view of one stream, by rank."""
        found = await self._ask(f"dump {name}")
        return {rank: {(group, medium, block) for group, medium, block in keys} for rank, keys in found.items()}

    async def close(self) -> None:
        await self.child.close()
