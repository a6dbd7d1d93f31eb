"""A relay, its output in a log, and readers that know nothing but the log: each holds the engine's blocks."""

import asyncio
import contextlib

import pytest

from kvbus.config import load
from kvbus.core.commands import Publish, SendPart, SendState
from kvbus.core.events import AnswerPulled, BatchReceived, SourceUp
from kvbus.core.normalizing.rules import Rules
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.sequencing.settings import Settings
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import OutputStats
from kvbus.core.wire.profiles import PROFILES
from kvbus.log.contract import START, UnavailableError
from kvbus.log.follower import Follower, Holds
from kvbus.log.record import Kind
from kvbus.outputs.contract import Services
from kvbus.outputs.log_output import LogOutput, stream_of
from kvbus.transport.sockets import PLAIN
from tests.doubles.payloads import payload, removed, store
from tests.doubles.router import PlainSetRouter
from tests.log.kinds import Directory, Kafka, insist
from tests.transport.loops import eventually, u64

TOPIC = "meta/Llama-3.1␟pod.a/engine␟3".encode()
KEY = stream_of("eu", TOPIC, 0).key


@pytest.fixture(params=["directory", "kafka"])
def kind(request, tmp_path):
    return Directory(tmp_path / "log") if request.param == "directory" else Kafka(request.getfixturevalue("kafka"))


def unasked(event: AnswerPulled) -> SendPart:
    raise AssertionError(f"nobody has asked: {event}")


class Leaf:
    """A relay with one engine, and the driver that appends its stream."""

    def __init__(self, place, **keys):
        self.relay = Relay(
            [SourceSpec("engine", 0, Settings(replay=False), Rules())],
            [OutputSpec("log", PROFILES["vllm"], [TOPIC], heartbeat=0)],
        )
        self.stats = OutputStats()
        settings = {"name": "log", "type": "kafka", "endpoint": "tcp://127.0.0.1:9", "on_subscribe": "state", **keys}
        overrides = {"model": "m", "sources": [{"endpoint": "ipc://engine"}], "outputs": [settings]}
        config = load(None, env={}, overrides=overrides).outputs[0]
        services = Services(self.stats, self.feed, unasked, None, lambda: 0.0, 4)
        self.driver = LogOutput(0, config, services, place, "eu", 1800.0)
        self.blocks = set()
        self._batches = 0
        self._hashes = iter(range(1, 10**6))
        self.driver.open(0, TOPIC, PLAIN)
        self.feed(SourceUp(0))

    def feed(self, event):
        for command in self.relay.handle(event, 0.0):
            if isinstance(command, SendState):
                self.driver.send_state(command)
            elif isinstance(command, Publish):
                self.driver.publish(command)
        self.driver.flush()

    def store(self, count, *, gone=0):
        """The engine stores blocks, and then evicts some."""
        new = [next(self._hashes) for _ in range(count)]
        out = sorted(self.blocks)[:gone]
        self.blocks = (self.blocks | set(new)) - set(out)
        events = [*(store([block], tokens=[block % 1000] * 16) for block in new), *([removed(out)] if out else [])]
        self.feed(BatchReceived(0, [b"", u64(self._batches), payload(*events)]))
        self._batches += 1

    async def written(self):
        await eventually(lambda: self.stats.states_sent and not self.driver.busy, "everything in the log")

    async def close(self, linger=0.0):
        for stream in self.driver.streams:
            self.driver.close(stream, linger)
        await eventually(lambda: not self.driver.busy, "the end of the driver")


class Reading:
    """Who rebuilds the stream from the log alone."""

    def __init__(self, reader):
        self._reader = reader
        self.follower = Follower()
        self.view = PlainSetRouter()

    @property
    def blocks(self):
        return {block for *_, block in self.view.blocks}

    async def until(self, what):
        async with asyncio.timeout(50):
            while not what():
                with contextlib.suppress(UnavailableError):
                    for entry in await self._reader.take(0.1):
                        self._take(entry.data)

    def _take(self, data):
        record = self.follower.take(data, 0.0)
        if record is not None and record.kind is not Kind.GONE:
            self.view.take(record.origin, record.payload)
        if self.follower.holds is Holds.NOTHING:
            self.view.blocks.clear()

    async def holds(self, leaf):
        await leaf.written()
        await self.until(lambda: self.follower.holds is Holds.ALL and self.blocks == leaf.blocks)
        assert self.view.violations == []


