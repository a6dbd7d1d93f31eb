"""Tests for a kvbus that reads a log for routers (an aggregator): each router holds the engine's blocks.

A router may change from one aggregator to another at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

import pytest

from kvbus.common.errors import KvbusError
from kvbus.config import load
from kvbus.core.log_relay import EPOCH_BITS, LAST
from kvbus.daemon.daemon import Daemon
from kvbus.parts.discovery.contract import DiscoveryError
from kvbus.parts.discovery.streams import LogStreams
from kvbus.parts.log.contract import START
from kvbus.parts.log.kafka import KafkaLog
from kvbus.parts.log.nats import NatsLog
from kvbus.parts.log.redis import RedisLog
from kvbus.telemetry.readings import read_sources
from kvbus.tools.doctor.examine import find
from tests.doubles.bus import eventually
from tests.doubles.socket_routers import TopicRouter
from tests.log.fleet import fleet
from tests.log.kinds import Kafka, Memory, found_by
from tests.log.memory import MemoryLog

LEVEL = 2.0
"""Seconds that a test waits so that the aggregator has checked again whether it has read the complete log."""

MANY = 16

TOPIC = b"kv@pod.a.engine.3@m"


class Served(Protocol):
    endpoint: str


class Moving(TopicRouter):
    """A router that keeps its next seq when it goes to another aggregator, and drops batches that it already has."""

    @property
    def at(self) -> str:
        """The endpoint of the aggregator that the router reads."""
        return self._endpoint

    def go_to(self, aggregator: Served) -> None:
        self.disconnect()
        self._endpoint = aggregator.endpoint
        self.connect()

    def _take(self, topic: bytes, seq: int, payload: bytes) -> None:
        if seq >= self.next.get(topic, 0):
            super()._take(topic, seq, payload)


class Aggregator:
    """A kvbus daemon that reads the log and serves routers."""

    def __init__(self, kind, directory, monkeypatch, **keys):
        name, settings = found_by(kind, monkeypatch)
        self.endpoint = f"ipc://{directory}"
        output = {"endpoint": self.endpoint, "layout": "per_topic", "topic": "kv@{source}@m", "replay_endpoint": None}
        discover = {name: {**settings, **keys}}
        overrides = {
            "sources": [{"name": "fleet", "discover": discover}],
            "outputs": [output],
            "http": None,
            "discovery_grace": 0.0,
        }
        self.config = load(None, env={}, overrides=overrides)
        self.daemon = Daemon(self.config)

    @property
    def state(self):
        return {source.spec.label: source.state.value for source in self.daemon.relay.present}

    @property
    def held(self):
        """The number of blocks that the aggregator has of each source."""
        return {each.name: each.index_entries for _, each in read_sources(self.daemon.relay)}

    @property
    def failing(self):
        (stats,) = self.daemon.discovery_stats
        return stats.failing

    @property
    def lag(self):
        (stats,) = self.daemon.discovery_stats
        return stats.lag

    @property
    def next(self):
        return [stream.next_seq for stream in self.daemon.relay.outputs[0].streams]


class SlowReader:
    """A slow reader of a log: it returns two records at a time, with a pause. This makes a short log slow to read."""

    def __init__(self, reader):
        self._reader = reader
        self._left = []

    def __getattr__(self, name):
        return getattr(self._reader, name)

    async def take(self, seconds):
        self._left = self._left or await self._reader.take(seconds)
        await asyncio.sleep(0.1)
        found, self._left = self._left[:2], self._left[2:]
        return found

    async def reached(self, key):
        return START if self._left else await self._reader.reached(key)


class HeldBack:
    """A reader of a log that returns no entries as long as the event ``held`` is set."""

    def __init__(self, reader, held):
        self._reader, self._held = reader, held

    def __getattr__(self, name):
        return getattr(self._reader, name)

    async def take(self, seconds):
        if self._held.is_set():
            await asyncio.sleep(0.02)
            return []
        return await self._reader.take(seconds)


def hold_back(kind, monkeypatch):
    """Return an event. While it is set, the readers of this kind of log return no entries."""
    held, log = asyncio.Event(), type(kind.open())

    async def read(self, starts, read=log.read):
        return HeldBack(await read(self, starts), held)

    monkeypatch.setattr(log, "read", read)
    return held


class Two(contextlib.AsyncExitStack):
    """Two aggregators of one log, and a router that can go from one to the other."""

    def __init__(self, kind, directory, monkeypatch):
        super().__init__()
        self._make = lambda name: Aggregator(kind, directory / name, monkeypatch)

    async def __aenter__(self):
        await super().__aenter__()
        self.one, self.other = await self.start("one"), await self.start("other")
        self.router = Moving(self.one.endpoint)
        self.callback(self.router.close)
        return self

    async def start(self, name):
        aggregator = self._make(name)
        await aggregator.daemon.start()
        self.push_async_callback(aggregator.daemon.close, 0)
        return aggregator

    async def level(self, leaf):
        """Wait until the router of this object, and a new router at each aggregator, hold the engine's blocks."""
        await leaf.written()
        await eventually(lambda: self.router.blocks(TOPIC) == leaf.blocks, "the engine's blocks")
        for each in (self.one, self.other):
            fresh = Moving(each.endpoint)
            try:
                await eventually(lambda fresh=fresh: fresh.blocks(TOPIC) == leaf.blocks, "the engine's blocks at once")
                assert fresh.violations == []
            finally:
                fresh.close()
        assert self.router.violations == []


