"""A router under test, whoever wrote it: started on streams, asked which blocks it holds, stopped.

Routers that are programs of other projects run as processes, and are asked by lines of JSON on their standard input and
output: the streams first, then the blocks to look for.
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
    """Where one stream of batches is, and its replay."""

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
    """Any ports of loopback."""
    live, replay = free_ports(2)
    return "127.0.0.1", live, replay


class Router(abc.ABC):
    """One router, in whichever process."""

    @abc.abstractmethod
    async def start(self, streams: Sequence[Stream]) -> None:
        """Begin with nothing."""

    @abc.abstractmethod
    async def held(self, known: Known) -> set[int]:
        """Which of these blocks it believes are in some engine."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """End, and forget everything."""


@dataclass(frozen=True)
class Kind:
    """One router of the table.

    Attributes:
        name: in the table.
        make: one of it; its logs go to the directory.
        lacking: what keeps it from running here, or None.
        output: of kvbus, for it.
        topic: that an engine has to publish under for it.
        listens: host and ports, live and replay, that one of it can be pointed at.
        by_position: it reads no other events than arrays.
        short: it runs in the ordinary suite.
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
    """A router in a process of its own that answers a line of JSON with a line of JSON.

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