@contextlib.asynccontextmanager
async def fleet(kind):
    async with contextlib.AsyncExitStack() as stack:
        await kind.make()
        yield Fleet(kind, stack)


class Fleet:
    def __init__(self, kind, stack):
        self.kind = kind
        self._stack = stack

    def leaf(self, **keys):
        leaf = Leaf(self.kind.open(), **keys)
        self._stack.push_async_callback(leaf.close)
        return leaf

    async def reading(self, start=None):
        """A reader that begins where the pointer says, or at a position."""
        log = self.kind.open()
        if start is None:
            start = (await insist(log.pointers))[KEY].position
        reader = await insist(lambda: log.read({KEY: start}))
        self._stack.push_async_callback(reader.close)
        return Reading(reader)


async def test_readers_of_the_log_hold_the_engines_blocks_from_whatever_state_they_begin_at(kind):
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(700)
        await leaf.written()
        first = await log.reading(START)
        await first.holds(leaf)
        for _ in range(20):
            leaf.store(40, gone=30)
        await first.holds(leaf)
        late = await log.reading()
        await late.holds(leaf)
        assert not late.follower.counts
        assert leaf.stats.states_sent == {"subscribed": 1}
        assert not sum(leaf.stats.dropped_batches.values())


async def test_what_was_let_go_is_counted_and_made_good_by_a_state(kind):
    async with fleet(kind) as log:
        leaf = log.leaf(queue_batches=5)
        leaf.store(10)
        await leaf.written()
        reading = await log.reading()
        await reading.holds(leaf)
        for _ in range(50):  # the loop has no turn in between
            leaf.store(3, gone=2)
        assert leaf.stats.dropped_batches == {"queue_full": 45}
        assert leaf.stats.queue_depth == 5
        await eventually(lambda: leaf.stats.states_sent["lost"], "a state behind what is missing")
        await reading.holds(leaf)
        late = await log.reading()
        await late.holds(leaf)
        assert (leaf.stats.dropped_batches, reading.follower.counts) == ({"queue_full": 45}, {})


async def test_a_second_writer_has_the_stream_and_the_first_one_says_so(kind, caplog):
    async with fleet(kind) as log:
        first = log.leaf()
        first.store(10)
        await first.written()
        reading = await log.reading()
        await reading.holds(first)
        second = log.leaf()
        second.store(20)
        await second.written()
        first.store(5)
        await eventually(lambda: "another writer has taken" in caplog.text, "the first one to say so")
        first.store(5)
        assert first.stats.dropped_batches == {"fenced": 2}
        second.store(1, gone=4)
        await reading.holds(second)
        assert reading.follower.epoch == 2
        assert reading.follower.counts["lost"] == 0


async def test_a_leaf_that_is_back_begins_a_new_epoch_and_an_ended_stream_is_empty(kind):
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(10)
        await leaf.written()
        reading = await log.reading()
        await reading.holds(leaf)
        leaf.store(5)
        await leaf.close(linger=20.0)
        await reading.until(lambda: reading.blocks == leaf.blocks)
        again = log.leaf()
        again.store(3)
        await reading.holds(again)
        again.driver.retire(0)
        await reading.until(lambda: not reading.blocks)
        assert (reading.follower.epoch, reading.follower.holds) == (2, Holds.NOTHING)


async def test_a_log_that_goes_away_and_comes_back_has_everything_again(kind):
    async with fleet(kind) as log:
        leaf = log.leaf(queue_batches=20)
        leaf.store(10)
        await leaf.written()
        reading = await log.reading()
        await reading.holds(leaf)
        restarting = asyncio.ensure_future(log.kind.restart())
        for _ in range(30):
            leaf.store(5, gone=3)
            await asyncio.sleep(0.01)
        await restarting
        leaf.store(5)
        await reading.holds(leaf)
        late = await log.reading()
        await late.holds(leaf)
        assert reading.follower.counts["lost"] == 0
