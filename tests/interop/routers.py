"""The interface of a router under test, with functions to start it on streams, to ask for its blocks, and to stop it.

Routers of other projects run as processes that read lines of JSON and answer with lines of JSON. The first line names
the streams. Each further line names the blocks to look for.
"""

from __future__ import annotations

import abc
import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.doubles.child import Child
from tests.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from .cache import Known

PATIENCE: Final = 60.0


@dataclass(frozen=True)
class Stream:
    """The ports of one stream of batches and of its replay."""

    host: str
    live_port: int
    replay_port: int

    @property
    def live(self) -> str:
        return f"tcp://{self.host}:{self.live_port}"

    @property
    def replay(self) -> str:
        return f"tcp://{self.host}:{self.replay_port}"


def anywhere() -> tuple[str, int, int]:
    """Return the loopback address, a free port for a live stream, and a free port for its replay."""
    live, replay = free_ports(2)
    return "127.0.0.1", live, replay


class Router(abc.ABC):
    """A router that a test starts on streams and asks for its blocks, in this process or in another process."""

    @abc.abstractmethod
    async def start(self, streams: Sequence[Stream]) -> None:
        """Start the router with no blocks, and let it read these streams."""

    @abc.abstractmethod
    async def held(self, known: Known) -> set[int]:
        """Return those of the known blocks that the router believes an engine holds."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """Stop the router. It forgets its view."""


@dataclass(frozen=True)
class Kind:
    """A kind of router: one column of the table.

    Attributes:
        name: name of the router in the table.
        make: function that creates such a router, with its logs in the given directory.
        lacking: function that says why the router cannot run here; it returns None if the router can run.
        output: settings of kvbus's output for this router.
        topic: topic under which an engine must publish for this router.
        listens: function that returns a host, a live port and a replay port from which this router can read.
        by_position: whether the router reads only events that are arrays.
        short: whether the router runs in the ordinary test suite.
    """

    name: str
    make: Callable[[Path, str], Router]
    lacking: Callable[[], str | None] = lambda: None
    output: Mapping[str, Any] = field(default_factory=dict)
    topic: str = ""
    listens: Callable[[], tuple[str, int, int]] = anywhere
    by_position: bool = False
    short: bool = True


class Program(Router):
    """A router in its own process that answers each line of JSON with a line of JSON.

    Args:
        command: the command that starts the router.
        directory: directory of the router's log.
        name: name of the router's log.
        first: returns the first line of the router's input, from the streams.
        env: environment variables that the router needs.
    """

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        name: str,
        first: Callable[[Sequence[Stream]], dict[str, Any]],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._child = Child(name, command, directory, piped=True)
        self._child.env.update(env or {})
        self._first = first

    async def start(self, streams: Sequence[Stream]) -> None:
        await self._child.start()
        self._write(self._first(streams))

    async def held(self, known: Known) -> set[int]:
        self._write({"known": [[block, parent, tokens] for block, (parent, tokens) in known.items()]})
        process = self._child.process
        assert process is not None
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            line = await process.stdout.readline()
        assert line, f"{self._child.name} ended:\n{self._child.log.read_text()[-2000:]}"
        return set(json.loads(line)["held"])

    async def stop(self) -> None:
        await self._child.close()

    def _write(self, line: dict[str, Any]) -> None:
        process = self._child.process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(json.dumps(line).encode() + b"\n")
