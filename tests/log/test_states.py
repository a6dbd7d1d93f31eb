"""Tests for the states that a writer repeats in a log.

The tests measure what the states cost the writer, and how few records a new reader must read. Some tests damage states.
"""

import asyncio
from collections import Counter

import pytest

from kvbus.core.events import BatchReceived
from kvbus.parts.log.contract import START
from kvbus.parts.log.record import Kind, read
from kvbus.parts.outputs import appending
from kvbus.tools.sim.dialects import DIALECTS
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import synthetic
from tests.doubles.bus import eventually
from tests.log.fleet import KEY, fleet
from tests.log.kinds import Memory, insist
from tests.transport.loops import u64

STEPS = 500
LEAST = 8 * 1024
SOON = 0.02


class Churning:
    """A simulated vLLM whose cache is almost always full: its conversations grow, share prefixes and are evicted."""

    def __init__(self, leaf):
        self._engine = SimEngine(
            DIALECTS["vllm-0.33"], synthetic(0, 0), options=EngineOptions(blocks=400, max_running=8)
        )
        self._leaf = leaf
        self._steps = 0

    def step(self):
        data = self._engine.step(0.0)
        assert data is not None
        self._leaf.blocks = {entry["hash"] for entry in self._engine.truth()}
        self._leaf.feed(BatchReceived(0, [b"", u64(self._steps), data]))
        self._steps += 1


async def everything(log, start):
    """Return each record that the log's stream has from a position on, with the record's size in bytes."""
    reader = await insist(lambda: log.kind.open().read({KEY: start}))
    ends, found = await reader.ends(), []
    async with asyncio.timeout(50):
        while await reader.reached(KEY) < ends[KEY]:
            found += [(read(entry.data), len(entry.data)) for entry in await reader.take(0.1)]
    await reader.close()
    return found


def states_of(records):
    """Return the size in bytes of each state among these records."""
    sizes: list[int] = []
    for record, size in records:
        if record.kind is Kind.CLEAR:
            sizes.append(size)
        elif record.kind is Kind.STATE:
            sizes[-1] += size
    return sizes


async def test_repeated_states_stay_in_proportion_to_batches_under_churn(kind, monkeypatch):
    monkeypatch.setattr(appending, "LEAST_TAIL", LEAST)
    monkeypatch.setattr(appending, "ASK_AGAIN", SOON)
    async with fleet(kind) as log:
        leaf = log.leaf()
        churning = Churning(leaf)
        for step in range(STEPS):
            churning.step()
            if step % 4 == 0:
                await leaf.written()
        await leaf.close(linger=20.0)
        newest = (await insist(log.kind.open().pointers))[KEY]
        whole, behind = await everything(log, START), await everything(log, newest.position)
        sizes = Counter(record.kind for record, _ in whole)
        first, *states = states_of(whole)
        batches = sum(size for record, size in whole if record.kind is Kind.BATCH)
        assert (sizes[Kind.CLEAR], dict(leaf.stats.states_sent)) == (
            len(states) + 1,
            {"subscribed": 1, "refreshed": len(states)},
        )
        assert leaf.stats.state_bytes == first + sum(states)
        assert len(states) > 5
        assert batches + sum(states) <= 2 * batches + max(states)
        # When a new state becomes due, one append of batches may already be in progress.
        assert sum(size for _, size in behind) <= 2 * max(states) + LEAST + appending.MOST_BYTES
        assert sum(size for _, size in behind) < sum(size for _, size in whole) / 4
        late = await log.reading()
        await late.holds(leaf)
        assert not late.follower.counts


async def test_a_state_is_written_even_if_batches_always_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(appending, "LEAST_TAIL", LEAST)
    monkeypatch.setattr(appending, "ASK_AGAIN", SOON)
    feeding = True

    def and_another_one(data):
        if feeding and read(data).kind is Kind.BATCH:
            leaf.store(5, gone=4)  # feed a batch while the log appends another batch
        return data

    async with fleet(Memory()) as log:
        leaf = log.leaf(DamagingLog(log.kind.open(), and_another_one))
        leaf.store(10)
        await leaf.written()
        leaf.store(10)
        await eventually(lambda: leaf.stats.states_sent["refreshed"] > 2, "the state again")
        feeding = False
        await (await log.reading()).holds(leaf)


class DamagingLog:
    """A log that changes some of the records that a writer appends, to damage them."""

    def __init__(self, log, change):
        self._log = log
        self._change = change

    def __getattr__(self, name):
        return getattr(self._log, name)

    async def claim(self, key):
        return DamagingWriter(await self._log.claim(key), self._change)


class DamagingWriter:
    def __init__(self, writer, change):
        self._writer = writer
        self._change = change

    def __getattr__(self, name):
        return getattr(self._writer, name)

    async def append(self, records):
        return await self._writer.append([self._change(data) for data in records])


def flipped(data):
    return data[:40] + bytes([data[40] ^ 4]) + data[41:]


def once(kind):
    """Return a function that damages the first record of a kind that it gets, and leaves all others unchanged."""
    left = [kind]

    def change(data):
        if left and read(data).kind is left[0]:
            left.pop()
            return flipped(data)
        return data

    return change


@pytest.mark.parametrize("part", [Kind.CLEAR, Kind.STATE, Kind.BATCH])
async def test_a_reader_recovers_from_a_damaged_record_with_the_next_state(kind, part, monkeypatch):
    monkeypatch.setattr(appending, "ASK_AGAIN", SOON)
    async with fleet(kind) as log:
        leaf = log.leaf(DamagingLog(log.kind.open(), once(part)))
        leaf.store(6000)  # a state with several records
        await leaf.written()
        leaf.store(20, gone=10)
        await leaf.written()
        reading = await log.reading(START)
        await reading.until(lambda: reading.follower.counts["damaged"])
        monkeypatch.setattr(appending, "LEAST_TAIL", 1)
        while not leaf.stats.states_sent["refreshed"]:
            leaf.store(500, gone=500)
            await leaf.written()
        leaf.store(20, gone=10)
        await reading.holds(leaf)
        assert reading.follower.counts["damaged"] == 1
        assert reading.follower.counts["lost"] == (part is not Kind.CLEAR)
        late = await log.reading()
        await late.holds(leaf)
        assert not late.follower.counts


async def test_a_writer_writes_its_state_again_after_retention_deleted_it(kind, monkeypatch):
    monkeypatch.setattr(appending, "ASK_AGAIN", SOON)
    async with fleet(kind) as log:
        leaf = log.leaf()
        leaf.store(300)
        await leaf.written()
        reading = await log.reading()
        await reading.holds(leaf)
        for _ in range(20):
            leaf.store(5, gone=3)
            await leaf.written()
        await reading.holds(leaf)
        await kind.squeeze(KEY, 5)
        late = await log.reading()
        assert late.blocks == set()
        await eventually(lambda: leaf.stats.states_sent["trimmed"], "the writer to notice")
        leaf.store(5, gone=3)
        await late.holds(leaf)
        await reading.holds(leaf)
        assert dict(leaf.stats.states_sent) == {"subscribed": 1, "trimmed": 1}
        assert not +Counter({name: n for name, n in reading.follower.counts.items() if name != "known"})
