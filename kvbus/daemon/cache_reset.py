"""``on_partial: reset``: an engine that kvbus knows in part is asked, by its own API, to empty its cache.

What a trimmed replay buffer no longer has cannot be had in any other way. vLLM offers ``POST /reset_prefix_cache``
(with ``VLLM_SERVER_DEV_MODE=1``), SGLang ``POST /flush_cache``. The engine announces the reset with AllBlocksCleared,
and that ends ``partial``; nothing here says so.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

import aiohttp

from kvbus.config import Config, SourceStream
from kvbus.core.events import ClearsEveryTier, RelayEvent
from kvbus.core.relay import Relay
from kvbus.core.sequencing.settings import State

log = logging.getLogger("kvbus.daemon.cache_reset")

DELAYS: Final = (0.0, 1.0, 2.0, 5.0, 15.0, 60.0)
"""Seconds before each attempt; an engine that is busy refuses, and one that starts does not answer yet."""

INTERVAL: Final = 300.0
"""Seconds between two resets of one engine: each costs it all its prefixes."""

TIMEOUT: Final = 10.0
_ABSENT: Final = (404, 405)


class Resettable(Protocol):
    """What of the daemon is needed."""

    config: Config
    streams: dict[int, SourceStream]
    relay: Relay

    def feed(self, event: RelayEvent) -> None:
        """Tell the relay."""


class CacheResets:
    """Looks for sources that are partial, and has one question open at each API at a time.

    Args:
        daemon: whose sources these are.
    """

    def __init__(self, daemon: Resettable) -> None:
        self._daemon = daemon
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._answered: dict[int, float] = {}
        """By slot: ``partial_since`` of the episode for which the engine has given its final answer."""
        self._not_before: dict[str, float] = {}

    def look(self) -> None:
        """Ask where it is due; called at each tick."""
        config = self._daemon.config
        if config.on_partial != "reset":
            return
        now = asyncio.get_running_loop().time()
        for slot, stream in self._daemon.streams.items():
            api = config.sources[stream.source_index].api
            if api is None or not self._wants(slot) or api in self._tasks or now < self._not_before.get(api, now):
                continue
            self._tasks[api] = asyncio.get_running_loop().create_task(self._reset(api))

    def _wants(self, slot: int) -> bool:
        source = self._daemon.relay.sources[slot]
        if source.partial_since is None or source.state is not State.LIVE or source.sequencer.backfill_pending:
            return False  # whole, not at rest, or what is missing may still come by a replay
        return self._answered.get(slot) != source.partial_since

    def _of(self, api: str) -> list[int]:
        config = self._daemon.config
        return [
            slot
            for slot, stream in self._daemon.streams.items()
            if config.sources[stream.source_index].api == api and self._wants(slot)
        ]

    async def _reset(self, api: str) -> None:
        try:
            for delay in DELAYS:
                await asyncio.sleep(delay)
                slots = self._of(api)
                if not slots:
                    return  # it has healed by itself
                outcome = await self._ask(api, slots)
                for slot in slots:
                    source = self._daemon.relay.sources[slot]
                    source.stats.cache_resets[outcome] += 1
                    log.log(
                        logging.INFO if outcome == "done" else logging.WARNING,
                        "source %s: cache reset asked of %s: %s", source.spec.label, api, outcome,
                    )  # fmt: skip
                if outcome in ("done", "unsupported"):
                    break
            for slot in self._of(api):
                since = self._daemon.relay.sources[slot].partial_since
                if since is not None:
                    self._answered[slot] = since
            self._not_before[api] = asyncio.get_running_loop().time() + INTERVAL
        finally:
            del self._tasks[api]

    async def _ask(self, api: str, slots: list[int]) -> str:
        """One attempt: ``done``, ``refused`` (busy, or an error), ``unsupported`` or ``unreachable``."""
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT)) as session:
                async with session.post(f"{api}/reset_prefix_cache") as answer:
                    if answer.status not in _ABSENT:
                        return "done" if answer.ok else "refused"
                async with session.get(f"{api}/get_model_info") as answer:
                    if not answer.ok:
                        return "unsupported"  # no SGLang: a vLLM without VLLM_SERVER_DEV_MODE
                for slot in slots:
                    self._daemon.feed(ClearsEveryTier(slot))
                async with session.post(f"{api}/flush_cache") as answer:
                    return "done" if answer.ok else "refused"
        except (aiohttp.ClientError, TimeoutError):
            return "unreachable"

    async def close(self) -> None:
        """Ask nothing more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
