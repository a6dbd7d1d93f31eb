"""Discovery while the daemon runs: ask the discoverers for engines, and make the found engines sources.

Each ``sources`` entry with ``discover`` has a discoverer, and a task that follows it. A discoverer that fails is asked
again after growing pauses, and the engines that it found before remain sources. Another task applies the found engines
to the daemon's sources, one change at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Final

from kvbus.common.errors import KvbusError
from kvbus.common.tasks import end_tasks, report_out_of_memory
from kvbus.config import Config, SourceConfig, SourceStream, parts
from kvbus.core.sequencing.phases import SEPARATED
from kvbus.daemon.changing import Change, ChangingHost, change_to
from kvbus.daemon.found import LEFT_OUT, FoundFile, Listed, Outcome, with_found
from kvbus.daemon.keys import read_keys
from kvbus.parts.discovery.contract import Carrier, Discoverer, DiscoveryError, Engine, Services
from kvbus.telemetry.readings import DiscoveryStats

log = logging.getLogger("kvbus.daemon.discovery")

FIRST_PAUSE: Final = 0.5
LAST_PAUSE: Final = 30.0
"""Longest pause in seconds before a failed discoverer is asked again.

The first pause is FIRST_PAUSE. The pause doubles after each failure. A refused change of the sources is tried again
after LAST_PAUSE, too.
"""


class Entry:
    """A ``sources`` entry with ``discover``: its discoverer, the engines that it has found, and its counters.

    Args:
        source: the entry of the configuration.
    """

    def __init__(self, source: SourceConfig) -> None:
        self.source = source
        self.known = False
        """Whether the discoverer has listed its engines at least once."""
        self.found = Listed()
        self.stats = DiscoveryStats(source.name, dict.fromkeys(LEFT_OUT, 0))
        self.disconnected = asyncio.Event()
        self.discoverer = discoverer_of(source, self.disconnected)
        self.task: asyncio.Task[None] | None = None


def discoverer_of(source: SourceConfig, disconnected: asyncio.Event) -> Discoverer:
    """Create the discoverer of a ``sources`` entry.

    Args:
        source: the entry.
        disconnected: an event that the daemon sets when an engine of this discoverer has lost its connection.
    """
    ((kind, settings),) = (source.discover or {}).items()
    cls: type[Discoverer] = parts.load(parts.DISCOVERY, kind)
    return cls(cls.Settings.model_validate(settings), Services(source.name, source.data_parallel_size, disconnected))


class Discovery:
    """The discovery of a daemon: it follows all discoverers, and changes the daemon's sources to the found engines.

    Args:
        daemon: the daemon with the sources.
        config: the configuration without found engines.
    """

    def __init__(self, daemon: ChangingHost, config: Config) -> None:
        self._daemon = daemon
        self._loop = asyncio.get_running_loop()
        self._entries = {source.name: Entry(source) for source in config.sources if source.discover is not None}
        self.left_out: Mapping[tuple[str, str], str] = {}
        """Reasons why found engines are not sources, by the name of the ``sources`` entry and the engine's name."""
        self._changed = asyncio.Event()
        self._applying: asyncio.Task[None] | None = None
        self._away: set[int] = set()
        self._refusal = ""
        self._file: FoundFile | None = None
        self._settled_at = self._loop.time()
        """Time in seconds at which the daemon's sources last became equal to the found engines.

        It is infinite while a change of the sources is pending.
        """
        self.level = not self._carried
        """Whether kvbus has once read every log of its sources to the log's end. Without such a log it is True.

        kvbus is ready for routers only if it is True.
        """

    @property
    def _carried(self) -> list[tuple[Entry, float]]:
        """The ``sources`` entries whose streams come from a log, each with the lag of its reader in seconds."""
        return [(each, each.discoverer.lag) for each in self._entries.values() if isinstance(each.discoverer, Carrier)]

    @property
    def stats(self) -> list[DiscoveryStats]:
        """The counters of each ``sources`` entry that has a discoverer."""
        for entry in self._entries.values():
            if isinstance(entry.discoverer, Carrier):
                entry.stats.records, entry.stats.lag = entry.discoverer.counts, entry.discoverer.lag
        return [entry.stats for entry in self._entries.values()]

    def carrier(self, stream: SourceStream) -> Carrier | None:
        """Return the discoverer that delivers a source's batches (for example from a log); None for other sources."""
        entry = self._entries.get(stream.found.partition(":")[0])
        return entry.discoverer if entry is not None and isinstance(entry.discoverer, Carrier) else None

    def begin_with(self, file: FoundFile) -> None:
        """Use the engines that an earlier process has found, and store the found engines in ``file`` from now on."""
        self._file = file
        for name, engines in file.read().items():
            if name in self._entries:
                self._entries[name].found.take(engines, 0.0)

    def start(self) -> None:
        """Start asking the discoverers for engines."""
        if self._entries:
            self._applying = self._loop.create_task(self._apply_changes())
        for entry in self._entries.values():
            self._follow(entry)

    async def close(self) -> None:
        """Stop asking the discoverers, and stop changing the sources."""
        tasks = [entry.task for entry in self._entries.values()]
        await end_tasks([*tasks, self._applying])

    def look(self) -> None:
        """Check whether all logs have been read, and wake each discoverer that has a newly disconnected engine."""
        if not self._entries:
            return
        if not self.level:
            now = self._loop.time()
            self.level = all(each.known and now - lag > self._settled_at for each, lag in self._carried)
        away = {
            slot
            for slot, stream in self._daemon.streams.items()
            if stream.found and self._daemon.relay.sources[slot].sequencer.phase in SEPARATED
        }
        for slot in away - self._away:
            entry = self._entries.get(self._daemon.streams[slot].found.partition(":")[0])
            if entry is not None:
                entry.disconnected.set()
        self._away = away

    @property
    def found(self) -> dict[str, Listed]:
        """The engines that each ``sources`` entry has found, by the entry's name."""
        return {name: entry.found for name, entry in self._entries.items()}

    def preview(self, config: Config) -> Config:
        """Return a configuration in which the engines found so far are sources."""
        return with_found(config, self.found, self._present).config

    @property
    def _present(self) -> set[str]:
        return {stream.label for stream in self._daemon.streams.values()}

    # -- asking the discoverers for engines ----------------------------------------------------------------------------

    def _follow(self, entry: Entry) -> None:
        entry.task = self._loop.create_task(self._ask(entry))

    async def _ask(self, entry: Entry) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                async with contextlib.aclosing(entry.discoverer.watch()) as sets:
                    async for engines in sets:
                        pause = FIRST_PAUSE
                        self._take(entry, engines)
                why = "the discoverer has stopped without an error"
            except DiscoveryError as error:
                why = str(error)
            except Exception as error:
                report_out_of_memory(error)
                log.exception("discovery %s: a defect", entry.source.name)
                why = "a defect, see the log"
            self._fail(entry, why)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    def _take(self, entry: Entry, engines: Sequence[Engine]) -> None:
        stats, name = entry.stats, entry.source.name
        if stats.failing or not entry.known:
            log.info("discovery %s: %d engines found", name, len(engines), extra={"discovery": name})
        stats.failing = ""
        entry.known = True
        stats.engines = len(engines)
        entry.found.take(engines, self._loop.time() + self._daemon.configured.discovery_grace)
        self._settled_at = math.inf
        self._changed.set()

    def _fail(self, entry: Entry, why: str) -> None:
        stats, name = entry.stats, entry.source.name
        stats.failures += 1
        if why != stats.failing:
            text = "discovery %s fails, and kvbus keeps the engines found before: %s"
            log.warning(text, name, why, extra={"discovery": name})
        stats.failing = why

    # -- changing the sources ------------------------------------------------------------------------------------------

    async def _apply_changes(self) -> None:
        while True:
            due = min((at for entry in self._entries.values() for at in entry.found.leaving.values()), default=None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._changed.wait()
            self._changed.clear()
            async with self._daemon.changing:
                try:
                    await self._apply()
                except Exception as error:
                    report_out_of_memory(error)
                    # Continue after any exception, because the defect may be in a third-party discoverer.
                    if self._put_off(f"a defect, {error!r}"):
                        log.exception("discovery: the defect")
            if not self._changed.is_set() and not self._refusal:
                self._settled_at = self._loop.time()

    async def _apply(self) -> None:
        """Change the daemon's sources to the engines that the discoverers have found."""
        daemon = self._daemon
        for entry in self._entries.values():
            entry.found.leave(self._loop.time())
        outcome = with_found(self._daemon.configured, self.found, self._present)
        self._show_left_out(outcome.left_out)
        try:
            change = change_to(daemon.config, outcome.config, daemon.source_sockets.is_open, daemon.placement)
            if not (change.added or change.changed or change.removed or change.moved):
                self._refusal = ""
                return
            keys = await asyncio.to_thread(read_keys, outcome.config)
            if self._changed.is_set():
                return  # a newer list has come, and may contain an engine that this change would remove
            before = daemon.streams
            await daemon.changes.apply(change, keys)
        except KvbusError as error:
            self._put_off(str(error))
            return
        self._refusal = ""
        self._keep(outcome)
        self._report(change, before)

    def _put_off(self, why: str) -> bool:
        """Count a refused change of the sources, and schedule the next attempt.

        Args:
            why: the reason, as a text for the log.

        Returns:
            Whether the reason differs from that of the previous attempt.
        """
        news, self._refusal = why != self._refusal, why
        if news:
            log.error("discovery: the engines found cannot become sources yet: %s", why)
        for entry in self._entries.values():
            entry.stats.changes["refused"] += 1
        self._loop.call_later(LAST_PAUSE, self._changed.set)
        return news

    def _keep(self, outcome: Outcome) -> None:
        """Store the found engines that have become sources.

        The next process needs them, because the state on disk is the state of these sources.
        """
        if self._file is not None:
            found = {
                name: [engine for engine in entry.found.engines.values() if (name, engine.name) not in outcome.left_out]
                for name, entry in self._entries.items()
            }
            self._file.keep(found)

    def _report(self, change: Change, before: dict[int, SourceStream]) -> None:
        """Log and count the sources that were added, removed or moved by a change.

        Args:
            change: the change, which is done.
            before: the streams of the sources before the change, by slot.
        """
        streams = self._daemon.streams
        done = [("left", before[slot]) for slot in (*change.removed, *(stream.index for stream in change.changed))]
        done += [("joined", streams[stream.index]) for stream in change.replaced]
        done += [("moved", streams[stream.index]) for stream in change.moved]
        for what, stream in done:
            name = stream.found.partition(":")[0]
            if name in self._entries:
                self._entries[name].stats.changes[what] += 1
                text = "discovery %s: source %s has %s, %s (%s)"
                fields = {**stream.log_fields, "discovery": name}
                log.info(text, name, stream.label, what, stream.endpoint, stream.found, extra=fields)

    def _show_left_out(self, left_out: Mapping[tuple[str, str], str]) -> None:
        self.left_out = left_out
        for name, entry in self._entries.items():
            for reason in LEFT_OUT:
                entry.stats.left_out[reason] = sum(each == reason for (of, _), each in left_out.items() if of == name)
