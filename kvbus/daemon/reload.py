"""Another configuration for a running daemon: sources come, go and change, keys change, everything else stays.

A configuration that is bad, or asks for more than can be changed, is refused as a whole with everything that is wrong
with it, and the one before goes on. What a change does not touch, it does not touch: other sources keep their sockets,
their sequence and their state, their routers notice nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from kvbus.config import Config, SourceStream
from kvbus.core.events import SourceDown
from kvbus.daemon.build import add_reservation, new_stream, source_spec
from kvbus.daemon.daemon import Daemon
from kvbus.daemon.keys import Keys, output_domain, read_keys, source_domain
from kvbus.daemon.outputs import allow
from kvbus.errors import BindError, ConfigError, KvbusError, Problem
from kvbus.transport.curve import Curve

log = logging.getLogger("kvbus.daemon.reload")

RELOADABLE: Final = frozenset({"sources", "log_level", "shutdown_timeout", "key_reload_interval"})
"""Keys that a reload may change; everything else takes a restart."""

AGAIN: Final = 0.01
"""Seconds until an address that was just given up is tried again."""

ATTEMPTS: Final = 200


class Reloader:
    """Changes what a daemon runs.

    Args:
        daemon: the daemon.
        load: reads the configuration; called in a thread.
    """

    def __init__(self, daemon: Daemon, load: Callable[[], Config]) -> None:
        self._daemon = daemon
        self._load = load
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._key_problem = ""

    def reload(self) -> None:
        """Load the configuration and its key files again, soon."""
        self._begin(self._reload())

    def watch(self) -> None:
        """Look at the key files every ``key_reload_interval``."""
        self._begin(self._watch())

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Change nothing any more."""
        for task in list(self._tasks):
            task.cancel()

    async def _reload(self) -> None:
        daemon = self._daemon
        async with self._lock:
            try:
                config = await asyncio.to_thread(self._load)
                keys = await asyncio.to_thread(read_keys, config)
                refuse(daemon.config, config)
                await self._apply(config, keys)
            except KvbusError as error:
                daemon.process.config_reloads["refused"] += 1
                log.error("configuration refused, the one before stays in force: %s", error)  # noqa: TRY400 - a mistake of the file's
            else:
                daemon.process.config_reloads["applied"] += 1
                log.info("configuration loaded: %d sources", len(config.sources))

    async def _watch(self) -> None:
        daemon = self._daemon
        while True:
            await asyncio.sleep(daemon.config.key_reload_interval or 1.0)
            if daemon.config.key_reload_interval and daemon.started and daemon.keys:
                async with self._lock:
                    await self._look_at_keys()

    async def _look_at_keys(self) -> None:
        daemon = self._daemon
        try:
            keys = await asyncio.to_thread(read_keys, daemon.config)
        except ConfigError as error:
            if str(error) != self._key_problem:
                self._key_problem = str(error)
                daemon.process.key_reloads["refused"] += 1
                log.error("key files refused, the keys before stay in force: %s", error)  # noqa: TRY400 - a mistake of the files'
            return
        self._key_problem = ""
        if keys != daemon.keys:
            await self._apply_keys(keys, frozenset())
            daemon.process.key_reloads["applied"] += 1

    async def _apply(self, config: Config, keys: Keys) -> None:
        daemon = self._daemon
        old, new = daemon.streams, {stream.index: stream for stream in config.streams()}
        added = [new[slot] for slot in new if slot not in old]
        removed = [slot for slot in old if slot not in new]
        changed = [
            stream
            for slot, stream in new.items()
            if slot in old and not (_same(old[slot], stream) and daemon.source_sockets.is_open(slot))
        ]
        before, daemon.config = daemon.config, config
        try:
            self._open_streams(added)
        except KvbusError:
            daemon.config = before
            raise
        daemon.streams = new
        for slot in removed:
            self._remove(slot)
        for stream in (*changed, *added):
            daemon.source_sockets.close(stream.index)
            self._place(stream)
        fresh = frozenset(stream.index for stream in (*changed, *added))
        await self._apply_keys(keys, fresh)
        for slot in fresh:
            await self._open_source(new[slot])
        if fresh or removed:
            if daemon.state is not None:
                daemon.catch_up()
                daemon.state.rename(daemon.identity())
            log.info("sources: %d added, %d changed, %d removed", len(added), len(changed), len(removed))
        logging.getLogger().setLevel(config.log_level.upper())

    def _open_streams(self, added: list[SourceStream]) -> None:
        """The streams of new sources, all or none."""
        daemon, opened = self._daemon, []
        try:
            for number, output in enumerate(daemon.config.outputs):
                if output.layout == "merged":
                    continue
                for stream in added:
                    add_reservation(daemon.reservations, daemon.config, number, stream.index)
                    daemon.outputs.drivers[number].open(stream.index, daemon.output_policy(number))
                    opened.append((number, stream.index))
        except BaseException:
            for number, at in opened:
                daemon.outputs.drivers[number].close(at)
            raise

    def _remove(self, slot: int) -> None:
        daemon = self._daemon
        daemon.source_sockets.close(slot)
        daemon.carry_out(daemon.relay.remove(slot, daemon.clock.time()))
        for number, output in enumerate(daemon.config.outputs):
            if output.layout != "merged":
                daemon.outputs.drivers[number].close(slot, daemon.config.shutdown_timeout)

    def _place(self, stream: SourceStream) -> None:
        daemon, config, streams = self._daemon, self._daemon.config, []
        for number, output in enumerate(config.outputs):
            if output.layout == "merged":
                streams.append(new_stream(config, output, stream, 0))
                continue
            first = daemon.reservations.first(number, stream.index)
            streams.append(new_stream(config, output, stream, first))
        commands = daemon.relay.place(stream.index, source_spec(config, stream), streams, daemon.clock.time())
        daemon.carry_out(commands)

    async def _apply_keys(self, keys: Keys, fresh: frozenset[int]) -> None:
        """Take other keys: whoever must show a key again is made to, everyone else stays connected.

        Args:
            keys: all of them.
            fresh: slots whose sockets are about to be opened anyway.
        """
        daemon = self._daemon
        before, daemon.keys = daemon.keys, keys
        allow(daemon.zap, keys)
        for domain in before.keys() - keys.keys():
            daemon.zap.forget(domain)
        for number, output in enumerate(daemon.config.outputs):
            domain = output_domain(output.name)
            if _shake_again(before.get(domain), keys.get(domain)):
                log.info("output %s: keys changed or removed, every router has to connect again", output.name)
                daemon.outputs.drivers[number].reopen(daemon.output_policy(number))
        for slot, stream in daemon.streams.items():
            domain = source_domain(daemon.config.sources[stream.source_index].name)
            if slot not in fresh and _shake_again(before.get(domain), keys.get(domain)):
                log.info("source %s: keys changed or removed, connecting again", stream.label)
                daemon.carry_out(daemon.relay.handle(SourceDown(slot), daemon.clock.time()))
                daemon.source_sockets.close(slot)
                await self._open_source(stream)

    async def _open_source(self, stream: SourceStream) -> None:
        """Open a source's socket; its address may be one that was given up a moment ago.

        One that somebody else holds leaves this source without a connection, until a later reload finds it free.
        """
        daemon = self._daemon
        for _ in range(ATTEMPTS):
            try:
                daemon.source_sockets.open(stream, daemon.source_policy(stream))
            except BindError as error:
                reason = error
            else:
                return
            await asyncio.sleep(AGAIN)
        log.error("source %s is not connected: %s; reload again once the address is free", stream.label, reason)


