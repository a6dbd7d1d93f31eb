"""A discoverer of streams in a log (Kafka, NATS or Redis), which also reads the streams' records.

One ``sources`` entry reads all streams that its patterns select. Each stream is an engine from its first record on. It
stops being an engine when its writer writes the stream's end, or when the log has had no record of the stream for
``LEASE_TTL`` seconds.

A reader that starts does not wait for ``LEASE_TTL`` to find out that a writer is gone. It compares two times, both by
the log's clock: the time of the stream's newest record, and the time of the newest record of all streams. If the
stream's time is much older, the stream is *stale*, and the reader treats its writer as gone. Clocks may be wrong, so
this is not final: after another record the stream is an engine again.

Routers get the records of a stream with seqs that :mod:`kvbus.parts.log.follower` computes from the numbers in the log.
So every kvbus that reads the log gives a record the same seq.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal, Self

from pydantic import model_validator

from kvbus.common.tasks import end_tasks
from kvbus.config.endpoints import parse_endpoint
from kvbus.config.logs import LogAccess, half
from kvbus.config.values import Endpoint, Text, key
from kvbus.core.events import LogReached, RecordReceived, RelayEvent
from kvbus.core.log_relay import EPOCH_BITS
from kvbus.parts.discovery.contract import DiscoveryError, Engine, Publisher, fitting_name
from kvbus.parts.log.contract import (
    FOREIGN_ID,
    FOREIGN_KEY,
    MAX_REFUSED,
    SAME_NAME,
    UNREADABLE_BATCH,
    UNREADABLE_POINTER,
    WRONG_TYPE,
    Log,
    Pointer,
    Reader,
    UnavailableError,
)
from kvbus.parts.log.follower import LEASE_TTL, OTHER_SCHEMA, LogStreamReader

logger = logging.getLogger("kvbus.discovery.streams")

LIST_SECONDS: Final = 2.0
"""Time in seconds between two reads of all pointers in the log, with which kvbus finds new streams."""

MEASURE: Final = 1.0
"""Time in seconds between two requests for the end of the log.

From the answers, kvbus computes how far its reading lags.
"""

READ_SECONDS: Final = 0.1
"""Maximum time in seconds for which one read waits for records.

It is also the minimum interval at which kvbus checks which streams belong to engines.
"""

RECORDS_A_SLICE: Final = 64
"""Number of records that are passed to the relay before other asyncio tasks may run."""


REFUSED: Final = {
    OTHER_SCHEMA: "has records of a schema that this version does not read: upgrade this kvbus or the writer",
    "malformed": "has records that cannot be read",
    "damaged": "has records whose checksum is wrong",
    UNREADABLE_POINTER: "has a pointer that cannot be read: the stream is not found until its writer's next state",
    UNREADABLE_BATCH: "is a batch that cannot be decoded: its records are missing",
    WRONG_TYPE: "is a key with another type of value: the stream is read once that key is deleted",
    FOREIGN_KEY: "is a key that no stream can have",
    FOREIGN_ID: "has a record that no kvbus has written: the stream is read once that record or the key is deleted",
    SAME_NAME: "would be a source of the same name as another stream: narrow cluster, model or worker of discover",
}
"""Reasons for which a stream or a record cannot be read, each with a text for the log line that names the stream.

