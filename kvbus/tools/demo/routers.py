"""The routers of the demo: they keep the set of blocks that a KV-aware router chooses an engine by."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from kvbus.client import BlockView, Received, Restarted, Subscriber
from kvbus.core.types import Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.transport.client.rawsub import RawSubscriber

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvbus.client import Update
    from kvbus.tools.demo.engines import Engine, Key


class Router:
    """A router that follows kvbus with the client library.

    Args:
        name: its name on the screen.
        streams: the live and the replay endpoint, by engine.
    """

    behind_kvbus = True

    def __init__(self, name: str, streams: Mapping[str, tuple[str, str]]) -> None:
        self.name: Final = name
        self.views: dict[str, BlockView] = {}
        """The blocks of each engine; empty before it starts."""
        self.restarts = 0
        self._streams: Final = streams
        self._task: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """Whether it runs."""
        return self._task is not None

    @property
    def blocks(self) -> int:
        """The number of blocks that it holds."""
        return sum(len(view) for view in self.views.values())

    def wrong(self, engines: Sequence[Engine]) -> tuple[int, int]:
        """Count the blocks that only the engines have (missing), and those that only the router has (dead)."""
        missing = dead = 0
        for engine in engines:
            held: set[Key] = {
                (it.group_idx, it.medium, it.hash.hex() if isinstance(it.hash, bytes) else it.hash)
                for it in self.views[engine.name]
            }
            missing += len(engine.blocks - held)
            dead += len(held - engine.blocks)
        return missing, dead

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start without any block."""
        self.views = {name: self.new_view() for name in self._streams}
        self.restarts = 0
        self._task = group.create_task(self._run())

    async def stop(self) -> None:
        """Stop, and forget all blocks."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.views = {}

    def new_view(self) -> BlockView:
        """Return an empty view for a stream of kvbus."""
        return BlockView()

    async def follow(self, name: str, live: str, replay: str) -> None:
        """Apply the updates of one engine, until cancelled."""
        async for update in Subscriber(live, replay):
            self.apply(name, update)

    def apply(self, name: str, update: Update) -> None:
        """Apply one update."""
        self.restarts += isinstance(update, Restarted)
        self.views[name].update(update)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name, (live, replay) in self._streams.items():
                group.create_task(self.follow(name, live, replay))


class DirectRouter(Router):
    """A router that reads the engines themselves, in the way of llm-d-kv-cache 0.9.0 (docs/INTEROP.md).

    It asks for no replay and looks at no sequence number, so it notices neither a lost batch nor a restart. It counts
    copies of a block, so that only the faults make it wrong.
    """

    behind_kvbus = False

    def new_view(self) -> BlockView:
        """Return an empty view for a stream of an engine."""
        return BlockView(copies=True)

    async def follow(self, name: str, live: str, replay: str) -> None:  # noqa: ARG002 - it asks for no replay
        """Apply what arrives, until cancelled."""
        async with RawSubscriber(live) as messages:
            async for topic, seq, payload in messages:
                batch = decode_batch(payload)
                if not isinstance(batch, Reason):
                    self.apply(name, Received(int.from_bytes(seq, "big"), topic, batch))
