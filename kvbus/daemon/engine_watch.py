"""Clear the blocks of an engine that sleeps. The engine's HTTP API shows that it sleeps, but its event stream does not.

When a vLLM engine is put to sleep, at level 1 or 2, it empties its prefix cache and its connector's cache immediately
(0.33: ``EngineCore.sleep`` → ``pause_scheduler(clear_cache=True)``). But it sends AllBlocksCleared only with its next
step, after it has woken up. Until then routers would believe that its blocks are cached. The engine's metrics show that
it sleeps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

import aiohttp

from kvbus.common.tasks import end_tasks
from kvbus.config import Config, SourceStream
from kvbus.core.events import EngineEmptied, RelayEvent
from kvbus.core.relay import Relay
from kvbus.transport import engine_api

log = logging.getLogger("kvbus.daemon.engine_watch")

INTERVAL: Final = 10.0
"""Seconds between two rounds. In each round, kvbus asks every engine once whether it sleeps."""


class BusState(Protocol):
    """The attributes of the daemon that the watch reads: its sources and its relay."""

    config: Config
    streams: dict[int, SourceStream]
    relay: Relay


class EngineWatch:
    """A watch that regularly asks the HTTP API of each engine whether the engine sleeps.

    It asks each engine whose ``api`` address is configured or was found by discovery.

    Args:
        observed: the daemon with the sources.
        feed: called with an event for each source whose engine sleeps.
    """

    def __init__(self, observed: BusState, feed: Callable[[RelayEvent], None]) -> None:
        self._observed = observed
        self._feed = feed
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start asking the engines whether they sleep."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop asking the engines whether they sleep."""
        await end_tasks([self._task])

    async def _run(self) -> None:
        while True:
            apis = {source.name: source.api for source in self._observed.config.sources if source.api}
            if apis:
                async with engine_api.session() as client:
                    await asyncio.gather(*(self._look(client, name, base) for name, base in apis.items()))
            await asyncio.sleep(INTERVAL)

    def _slots(self, name: str) -> list[int]:
        config, streams = self._observed.config, self._observed.streams
        return [slot for slot, stream in streams.items() if config.sources[stream.source_index].name == name]

    async def _look(self, client: aiohttp.ClientSession, name: str, base: str) -> None:
        sources = self._observed.relay.sources
        before = {slot: sources[slot].stats.batches for slot in self._slots(name)}
        try:
            asleep = await engine_api.is_asleep(client, base)
        except (aiohttp.ClientError, TimeoutError) as error:
            log.debug("source %s: %s does not answer: %s", name, base, error)
            return
        if not asleep:
            return
        for slot in self._slots(name):
            source = sources[slot]
            # If batches have arrived during the request, do not clear the source's blocks: perhaps the engine has woken
            # up since it answered.
            if source.normalizer.entries and source.stats.batches == before.get(slot):
                log.info("source %s: the engine sleeps, so its blocks are cleared", name, extra={"source": name})
                self._feed(EngineEmptied(slot))