async def test_an_aggregator_is_ready_exactly_when_it_has_relayed_the_log(kind, tmp_path, monkeypatch):
    topics = [f"m␟pod.{name}/engine␟0".encode() for name in "abc"]
    async with fleet(kind) as log:
        leaves = [log.leaf(topic=topic) for topic in topics]
        for leaf in leaves:
            for _ in range(3):
                leaf.store(20)
                await leaf.written()
        truth = {f"pod.{name}.engine.0": len(leaf.blocks) for name, leaf in zip("abc", leaves, strict=True)}
        aggregator = Aggregator(kind, tmp_path / "bus", monkeypatch)
        assert aggregator.daemon.awaited == "starting"
        with monkeypatch.context() as away:
            away.setattr(LogStreams, "watch", cannot_be_reached)
            await aggregator.daemon.start()
            await eventually(lambda: aggregator.failing, "an attempt")
            assert aggregator.daemon.awaited == "reading the log"
        try:
            await eventually(lambda: not aggregator.daemon.awaited, "it to be ready")
            assert aggregator.held == truth, "at that moment, without waiting"
        finally:
            await aggregator.daemon.close(0)
        assert not aggregator.daemon.awaited, "it does not come back"


async def test_an_aggregator_is_not_ready_while_discovered_streams_are_refused(tmp_path, monkeypatch):
    """An aggregator is not ready while it cannot use the discovered streams, for example because of an unreadable
    key file.
    """

    def refused(*_):
        raise KvbusError("refused")

    monkeypatch.setattr("kvbus.daemon.discovery.LAST_PAUSE", 1.0)
    kind = Memory()
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(20)
        await leaf.written()
        aggregator = Aggregator(kind, tmp_path / "bus", monkeypatch)
        (stats,) = aggregator.daemon.discovery_stats
        with monkeypatch.context() as broken:
            broken.setattr("kvbus.daemon.discovery.change_to", refused)
            await aggregator.daemon.start()
            await eventually(lambda: stats.changes["refused"] > 1, "another try")
            assert aggregator.daemon.awaited == "reading the log"
        try:
            await eventually(lambda: not aggregator.daemon.awaited, "it to be ready")
            assert sum(aggregator.held.values()) == len(leaf.blocks)
        finally:
            await aggregator.daemon.close(0)


async def cannot_be_reached(_):
    """Discover nothing and raise an error, as if the log could not be reached."""
    raise DiscoveryError("away")
    yield


async def test_a_router_that_changes_between_aggregators_sees_no_seq_twice(kind, tmp_path, monkeypatch):
    async with fleet(kind) as log, Two(kind, tmp_path, monkeypatch) as two:
        leaf = log.leaf()
        leaf.store(700)
        await two.level(leaf)
        for each in (two.other, two.one, two.other):
            for _ in range(5):
                leaf.store(30, gone=20)
            two.router.go_to(each)
            for _ in range(5):
                leaf.store(30, gone=20)
            await two.level(leaf)
        await eventually(lambda: two.one.next == two.other.next, "equal numbers")
        assert two.one.state == {"pod.a.engine.3": "live"}


async def test_a_restarted_aggregator_gets_all_blocks_from_the_log(kind, tmp_path, monkeypatch):
    async with fleet(kind) as log, Two(kind, tmp_path, monkeypatch) as two:
        leaf = log.leaf()
        leaf.store(300)
        await two.level(leaf)
        await two.one.daemon.close(0)
        leaf.store(20, gone=50)
        two.one = await two.start("one")
        await two.level(leaf)
        await eventually(lambda: two.one.next == two.other.next, "equal numbers")


