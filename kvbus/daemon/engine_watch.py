"""What an engine's HTTP API says and its stream does not: that it sleeps, and which version it is.

A vLLM that is put to sleep resets its prefix cache and its connector's at once, at level 1 as at level 2 (0.33:
``EngineCore.sleep`` → ``pause_scheduler(clear_cache=True)``). Its AllBlocksCleared leaves with its next step, which is
when it wakes up. Until then every block of it is dead. Its metrics say that it sleeps.

Its version says whether it removes each copy of a block: :mod:`kvbus.core.normalizing.copies`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Final, Protocol

import aiohttp

from kvbus.common.tasks import end_tasks
from kvbus.config import Config, SourceStream
from kvbus.core.events import CopiesRemovedEach, EngineEmptied, RelayEvent
from kvbus.core.relay import Relay
from kvbus.transport import engine_api

log = logging.getLogger("kvbus.daemon.engine_watch")

INTERVAL: Final = 10.0
"""Seconds between two rounds of questions."""

_RELEASE: Final = re.compile(r"0\.(\d+)(?:\.\d+)*(?:\.post\d+)?(?:\+.*)?")
_REMOVES_EACH: Final = 33
"""The last minor version of vLLM 0 that is known to remove each copy. What is built from its sources later may not."""


def removes_each_copy(version: str) -> bool:
    """Whether a vLLM of this version sends a removal for each copy of a block."""
    found = _RELEASE.fullmatch(version)
    return found is not None and int(found[1]) <= _REMOVES_EACH


class Observed(Protocol):
    """The sources, as the watch needs them."""

    config: Config
    streams: dict[int, SourceStream]
    relay: Relay


class EngineWatch:
    """Asks each engine whose ``api`` is known, one question at a time.

    Args:
        observed: the sources.
        feed: called with what kvbus learns about an engine, as an event.
    """

    def __init__(self, observed: Observed, feed: Callable[[RelayEvent], None]) -> None:
        self._observed = observed
        self._feed = feed
        self._versions: dict[int, tuple[str, int]] = {}
        """By slot, of which API and which epoch the version is known."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop asking."""
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
            await self._ask_version(client, name, base)
        except (aiohttp.ClientError, TimeoutError) as error:
            log.debug("source %s: %s does not answer: %s", name, base, error)
            return
        if not asleep:
            return
        for slot in self._slots(name):
            source = sources[slot]
            # what has come meanwhile may be of an engine that has just woken up
            if source.normalizer.entries and source.stats.batches == before.get(slot):
                log.info("source %s: its engine sleeps: its blocks are cleared", name, extra={"source": name})
                self._feed(EngineEmptied(slot))

    async def _ask_version(self, client: aiohttp.ClientSession, name: str, base: str) -> None:
        sources, streams = self._observed.relay.sources, self._observed.streams
        new = [
            slot
            for slot in self._slots(name)
            if streams[slot].duplicates == "detect"
            and self._versions.get(slot) != (base, sources[slot].sequencer.epoch)
        ]
        if not new:
            return
        epochs = {slot: sources[slot].sequencer.epoch for slot in new}
        said = await engine_api.version(client, base)
        each = removes_each_copy(said)
        for slot in set(new) & set(self._slots(name)):
            if sources[slot].sequencer.epoch == epochs[slot]:
                self._versions[slot] = (base, epochs[slot])
                meant = "removes each copy of a block" if each else "may remove a block once, with its last copy"
                log.info("source %s: its engine (%s) %s", name, said or "no version", meant, extra={"source": name})
                if each:
                    self._feed(CopiesRemovedEach(slot))
