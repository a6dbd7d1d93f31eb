"""The routers: they follow the bus's streams as a KV-aware router does, and do nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvbus.client import BlockView, Curve, Received, Subscriber, Synced, Update


class Endpoints(NamedTuple):
    """The endpoints of one source's stream."""

    source: str
    endpoint: str
    replay_endpoint: str
    curve: Curve | None = None


class Feed:
    """One source as one router sees it: a subscription, and the set of blocks built from it."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.source: Final = endpoints.source
        self._endpoints = endpoints
        self.view = BlockView()
        self.next_seq = 0
        self.rebuilt = False
        """Whether the first replay is complete, so that the view matches the bus."""
        self.updates = 0
        self.replayed = 0

    async def follow(self) -> None:
        """Rebuild from the start, then follow the stream until cancelled."""
        async with Subscriber(
            self._endpoints.endpoint, self._endpoints.replay_endpoint, curve=self._endpoints.curve
        ) as subscriber:
            async for update in subscriber:
                self.take(update)

    def take(self, update: Update) -> None:
        """Apply one update."""
        self.updates += 1
        self.view.update(update)
        if isinstance(update, Received):
            self.next_seq = update.seq + 1
            self.replayed += update.replayed
        elif isinstance(update, Synced):
            self.rebuilt = True


class Router:
    """A router: one feed per source.

    Args:
        name: name on the screen.
        output: name of the bus's output.
        streams: endpoints of that output's streams.
    """

    def __init__(self, name: str, output: str, streams: Sequence[Endpoints]) -> None:
        self.name: Final = name
        self.output: Final = output
        self._streams = streams
        self._task: asyncio.Task[None] | None = None
        self.feeds: list[Feed] = []

    @property
    def joined(self) -> bool:
        """Whether it runs."""
        return self._task is not None

    @property
    def rebuilt(self) -> bool:
        """Whether every feed has been rebuilt since it joined."""
        return self.joined and all(feed.rebuilt for feed in self.feeds)

    @property
    def blocks(self) -> int:
        """Blocks in all its views."""
        return sum(len(feed.view) for feed in self.feeds)

    @property
    def replayed(self) -> int:
        """Batches that the bus's replay has brought."""
        return sum(feed.replayed for feed in self.feeds)

    def join(self, group: asyncio.TaskGroup) -> None:
        """Start with an empty view."""
        self.feeds = [Feed(endpoints) for endpoints in self._streams]
        self._task = group.create_task(self._run(), name=self.name)

    async def leave(self) -> None:
        """Stop and forget everything."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.feeds = []

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for feed in self.feeds:
                group.create_task(feed.follow())
