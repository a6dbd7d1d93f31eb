"""Tests that a log writer continues by itself after it had to stop.

Another writer, foreign data under its keys, or a defect stopped it.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvbus.parts.log.redis_client import names
from kvbus.parts.outputs import appending
from tests.doubles.bus import eventually
from tests.log.fleet import KEY, fleet
from tests.log.kinds import Memory, Redis, insist


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(appending, "LEASE_TTL", 1.0)
    monkeypatch.setattr(appending, "OVERDUE", 0.5)
    monkeypatch.setattr(appending, "MOST_PAUSE", 0.2)


OFTEN = {"cluster": "eu", "state_every": 1}


async def test_a_fenced_leaf_writes_again_after_the_other_writer_is_gone(kind, caplog):
    async with fleet(kind) as log:
        leaf, reading = await log.followed_leaf(kafka=OFTEN)
        other = await insist(lambda: kind.open().claim(KEY))
        leaf.store(3, gone=1)
        await eventually(lambda: leaf.stats.streams_fenced, "the leaf to be fenced")
        assert "kvbus writes it again after 2 s without another writer" in caplog.text
        await other.close()
        await eventually(lambda: not leaf.stats.streams_fenced, "the stream to be written again")
        leaf.store(3, gone=1)
        await reading.holds(leaf)
        assert reading.follower.epoch > other.epoch


async def test_a_fenced_leaf_does_not_write_while_the_other_writer_runs(kind):
    async with fleet(kind) as log:
        first = log.leaf(kafka=OFTEN)
        first.store(3)
        await first.written()
        second = log.leaf(kafka=OFTEN)
        second.store(5)
        await second.written()
        first.store(1)
        await eventually(lambda: first.stats.streams_fenced, "the first one to be fenced")
        states = second.stats.states_sent.total() + 4  # 4 s: twice as long as kvbus waits for another writer
        await eventually(lambda: second.stats.states_sent.total() >= states, "states of the second one")
        assert (first.stats.streams_fenced, second.stats.streams_fenced) == (1, 0)
        second.store(3, gone=2)
        await (await log.reading()).holds(second)


POISONS: dict[str, tuple[Any, ...]] = {
    "records are text": ("SET", 0, "a word"),
    "records are a list": ("RPUSH", 0, "a word"),
    "the pointer is text": ("SET", 1, "a word"),
    "another token and no epoch": ("HSET", 1, "token", "another", "epoch", "a word"),
    "another token and the last epoch": ("HSET", 1, "token", "another", "epoch", str(2**53 - 1)),
    "no newest position": ("HSET", 1, "last", "a word"),
    "a far position": ("HSET", 1, "last", str(2**60)),
    "the last id": ("XADD", 0, f"{2**64 - 1}-{2**64 - 1}", "r", "x"),
}


@pytest.mark.parametrize("poison", POISONS)
async def test_a_writer_continues_when_redis_keys_with_wrong_contents_are_deleted(redis, poison, caplog):
    kind = Redis(redis)
    async with fleet(kind) as log:
        leaf = log.leaf(kafka=OFTEN)
        leaf.store(10)
        await leaf.written()
        keys = names(kind.place(""), KEY)
        command, key, *values = POISONS[poison]
        async with redis.client() as client:
            if command in ("SET", "RPUSH"):
                await client.delete(keys[key])
            await client.execute_command(command, keys[key], *values)
            leaf.store(3, gone=1)
            await eventually(lambda: leaf.stats.dropped_batches or leaf.stats.refused, "the writer to notice")
            await client.delete(*keys)
        leaf.store(3, gone=1)
        before = leaf.stats.batches

        def written():
            leaf.store(1, gone=1)
            return leaf.stats.batches > before

        await eventually(written, "batches in the log")
        await (await log.reading()).holds(leaf)
        assert (
            "it tries again every 0.2 s" in caplog.text
            or "kvbus writes it again" in caplog.text
            or "kvbus writes the state" in caplog.text
        )


class FailingLog:
    """A log whose server gives one unexpected answer."""

    def __init__(self, log):
        self._log, self.left = log, 1

    def __getattr__(self, name):
        return getattr(self._log, name)

    async def claim(self, key):
        if self.left:
            self.left -= 1
            raise KeyError("seq")
        return await self._log.claim(key)


async def test_a_writer_continues_after_an_unexpected_exception(tmp_path, caplog):
    kind = Memory()
    async with fleet(kind) as log:
        leaf = log.leaf(FailingLog(kind.open()))
        leaf.store(10)
        await leaf.written()
        assert "has failed because of a defect" in caplog.text
        await (await log.reading()).holds(leaf)


@pytest.mark.parametrize("poison", ["the last id", "an id in nanoseconds", "an id above 2^53"])
async def test_a_reader_continues_when_a_redis_record_with_a_foreign_id_is_deleted(redis, poison):
    """A record with an id that no writer of kvbus uses hides the later records only while it is in the stream."""
    kind = Redis(redis)
    ids = {"the last id": f"{2**64 - 1}-{2**64 - 1}", "an id in nanoseconds": f"{time.time_ns()}-0"}
    async with fleet(kind) as log:
        leaf, reading = await log.followed_leaf(kafka=OFTEN)
        keys = names(kind.place(""), KEY)
        async with redis.client() as client:
            await client.execute_command("XADD", keys[0], ids.get(poison, f"{2**53}-0"), "r", "x")
            leaf.store(3, gone=1)
            await eventually(lambda: leaf.stats.dropped_batches or leaf.stats.refused, "the writer to notice")
            for _ in range(3):
                await reading.take()  # reads the foreign record
            await client.delete(*keys)
        before = leaf.stats.batches

        def written():
            leaf.store(1, gone=1)
            return leaf.stats.batches > before

        await eventually(written, "batches in the log")
        await reading.holds(leaf)