Records that are dropped for any other reason are counted, but not logged.
"""


class StreamPatterns(LogAccess):
    """The configuration keys that say where a log is and which of its streams are read."""

    endpoint: Endpoint = key(
        ..., "A server of the log. With Redis and Valkey, the primary or a Sentinel.", example="tcp://kafka-0:9092"
    )
    cluster: Text = key("*", "Read streams of this cluster. `*` and `?` are wildcards.", example="eu-1")
    model: Text = key("*", "Read streams of this model. `*` and `?` are wildcards.", example="meta-llama/*")
    worker: Text = key(
        "*", "Read streams of this worker, `WORKER/SOURCE`. `*` and `?` are wildcards.", example="prod-*"
    )
    token_ids: Literal["keep", "drop"] = key(
        "drop",
        "keep: the log has token ids, because its writers have `outputs[].token_ids: keep`. drop: it has none.",
        example="keep",
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if parse_endpoint(self.endpoint).is_ipc:
            raise ValueError("endpoint: kvbus reaches a log only over TCP; for example tcp://kafka-0:9092")
        for name, wrong, _, example in half("", self):
            raise ValueError(f"{name.removeprefix('.')}: {wrong}; for example {example}")
        return self


@dataclass(frozen=True, slots=True)
class _OpenStream:
    """A stream of the log that is a source of the relay, with the functions that pass its records to the relay."""

    relayed: LogStreamReader
    feed: Callable[[RelayEvent], None]
    drained: Callable[[], None]
    ends: bool
    """Whether the stream's writer is gone, so that only the end of the stream is passed to the relay.

    The end is needed, because routers may have the stream's blocks, for example from another aggregator.
    """


def _key_of(endpoint: str) -> str:
    """Return the log key of the stream that an endpoint names. Such an endpoint ends with ``#KEY``."""
    return endpoint.rpartition("#")[2]