async def test_an_aggregator_begins_many_streams_with_few_reads_of_the_log(kind, tmp_path, monkeypatch):
    begun = []
    for log in (MemoryLog, KafkaLog, NatsLog, RedisLog):

        async def read(self, starts, read=log.read):
            begun.append(len(starts))
            return SlowReader(await read(self, starts))

        monkeypatch.setattr(log, "read", read)
    async with fleet(kind) as log:
        leaves = [log.leaf(topic=f"m␟pod-{n}/engine␟{n}".encode()) for n in range(MANY)]
        for leaf in leaves:
            leaf.store(20)
        for leaf in leaves:
            await leaf.written()
        aggregator = Aggregator(kind, tmp_path / "one", monkeypatch)
        await aggregator.daemon.start()
        try:
            await eventually(
                lambda: set(aggregator.state.values()) == {"live"} and len(aggregator.state) == MANY, "all"
            )
            assert begun[-1] == MANY
            assert len(begun) <= 6
        finally:
            await aggregator.daemon.close(0)


async def test_a_second_writer_of_a_stream_begins_a_new_epoch(kind, tmp_path, monkeypatch):
    async with fleet(kind) as log, Two(kind, tmp_path, monkeypatch) as two:
        first = log.leaf()
        first.store(30)
        await two.level(first)
        (before,) = two.one.next
        second = log.leaf()
        second.store(40)
        first.store(5)
        await two.level(second)
        await eventually(lambda: two.one.next == two.other.next, "equal numbers")
        assert two.one.next[0] >> EPOCH_BITS > before >> EPOCH_BITS


async def test_a_leaf_restarted_without_a_broker_is_read_once_the_broker_returns(kafka, tmp_path, monkeypatch):
    kind = Kafka(kafka)
    async with fleet(kind) as log, Two(kind, tmp_path, monkeypatch) as two:
        first = log.leaf()
        first.store(30)
        await two.level(first)
        kafka.kill()
        await first.close()
        second = log.leaf()
        second.store(40)
        await eventually(lambda: two.one.state == {"pod.a.engine.3": "connecting"}, "the broker is missed")
        assert two.router.blocks(TOPIC) == first.blocks
        await asyncio.to_thread(kafka.start)
        await two.level(second)


async def test_an_ended_stream_is_cleared_with_the_seq_of_its_last_record(kind, tmp_path, monkeypatch):
    async with fleet(kind) as log, Two(kind, tmp_path, monkeypatch) as two:
        leaf = log.leaf()
        leaf.store(30)
        await two.level(leaf)
        leaf.driver.retire(0)
        await eventually(lambda: two.router.blocks(TOPIC) == set(), "no block")
        await eventually(lambda: two.one.state == two.other.state == {}, "no source")
        assert two.one.next == two.other.next
        assert two.router.violations == []


async def test_aggregators_give_up_a_dead_writer_at_the_same_seq(kind, tmp_path, monkeypatch):
    async with fleet(kind) as log, Two(kind, tmp_path, monkeypatch) as two:
        leaf = log.leaf()
        leaf.store(30)
        await leaf.written()
        await two.level(leaf)
        end = (two.one.next[0] | LAST) + 1
        await leaf.close()
        monkeypatch.setattr(LogStreams, "give_up", 1.0)
        await eventually(lambda: two.router.blocks(TOPIC) == set(), "no block")
        await eventually(lambda: two.one.next == two.other.next == [end], "the end's number")
        await eventually(lambda: two.one.state == two.other.state == {}, "no source")
        monkeypatch.setattr(LogStreams, "give_up", 60.0)
        again = log.leaf()
        again.store(40)
        await two.level(again)


DEAD = b"kv@pod.c.engine.0@m"


class LateAggregator:
    """A set-up in which an aggregator starts after one of two leaves has stopped."""

    def __init__(self, kind, log, directory, monkeypatch):
        self._kind, self._log, self._directory, self._monkeypatch = kind, log, directory, monkeypatch

    @contextlib.asynccontextmanager
    async def running(self, *, dies):
        self.gone, lives = (self._log.leaf(topic=f"m␟pod.{name}/engine␟0".encode()) for name in "cb")
        self.gone.store(30)
        await self.gone.written()
        before = Aggregator(self._kind, self._directory / "before", self._monkeypatch)
        self.moved = Moving(before.endpoint)
        await before.daemon.start()
        try:
            await eventually(lambda: self.moved.blocks(DEAD) == self.gone.blocks, "its blocks")
        finally:
            await before.daemon.close(0)
        if dies:
            await self.gone.close()
        self._monkeypatch.setattr(LogStreams, "stale", 1.0)
        await asyncio.sleep(1.5)  # the age of a stream is measured by the log's clock
        lives.store(40)
        await lives.written()
        self.aggregator = Aggregator(self._kind, self._directory / "late", self._monkeypatch)
        await self.aggregator.daemon.start()
        self.moved.go_to(self.aggregator)
        self.fresh = Moving(self.aggregator.endpoint)
        try:
            await eventually(lambda: not self.aggregator.daemon.awaited, "it to be ready")
            assert self.aggregator.held == {"pod.b.engine.0": 40}
            await eventually(lambda: self.fresh.blocks(b"kv@pod.b.engine.0@m") == lives.blocks, "who lives")
            yield self
        finally:
            self.moved.close()
            self.fresh.close()
            await self.aggregator.daemon.close(0)


