"""kvbus relays that write to a log (leaves), and readers that read only the log, in the process of the test.

A test checks that each reader holds the engine's blocks.
"""

import asyncio
import contextlib

from kvbus.config import load
from kvbus.core.commands import Publish, SendState
from kvbus.core.events import BatchReceived, SourceUp
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import OutputStats
from kvbus.core.wire.profiles import PROFILES
from kvbus.parts.log.contract import Entry, UnavailableError
from kvbus.parts.log.follower import Follower, Holds
from kvbus.parts.log.record import Kind
from kvbus.parts.outputs.contract import Services
from kvbus.parts.outputs.log_output import LogOutput, stream_of
from kvbus.transport.sockets import PLAIN
from tests.doubles.bus import eventually
from tests.doubles.payloads import payload, removed, store
from tests.doubles.router import PlainSetRouter
from tests.log.kinds import insist
from tests.transport.loops import u64

TOPIC = "meta/Llama-3.1␟pod.a/engine␟3".encode()
KEY = stream_of("eu", TOPIC, 0).key


async def taken(reader, count):
    """Return the next ``count`` entries that a reader gets from a log. Fail after 50 seconds."""
    found: list[Entry] = []
    async with asyncio.timeout(50):
        while len(found) < count:
            found.extend(await reader.take(0.1))
    return found


class Leaf:
    """A relay that reads one simulated engine and appends its stream to a log."""

    def __init__(self, place, *, topic=TOPIC, profile=PROFILES["vllm"], **keys):
        self.relay = Relay(
            [SourceSpec("engine", 0, replay=False)],
            [OutputSpec("log", profile, [topic], heartbeat=0)],
        )
        self.stats = OutputStats()
        settings = {"name": "log", "type": "kafka", "endpoint": "tcp://127.0.0.1:9", "kafka": {"cluster": "eu"}, **keys}
        overrides = {"model": "m", "sources": [{"endpoint": "ipc://engine"}], "outputs": [settings]}
        config = load(None, env={}, overrides=overrides).outputs[0]
        services = Services(self.stats, self.feed, lambda: 0.0, 4)
        self.driver = LogOutput(0, config, services, place)
        self.blocks = set()
        self._batches = 0
        self._hashes = iter(range(1, 10**6))
        self.driver.open(0, topic, PLAIN)
        self.feed(SourceUp(0))

    def feed(self, event):
        for command in self.relay.handle(event, 0.0):
            if isinstance(command, SendState):
                self.driver.send_state(command)
            elif isinstance(command, Publish):
                self.driver.publish(command)
        self.driver.flush()

    def store(self, count, *, gone=0):
        """Let the engine publish one batch that stores ``count`` new blocks and evicts ``gone`` old blocks."""
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
    """A log reader for tests that builds its set of blocks only from the log."""

    def __init__(self, reader):
        self._reader = reader
        self.follower = Follower()
        self.view = PlainSetRouter()
        self.epochs = []

    @property
    def blocks(self):
        return {block for *_, block in self.view.blocks}

    async def until(self, what):
        async with asyncio.timeout(50):
            while not what():
                with contextlib.suppress(UnavailableError):
                    await self.take()

    async def take(self):
        for entry in await self._reader.take(0.1):
            self._take(entry.data)

    def _take(self, data):
        step = self.follower.follow(data, 0.0)
        if step is not None and not step.known:
            self.epochs.append(step.record.epoch)
            if step.record.kind is not Kind.GONE:
                self.view.take(step.record.origin, step.record.payload)
        if self.follower.holds is Holds.NOTHING:
            self.view.blocks.clear()

    async def holds(self, leaf):
        await leaf.written()
        await self.until(lambda: self.follower.holds is Holds.ALL and self.blocks == leaf.blocks)
        assert self.view.violations == []


@contextlib.asynccontextmanager
async def fleet(kind, *, made=False):
    """Yield an object that creates leaves and readers of a log. Create the log unless ``made``."""
    async with contextlib.AsyncExitStack() as stack:
        if not made:
            await kind.make()
        yield Fleet(kind, stack)


class Fleet:
    def __init__(self, kind, stack):
        self.kind = kind
        self._stack = stack

    key = KEY

    def leaf(self, place=None, **keys):
        leaf = Leaf(self.kind.open() if place is None else place, **keys)
        self._stack.push_async_callback(leaf.close)
        return leaf

    async def followed_leaf(self, **keys):
        """Return a leaf whose engine has ten blocks, and a log reader that already holds these blocks."""
        leaf = self.leaf(**keys)
        leaf.store(10)
        await leaf.written()
        reading = await self.reading()
        await reading.holds(leaf)
        return leaf, reading

    async def reading(self, start=None, key=KEY):
        """Return a reader that begins at the position ``start``, by default at the position of the stream's pointer."""
        log = self.kind.open()
        if start is None:
            start = (await insist(log.pointers))[key].position
        reader = await insist(lambda: log.read({key: start}))
        self._stack.push_async_callback(reader.close)
        return Reading(reader)
