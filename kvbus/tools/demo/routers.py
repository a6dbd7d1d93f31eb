"""The routers: they follow the bus's streams as a KV-aware router does, and do nothing else.

One follows the engines' own streams, to show what a router has without kvbus.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvbus.client import BlockView, Curve, Received, Subscriber, Synced, Update
from kvbus.core.types import Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.transport.client.rawsub import RawSubscriber


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
        self.endpoints: Final = endpoints
        self.view = BlockView()
        self.next_seq = 0
        self.rebuilt = False
        """Whether the first replay is complete, so that the view matches the bus."""
        self.updates = 0
        self.replayed = 0

    async def follow(self) -> None:
        """Rebuild from the start, then follow the stream until cancelled."""
        async with Subscriber(
            self.endpoints.endpoint, self.endpoints.replay_endpoint, curve=self.endpoints.curve
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


class DirectFeed(Feed):
    """One engine's own stream, read as the module llm-d-kv-cache 0.9.0 reads it (docs/INTEROP.md).

    It asks for no replay and looks at no sequence number, so it notices no lost batch and no restart. It is milder
    than that module: it keeps a block whose parent it has missed. Its blocks are a set, so the first removal takes a
    block that vLLM holds twice.
    """

    async def follow(self) -> None:
        """Apply what arrives, as it arrives, until cancelled."""
        async with RawSubscriber(self.endpoints.endpoint) as messages:
            async for topic, seq, payload in messages:
                batch = decode_batch(payload)
                if not isinstance(batch, Reason):
                    self.take(Received(int.from_bytes(seq, "big"), topic, batch))


class Router:
    """A router: one feed per source.

    Args:
        name: name on the screen.
        reads: what it reads: an output of the bus, or the engines.
        streams: the endpoints that it reads.
        feed: how it reads one of them.
    """

    def __init__(self, name: str, reads: str, streams: Sequence[Endpoints], feed: type[Feed] = Feed) -> None:
        self.name: Final = name
        self.reads: Final = reads
        self._streams = streams
        self._feed = feed
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
        self.feeds = [self._feed(endpoints) for endpoints in self._streams]
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
