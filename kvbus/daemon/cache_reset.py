"""``on_partial: reset``: ask an engine to empty its cache where kvbus does not know all of it.

The engine's AllBlocksCleared then comes along the stream, and after it kvbus knows every block. The relay finds that
out by itself, whoever asked for the reset. This module only decides when to ask. While a source is partial, all its
ranks together, it asks once for each of :data:`PAUSES`. It waits first for a backfill that is still pending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final, Protocol

import aiohttp

from kvbus.common.tasks import end_tasks
from kvbus.config import Config, SourceStream
from kvbus.core.events import CacheResetTried, ClearsEveryTier, RelayEvent
from kvbus.core.relay import Relay
from kvbus.core.sequencing.settings import State
from kvbus.core.source import Source
from kvbus.core.types import CacheReset
from kvbus.transport import engine_api

log = logging.getLogger("kvbus.daemon.cache_reset")

PAUSES: Final = (5.0, 10.0, 20.0, 40.0, 80.0)
"""Seconds to wait for the clear after each try."""


class Observed(Protocol):
    """The state that decides when to ask."""

    config: Config
    streams: dict[int, SourceStream]
    relay: Relay


class CacheResets:
    """Asks engines to reset their caches.

    Args:
        observed: the sources.
        feed: called with what kvbus learns about an engine, as an event.
    """

    def __init__(self, observed: Observed, feed: Callable[[RelayEvent], None]) -> None:
        self._observed = observed
        self._feed = feed
        self._episodes: dict[str, asyncio.Event] = {}
        """By the name of a partial source; set when the source is no longer partial."""
        self._tasks: set[asyncio.Task[None]] = set()

    def look(self) -> None:
        """Begin to ask where a source has become partial, and stop where it no longer is."""
        if self._observed.config.on_partial != "reset":
            return
        partial = {config.name: self._partial(config.name) for config in self._observed.config.sources}
        for name in [name for name in self._episodes if not partial.get(name)]:
            self._episodes.pop(name).set()
        for name, slots in partial.items():
            if name not in self._episodes and any(self._is_ripe(self._source(slot)) for slot in slots):
                whole = self._episodes[name] = asyncio.Event()
                task = asyncio.get_running_loop().create_task(self._heal(name, whole))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop asking."""
        await end_tasks(self._tasks)

    def _source(self, slot: int) -> Source:
        return self._observed.relay.sources[slot]

    def _partial(self, name: str) -> list[int]:
        """Return the slots of a source's partial ranks."""
        config = self._observed.config
        return [
            slot
            for slot, stream in self._observed.streams.items()
            if config.sources[stream.source_index].name == name and self._source(slot).sequencer.partial
        ]

    def _is_ripe(self, source: Source) -> bool:
        return source.state is State.LIVE and not source.sequencer.backfill_pending

    async def _heal(self, name: str, whole: asyncio.Event) -> None:
        for pause in PAUSES:
            slots = self._partial(name)
            base = next((config.api for config in self._observed.config.sources if config.name == name), None)
            if base is None or not slots:
                return
            outcome = await self._ask(name, base, slots)
            for slot in slots:
                self._feed(CacheResetTried(slot, outcome))
            if outcome is CacheReset.FUTILE:
                return
            before = self._batches(slots)
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await whole.wait()
                        return
                if outcome is not CacheReset.ACCEPTED or self._batches(slots) != before:
                    break  # an idle engine reports its reset with its next batch
        log.warning(
            "source %s is still partial after %d tries: kvbus asks its engine no more",
            name,
            len(PAUSES),
            extra={"source": name},
        )

    def _batches(self, slots: list[int]) -> int:
        return sum(self._source(slot).stats.batches for slot in slots)

    async def _ask(self, name: str, base: str, slots: list[int]) -> CacheReset:
        try:
            async with engine_api.session() as client:
                kind = await engine_api.kind_of(client, base)
                if kind is engine_api.Kind.SGLANG:
                    for slot in slots:
                        self._feed(ClearsEveryTier(slot))
                if not any(self._source(slot).normalizer.clears.empty for slot in slots):
                    log.warning(
                        "source %s is partial, and a reset would leave other tiers unknown: not asked for",
                        name,
                        extra={"source": name},
                    )
                    return CacheReset.FUTILE
                await engine_api.reset(client, base, kind)
        except engine_api.RefusedError as error:
            log.warning(
                "source %s is partial, and its engine does not reset its cache: %s", name, error, extra={"source": name}
            )
            return CacheReset.REFUSED
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            log.warning("source %s is partial, and %s does not answer: %s", name, base, reason, extra={"source": name})
            return CacheReset.UNREACHABLE
        text = "source %s is partial: kvbus asked its engine to reset its cache (%s%s)"
        log.info(text, name, base, kind, extra={"source": name})
        return CacheReset.ACCEPTED
