"""Clear the blocks of a sleeping engine. Its HTTP API shows that it sleeps, but its stream does not.

A vLLM that is put to sleep resets its prefix cache and its connector's at once, at level 1 and at level 2 (0.33:
``EngineCore.sleep`` → ``pause_scheduler(clear_cache=True)``). It sends AllBlocksCleared only with its next step, when
it wakes up. Until then all of its blocks are dead. Its metrics show that it sleeps.
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
"""Seconds between two rounds of requests to all engines."""


class Observed(Protocol):
    """The sources of the bus."""

    config: Config
    streams: dict[int, SourceStream]
    relay: Relay


class EngineWatch:
    """A watch that asks each engine whose ``api`` is configured or found, one request at a time.

    Args:
        observed: the sources.
        feed: called with an event for each engine that sleeps.
    """

    def __init__(self, observed: Observed, feed: Callable[[RelayEvent], None]) -> None:
        self._observed = observed
        self._feed = feed
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start asking the engines."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop asking the engines."""
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
            # Batches that arrived during the request may be of an engine that has just woken up.
            if source.normalizer.entries and source.stats.batches == before.get(slot):
                log.info("source %s: its engine sleeps: its blocks are cleared", name, extra={"source": name})
                self._feed(EngineEmptied(slot))