async def test_a_new_aggregator_clears_a_stream_whose_writer_was_silent_for_long(kind, tmp_path, monkeypatch):
    async with fleet(kind) as log, LateAggregator(kind, log, tmp_path, monkeypatch).running(dies=True) as late:
        assert late.moved.blocks(DEAD) == late.gone.blocks, "nothing was told"
        end = (late.moved.next[DEAD] | LAST) + 1
        monkeypatch.setattr(LogStreams, "give_up", 1.0)
        await eventually(lambda: late.moved.blocks(DEAD) == set(), "the end")
        assert late.moved.next[DEAD] == end
        late.fresh.read()
        assert late.fresh.next.get(DEAD, LAST + 1) > LAST, "of its blocks nobody heard"
        assert late.moved.violations == late.fresh.violations == []
        await eventually(lambda: "pod.c.engine.0" not in late.aggregator.state, "no source")


async def test_a_new_aggregator_reads_a_silent_stream_when_its_writer_continues(kind, tmp_path, monkeypatch):
    async with fleet(kind) as log, LateAggregator(kind, log, tmp_path, monkeypatch).running(dies=False) as late:
        epoch = late.moved.next[DEAD] >> EPOCH_BITS
        late.gone.store(5, gone=3)
        for router in (late.fresh, late.moved):
            await eventually(lambda router=router: router.blocks(DEAD) == late.gone.blocks, "all blocks, in this epoch")
            assert router.violations == []
            assert router.next[DEAD] >> EPOCH_BITS == epoch


async def test_the_lag_of_an_aggregator_grows_only_while_reading_stops(kind, tmp_path, monkeypatch):
    held = hold_back(kind, monkeypatch)
    async with fleet(kind) as log, Two(kind, tmp_path, monkeypatch) as two:
        leaf = log.leaf()
        leaf.store(30)
        await two.level(leaf)
        await eventually(lambda: two.one.lag < LEVEL, "a level aggregator")
        held.set()
        leaf.store(5)
        await eventually(lambda: two.one.lag > 2 * LEVEL, "an aggregator that is behind")
        held.clear()
        await eventually(lambda: two.one.lag < LEVEL, "a level aggregator again")
        await two.level(leaf)


async def test_doctor_names_the_streams_of_a_log_and_connects_to_no_engine(tmp_path, monkeypatch):
    kind = Memory()
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(3)
        await leaf.written()
        aggregator = Aggregator(kind, tmp_path / "one", monkeypatch)
        found, report = await find(aggregator.config)
        assert [each.text for each in report.seen] == ["finds pod.a.engine.3"]
        assert (found.sources, report.findings) == ((), [])
        await aggregator.daemon.close(0)


@pytest.mark.parametrize("pattern", [{"worker": "pod.b*"}, {"model": "other"}, {"cluster": "us"}])
async def test_streams_that_do_not_match_the_patterns_are_ignored(tmp_path, monkeypatch, pattern):
    kind = Memory()
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(3)
        await leaf.written()
        aggregator = Aggregator(kind, tmp_path / "one", monkeypatch, **pattern)
        await aggregator.daemon.start()
        try:
            await eventually(lambda: aggregator.daemon.discovery_stats[0].engines == 0, "an empty set")
            assert aggregator.state == {}
        finally:
            await aggregator.daemon.close(0)


async def test_the_newest_of_two_streams_with_the_same_name_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(LogStreams, "give_up", 1.5)
    kind, topic = Memory(), b"kv@pod.a.b.0@m"
    old_name, new_name = (f"{model}␟pod/a.b␟0".encode() for model in "nm")
    async with fleet(kind) as log:
        old = log.leaf(topic=old_name)
        old.store(5)
        await old.written()
        await asyncio.sleep(0.1)  # a turn of a writer is 1/32 s
        new = log.leaf(topic=new_name)
        new.store(9)
        await new.written()
        aggregator = Aggregator(kind, tmp_path / "one", monkeypatch)
        await aggregator.daemon.start()
        router = Moving(aggregator.endpoint)
        strict = TopicRouter(aggregator.endpoint)
        try:
            await eventually(lambda: router.blocks(topic) == new.blocks, "the newest")
            await new.close()

            def over():
                old.store(1)  # its writer goes on
                return strict.blocks(topic) == set() and strict.states.get(topic, 0) > 1

            await eventually(over, "the end")
            again = log.leaf(topic=old_name)
            again.store(7)
            await again.written()
            await eventually(lambda: router.blocks(topic) == strict.blocks(topic) == again.blocks, "a newer epoch")
            assert strict.violations == router.violations == []
        finally:
            router.close()
            strict.close()
            await aggregator.daemon.close(0)