class LogStreams:
    """A reader of the streams in one log; see :class:`~kvbus.parts.discovery.contract.Carrier`.

    Each stream that has a running writer is an engine for kvbus. In the names of this class, *level* means that the
    reader has read everything that the log has.

    Args:
        make: function that opens the log.
        patterns: the patterns that select the streams.
        where: the log's address, as the operator sees it. An engine's endpoint is this address, ``#`` and the key of
            its stream.
    """

    give_up = LEASE_TTL
    stale = LEASE_TTL

    def __init__(self, make: Callable[[], Log], patterns: StreamPatterns, where: str) -> None:
        self._make = make
        self._patterns = patterns
        self._where = where
        self._relayed: dict[str, LogStreamReader] = {}
        self._slots: dict[int, _OpenStream] = {}
        self._listed: set[str] = set()
        """The keys of the streams in the set of engines that was yielded last.

        Records are passed to a source only if its stream is in this set. If it is not, the stream had ended, so routers
        have none of its blocks, and the daemon may remove the source at any time.
        """
        self._former: Counter[str] = Counter()
        """Counts by reason: refusals by the log, and records that were dropped in streams that the log no longer has.

        The follower of each present stream counts the dropped records of that stream.
        """
        self._refused: set[tuple[str, str]] = set()
        """Refusals that are already counted and logged.

        Each is a reason and the name of the refused stream or record.
        """
        self._dirty = True
        """Whether the log's reader has to be opened again, because streams were added or reading positions changed."""
        self._clock = asyncio.get_running_loop().time
        self._level_at = self._clock()
        """A time by the event loop's clock. This reader has read all records that the log had at this time."""
        self._shown_at = self._level_at
        """Time at which the set of engines was last yielded."""
        self._changed_at = 0.0
        """Time since which the set of engines differs from the set that was yielded last; 0 while the two are equal."""
        self._newest = 0.0
        """The latest time at which the log got a record of any stream, by the log's clock."""
        self._level_once = False
        """Whether this reader has read all records that the log had when reading began."""
        self.announced_at = -1.0
        """A time by the event loop's clock.

        Each stream that the log had at this time was yielded as an engine, or has ended.
        """
        self._ends: tuple[float, dict[str, int]] | None = None
        """The time at which the log was last asked for its end, and the end of each stream at that time, by stream key.

        A stream is removed from the dict once this reader has read it up to that end. The attribute is None if the
        reader has read all streams that far, or has not asked yet.
        """

    @property
    def counts(self) -> Counter[str]:
        """Number of records that were not passed to the relay, by reason.

        :class:`~kvbus.parts.log.follower.Follower` lists the reasons.
        """
        return sum((each.follower.counts for each in self._relayed.values()), self._former)

    @property
    def lag(self) -> float:
        """Maximum age in seconds of what the reader knows: it has read every record that the log had this long ago."""
        return self._clock() - self._level_at

    # -- sources -------------------------------------------------------------------------------------------------------

    def open(self, endpoint: str, slot: int, feed: Callable[[RelayEvent], None], drained: Callable[[], None]) -> None:
        """Begin to pass a stream's records to the relay, as those of the source number ``slot``.

        The records begin with the stream's newest state. If the stream's writer is gone, only the stream's end is
        passed.

        Args:
            endpoint: the endpoint of the engine that stands for the stream.
            slot: the number of the source in the relay.
            feed: function that passes one event to the relay.
            drained: function to call when all events that were available have been passed.
        """
        relayed = self._relayed.get(_key_of(endpoint))
        if relayed is None:
            return  # the log has erased the stream, and the next set of engines will not contain its engine
        opened = self._slots[slot] = _OpenStream(relayed, feed, drained, self._stale(relayed))
        relayed.slot = slot
        if not opened.ends:
            self._begin_again(relayed)

    def _begin_again(self, relayed: LogStreamReader) -> None:
        relayed.begin_again()
        self._dirty = True

    def close(self, slot: int) -> None:
        """Stop passing records to the relay's source with the number ``slot``."""
        if slot in self._slots:
            self._slots.pop(slot).relayed.slot = None

    def _reach(self, *, reached: bool) -> None:
        for slot, opened in self._slots.items():
            opened.feed(LogReached(slot, reached))

    # -- reading -------------------------------------------------------------------------------------------------------

    async def watch(self) -> AsyncGenerator[tuple[Engine, ...], None]:
        """Read the log, pass its records to the relay, and yield the set of engines after each change.

        Each stream with a running writer is an engine.

        Raises:
            DiscoveryError: the log cannot be reached.
        """
        log = self._make()
        looking: asyncio.Task[None] | None = None
        reader: Reader | None = None
        try:
            self._learn(await log.pointers(), log)
            looking = asyncio.get_running_loop().create_task(self._look(log))
            self._dirty = True
            shown: tuple[Engine, ...] | None = None
            looked_at = -READ_SECONDS
            while True:
                if self._dirty:
                    self._dirty = False
                    if reader is not None:
                        await reader.close()
                    starts = {name: each.position for name, each in self._relayed.items()}
                    reader = await log.read(starts) if starts else None
                    self._ends = None
                if looking.done():
                    looking.result()
                if reader is None:
                    self._level_at, self._level_once = self._clock(), True
                    await asyncio.sleep(READ_SECONDS)
                else:
                    await self._take(reader)
                    await self._measure(reader)
                if self._clock() - looked_at < READ_SECONDS:
                    continue  # check the streams rarely, because a check takes as long as reading many records
                looked_at = self._clock()
                self._expire()
                self._reach(reached=True)
                level_at = self._level_at
                engines = self._engines(log)
                if engines == shown:
                    self._changed_at = 0.0
                else:
                    self._changed_at = self._changed_at or looked_at
                # Yield an empty set only after everything is read. Until then, streams may exist that were not read
                # yet.
                level = reader is None or level_at >= self._changed_at
                if engines != shown and (level or (engines and self._waited())):
                    shown = engines
                    names = {_key_of(publisher.endpoint) for engine in engines for publisher in engine.publishers}
                    self._listed &= names
                    yield engines
                    self._list(names)
                    self._shown_at = self._clock()
                if engines == shown:
                    self.announced_at = level_at
        except UnavailableError as error:
            self._reach(reached=False)
            raise DiscoveryError(f"{self._where}: {error}") from error
        finally:
            try:
                await end_tasks([looking])
            finally:
                if reader is not None:
                    await reader.close()

    def _list(self, names: set[str]) -> None:
        """Set the streams whose records are passed to the relay. ``names`` has their keys.

        If a stream is new in this set, the relay first needs the earlier records of the stream, so the log is read
        again.
        """
        self._dirty |= any(opened.relayed.key in names - self._listed for opened in self._slots.values())
        self._listed = names

    def _withholds(self, relayed: LogStreamReader) -> bool:
        """Return whether a record of this stream must not be passed to the relay yet.

        This is the case if the stream is a source, but was not in the set of engines that was yielded last. The stream
        will be in the next set. The log is then read again, and the record is passed.
        """
        if relayed.slot is None or relayed.key in self._listed:
            return False
        relayed.ended = False
        relayed.follower.heard = self._clock()
        return True

    async def _look(self, log: Log) -> None:
        while True:
            await asyncio.sleep(LIST_SECONDS)
            self._learn(await log.pointers(), log)

    def _refuse(self, log: Log) -> None:
        """Count and log the streams and records of the log that cannot be read.

        Pointers are read again and again, but each pair of reason and name is counted and logged only once.
        """
        if len(self._refused) > MAX_REFUSED:
            self._refused.clear()
        found: dict[str, list[str]] = {}
        for refusal in log.refused:
            if refusal not in self._refused:
                self._refused.add(refusal)
                self._former[refusal[0]] += 1
                found.setdefault(refusal[0], []).append(refusal[1])
        log.refused.clear()
        for name, each in self._relayed.items():
            for reason in REFUSED.keys() & each.follower.counts.keys():
                if (reason, name) not in self._refused:
                    self._refused.add((reason, name))
                    found.setdefault(reason, []).append(name)
        for reason, names in found.items():
            text = "%s: %r %s; %d others, too"
            logger.error(text, self._where, names[0], REFUSED[reason], len(names) - 1)

    def _learn(self, pointers: dict[str, Pointer], log: Log) -> None:
        for name, pointer in pointers.items():
            relayed = self._relayed.get(name)
            if relayed is not None:
                relayed.pointer = pointer
                if relayed.misses_state:
                    self._begin_again(relayed)
            elif self._wanted(name, pointer, log):
                self._dirty = True
        for name in [name for name, each in self._relayed.items() if name not in pointers and each.slot is None]:
            self._former.update(self._relayed.pop(name).follower.counts)
        self._refuse(log)

    def _wanted(self, name: str, pointer: Pointer, log: Log) -> bool:
        try:
            relayed = LogStreamReader(name, pointer)
        except ValueError:
            log.refused.append((FOREIGN_KEY, name))
            return False
        patterns, stream = self._patterns, relayed.stream
        fits = (
            fnmatchcase(stream.cluster, patterns.cluster)
            and fnmatchcase(stream.model, patterns.model)
            and fnmatchcase(stream.worker, patterns.worker)
        )
        if fits:
            self._relayed[name] = relayed
        return fits

    def _alive(self, relayed: LogStreamReader) -> bool:
        """Return whether a stream is an engine.

        A stale stream is not an engine at first: its newest record was already old when reading began. If this reader
        then sees no record of the stream for :data:`LEASE_TTL`, the stream becomes an engine, so that its end can be
        passed to the relay: routers may have its blocks from another aggregator. After its end, it is not an engine.
        """
        if relayed.ended or relayed.slot is not None:
            return not relayed.ended
        return relayed.follower.epoch > 0 and (not self._stale(relayed) or self._silent(relayed))

    def _stale(self, relayed: LogStreamReader) -> bool:
        """Return whether the newest record of a stream is much older than the newest record of all streams.

        If so, the stream's writer is treated as gone. The result is False if the stream is a source of the relay, or if
        one of its records came after this reader had caught up with the log.
        """
        unknown = relayed.slot is None and not relayed.alive
        return unknown and self._newest - relayed.written >= self.stale

    def _silent(self, relayed: LogStreamReader) -> bool:
        """Return whether this reader has seen no record of a stream for :data:`LEASE_TTL`, by its own clock.

        The writer is then gone, and the stream's blocks are void.
        """
        return self._level_at - relayed.follower.heard >= self.give_up

    def _engines(self, log: Log) -> tuple[Engine, ...]:
        """Return the engines: one for each stream whose writer is running.

        If several streams have the same engine name, only the one with the newest epoch may become an engine, even
        after it has ended. A stream with an older epoch has lower seqs, so the seqs that routers get would decrease.
        """
        newest: dict[str, LogStreamReader] = {}
        found: dict[str, tuple[str, Engine]] = {}
        for name, relayed in sorted(self._relayed.items(), key=lambda each: (-each[1].turn, each[0])):
            engine = self._engine(relayed)
            first = newest.setdefault(engine.name, relayed)
            if first is not relayed:
                first.floor = max(first.floor, relayed.turn)
            if not self._alive(relayed):
                continue
            if engine.name not in found and (first is relayed or relayed.slot is not None):
                found[engine.name] = name, engine
            elif (SAME_NAME, name) not in self._refused:
                log.refused.append((SAME_NAME, name))
        return tuple(engine for _, engine in sorted(found.values(), key=lambda each: each[0]))

    def _engine(self, relayed: LogStreamReader) -> Engine:
        stream = relayed.stream
        name = fitting_name(f"{stream.worker.replace('/', '.')}.{stream.rank}")
        return Engine(name, (Publisher(stream.rank, f"{self._where}#{relayed.key}"),), self._where)

    async def _take(self, reader: Reader) -> None:
        entries = await reader.take(READ_SECONDS)
        if self._dirty:
            return  # a stream is to be read again, and the next reader will deliver these records again
        for at, entry in enumerate(entries, 1):
            relayed = self._relayed.get(entry.key)
            if relayed is not None:
                self._note(relayed, entry.time)
                if self._dirty:
                    return
                if not self._withholds(relayed):
                    self._feed(relayed, relayed.take(entry.data, entry.position, self._clock()))
            if at % RECORDS_A_SLICE == 0:
                self._drain()
                await asyncio.sleep(0)
                if self._dirty:
                    return
        self._drain()

    def _note(self, relayed: LogStreamReader, written: float) -> None:
        """Note the time at which the log got a record of a stream.

        If the record came after this reader had caught up with the log, the stream's writer is running. If this reader
        had assumed that the writer is gone, the stream is then read again from its newest state.
        """
        # Limit the record's time to the present. Otherwise, if one writer's clock is ahead, all other streams would
        # become stale.
        self._newest = max(self._newest, min(written, time.time()))
        relayed.written = written
        if self._level_once and not relayed.alive:
            relayed.alive = True
            if relayed.slot is not None and self._slots[relayed.slot].ends:
                self._begin_again(relayed)

    def _feed(self, relayed: LogStreamReader, event: RecordReceived | None) -> None:
        if event is None or event.seq >> EPOCH_BITS < relayed.floor:
            return
        if relayed.slot is not None and relayed.key in self._listed:
            self._slots[relayed.slot].feed(event)

    def _drain(self) -> None:
        for opened in list(self._slots.values())[:1]:
            opened.drained()

    def _waited(self) -> bool:
        """Return whether it is time to yield the new engines, although this reader has not caught up with the log.

        After each new source, the records since its newest state have to be read again. So during a long read, new
        engines are collected and yielded together. Between two such yields, at least :data:`LIST_SECONDS` seconds pass,
        and at least half of the present :attr:`lag`.
        """
        return self._clock() - self._shown_at >= max(LIST_SECONDS, self.lag / 2)

    async def _measure(self, reader: Reader) -> None:
        """Find out up to which time this reader has read the log.

        At intervals, ask the log for the end of each stream, and remember the time at which it was asked. In later
        calls, check whether this reader has read every stream up to that end. If so, it has read the log up to the
        remembered time.
        """
        if self._dirty:
            return  # the log has to be read again for some stream, so the relay does not have all records
        if self._ends is None and (self._level_at < self._changed_at or self._clock() - self._level_at >= MEASURE):
            self._ends = self._clock(), await reader.ends()
        if self._ends is None:
            return
        at, ends = self._ends
        while ends:
            name, end = next(iter(ends.items()))
            if await reader.reached(name) < end:
                return
            del ends[name]
        self._level_at, self._ends = at, None
        self._level_once = True

    def _expire(self) -> None:
        """Abandon the epochs of streams whose writers have been silent for :data:`LEASE_TTL`, and remove their blocks.

        A silence is the time from the writer's last record to the time up to which this reader has read the log. It
        does not last until the present, because a slow reader would then abandon a running writer. If this reader
        begins to read the stream of a source again from its newest state, the silence continues until the next record,
        because the relay may still have the source's blocks.
        """
        for each in self._relayed.values():
            if self._alive(each) and self._silent(each) and not self._stale(each):
                self._feed(each, each.give_up())
        self._drain()
