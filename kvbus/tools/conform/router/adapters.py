"""Adapters of routers. An adapter starts a router if it can, and asks the router which blocks it holds."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from typing import Any, ClassVar, Final, NamedTuple

import aiohttp

from kvbus.client import BlockView, Subscriber
from kvbus.tools.conform.router.views import HeldBlock, Known, View, ViewError, canonical, parse, view_of

BLOCK_SIZE: Final = 2
"""Number of tokens in a block of the simulated engine. It is the same in every case."""

_TIMEOUT_S: Final = 30.0
END_S: Final = 5.0
_LINE: Final = 256 * 1024 * 1024


class Stream(NamedTuple):
    """The endpoints and the topic at which the router reads the batches of one rank."""

    live: str
    replay: str
    topic: str = ""


class AdapterError(Exception):
    """The router does not answer. ``crashed`` is true if it has answered before."""

    def __init__(self, text: str, *, crashed: bool = False) -> None:
        super().__init__(text)
        self.crashed = crashed


class Adapter(abc.ABC):
    """A router that the kit judges, with a way to ask it which blocks it holds.

    Attributes:
        fresh: whether the adapter starts a new router, which has no blocks yet, for each case.
    """

    fresh: ClassVar[bool] = False

    async def start(self, streams: Sequence[Stream]) -> None:  # noqa: B027 - a router that runs needs nothing
        """Start the router, so that it reads these streams. Do nothing if the router is already running."""

    @abc.abstractmethod
    async def view(self, known: Known) -> View:
        """Ask the router which of the ``known`` blocks it holds.

        Raises:
            AdapterError: the router does not answer, or the answer is not a view.
        """

    def ended(self) -> str:
        """Return a text that says how the router has ended.

        The text is empty while the router runs, or if the adapter cannot find out whether it runs.
        """
        return ""

    async def stop(self) -> None:  # noqa: B027 - the same
        """Stop the router, if the adapter has started it."""


class Driver(Adapter):
    """An adapter for a router inside a program of the user, which is started for each case.

    The first line of the program's input has the streams as JSON. Each later line has the blocks that the engine has
    stored in the case. The program answers it with a line that has the router's blocks.

    Args:
        command: the command that starts the program.
    """

    fresh = True

    def __init__(self, command: Sequence[str]) -> None:
        self._command: Final = command
        self._process: asyncio.subprocess.Process | None = None
        self._answered = False

    async def start(self, streams: Sequence[Stream]) -> None:
        """Start the program, and write a line of JSON to its input.

        The line has the endpoints and topics of the streams, and the block size.
        """
        self._answered = False
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE,
                start_new_session=True,
            )
        except OSError as error:
            raise AdapterError(f"{self._command[0]}: {error.strerror}") from error
        named = [{"name": f"w{rank}", **stream._asdict()} for rank, stream in enumerate(streams)]
        await self._write({"streams": named, "block_size": BLOCK_SIZE})

    async def view(self, known: Known) -> View:
        """Write the known blocks to the program as a line of JSON, and read its answer."""
        await self._write({"known": [[block, source.parent, source.tokens] for block, source in known.items()]})
        process = self._running()
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError as error:
            raise AdapterError(f"the driver does not answer within {_TIMEOUT_S:g} s", crashed=self._answered) from error
        if not line:
            await process.wait()
            raise AdapterError(self.ended(), crashed=self._answered)
        try:
            view = view_of(json.loads(line))
        except (ValueError, AttributeError) as error:
            raise AdapterError(f"the driver's answer: {error}") from error
        self._answered = True
        return view

    def ended(self) -> str:
        """Return a text with the exit code of the program; empty while the program runs."""
        code = self._running().returncode
        return "" if code is None else f"the router ended (exit code {code})"

    async def stop(self) -> None:
        """Close the program's input, so that it ends.

        If it does not, terminate its process group, and finally kill it.
        """
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                async with asyncio.timeout(END_S):
                    await process.wait()
                break
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        await process.wait()

    async def _write(self, line: dict[str, Any]) -> None:
        process = self._running()
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        process.stdin.write(json.dumps(line).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # the program has ended, as the next read of its output will show
            await process.stdin.drain()

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise AdapterError("the driver does not run")
        return self._process


class ViewUrl(Adapter):
    """An adapter for a running router that lists its blocks at an HTTP URL."""

    def __init__(self, url: str) -> None:
        self._url: Final = url

    async def view(self, known: Known) -> View:  # noqa: ARG002 - it tells all
        """Request the URL, and return the router's blocks."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(self._url) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise AdapterError(f"{self._url}: {error or type(error).__name__}") from error
        if answer.status >= 300:
            raise AdapterError(f"{self._url}: {answer.status} {text[:100]}")
        try:
            return parse(text)
        except ViewError as error:
            raise AdapterError(str(error)) from error


class Client(Adapter):
    """An adapter for kvbus's own client library, which runs as a router in this process.

    Args:
        copies: whether to count copies of a block: True for an engine's stream, False for kvbus's stream.
    """

    fresh = True

    def __init__(self, *, copies: bool = True) -> None:
        self._copies: Final = copies
        self._views: list[BlockView] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, streams: Sequence[Stream]) -> None:
        """Subscribe to each stream with the client library."""
        self._views = [BlockView(copies=self._copies) for _ in streams]
        self._tasks = [
            asyncio.ensure_future(_follow(Subscriber(stream.live, stream.replay), view))
            for stream, view in zip(streams, self._views, strict=True)
        ]

    async def view(self, known: Known) -> View:  # noqa: ARG002 - it tells all
        """Return the blocks of all streams, as the client library holds them."""
        for task in self._tasks:
            if task.done():
                task.result()
        held = {
            HeldBlock(canonical(block.hash), block.medium, block.group_idx, rank if block.rank is None else block.rank)
            for rank, view in enumerate(self._views) for block in view
        }  # fmt: skip
        return View(frozenset(held), frozenset({"medium", "group", "rank"}))

    async def stop(self) -> None:
        """Cancel the subscriptions to all streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _follow(subscriber: Subscriber, view: BlockView) -> None:
    async for update in subscriber:
        view.update(update)