def _same(one: SourceStream, other: SourceStream) -> bool:
    """The same publisher, wherever it stands in the list."""
    return replace(one, source_index=0) == replace(other, source_index=0)


def _shake_again(before: Curve | None, now: Curve | None) -> bool:
    """Whether those who are connected must show their keys again: unless all that changed is that more are let in."""
    if before is None or now is None:
        return before is not now
    return replace(before, clients=now.clients) != now or not before.clients <= now.clients


def refuse(running: Config, wanted: Config) -> None:
    """Look for what a reload cannot change.

    Raises:
        ConfigError: naming every such key.
    """
    problems = [
        Problem(key, "cannot change without a restart", None if value is None else str(value))
        for key, value in _differences(running.to_dict(), wanted.to_dict())
    ]
    places = {stream.label: stream.index for stream in running.streams()}
    for stream in wanted.streams():
        before = places.get(stream.label, stream.index)
        if before != stream.index:
            first = before - stream.rank
            problems.append(
                Problem(
                    f"sources[{stream.source_index}].slot",
                    f"{stream.label} would move from slot {before} to {stream.index}, and its ports with it",
                    example=f"slot: {first}",
                )
            )
    if problems:
        raise ConfigError(problems)


def _differences(running: dict[str, Any], wanted: dict[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in wanted.items():
        before = running[name]
        if name in RELOADABLE or before == value:
            continue
        if isinstance(value, dict):
            found += [(f"{name}.{key}", each) for key, each in value.items() if each != before[key]]
        elif name == "outputs" and len(value) == len(before):
            for i, (one, other) in enumerate(zip(before, value, strict=True)):
                found += [(f"outputs[{i}].{key}", each) for key, each in other.items() if each != one[key]]
        else:
            found.append((name, f"{len(value)} outputs, not {len(before)}" if name == "outputs" else value))
    return found
