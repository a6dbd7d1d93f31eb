"""Tests for faults of NATS and Redis servers: a full server, a slow server, and a server that lost its data.

kvbus must count each fault, and the readers must become exact again.
"""

import asyncio

import pytest

from kvbus.parts.log.contract import START
from kvbus.parts.log.nats import NatsLog
from kvbus.parts.log.redis import RedisLog
from tests.doubles.bus import eventually
from tests.doubles.link import Link
from tests.log.fleet import KEY, fleet, taken
from tests.log.kinds import Nats, Redis, insist
from tests.ports import free_port


class FillingNats(Nats):
    opened, full = NatsLog, "stream_full"

    async def room(self, *, left: bool) -> None:
        """Remove the stream's size limit if ``left``.

        Otherwise limit it to 2,000 bytes, beyond which NATS refuses messages.
        """
        config = {"name": self.stream, "subjects": [f"{self.stream}.>"], "discard": "new"}
        await self.api(f"STREAM.UPDATE.{self.stream}", max_bytes=-1 if left else 2000, **config)


class FillingRedis(Redis):
    opened, full = RedisLog, "memory_full"

    async def room(self, *, left: bool) -> None:
        """Remove the server's memory limit if ``left``.

        Otherwise set it to one byte, so that Redis refuses every write.
        """
        async with self.server.client() as client:
            await client.config_set("maxmemory", "0" if left else "1")


@pytest.fixture(params=["nats", "redis"])
def kind(request):
    server = request.getfixturevalue(request.param)
    return {"nats": FillingNats, "redis": FillingRedis}[request.param](server)


async def test_a_full_log_server_gets_the_state_when_it_has_room(kind):
    async with fleet(kind) as log:
        leaf, reading = await log.followed_leaf(queue_batches=5)
        await kind.room(left=False)
        try:

            def full():
                leaf.store(3, gone=2)
                return leaf.stats.refused[kind.full] and leaf.stats.dropped_batches["log_unavailable"]

            await eventually(full, "the server to refuse")
            assert leaf.stats.queue_depth <= 5
        finally:
            await kind.room(left=True)
        await eventually(lambda: leaf.stats.states_sent["lost"], "a state behind what is missing")
        await reading.holds(leaf)
        assert reading.follower.counts["lost"] == 0


async def test_a_stopped_server_does_not_block_the_writer(kind):
    async with fleet(kind) as log:
        leaf = log.leaf(queue_batches=5)
        leaf.store(10)
        await leaf.written()
        reading = await log.reading()
        with kind.server.standing_still():
            for _ in range(20):
                leaf.store(3, gone=2)
                await asyncio.sleep(0)
            assert leaf.stats.queue_depth <= 5
            assert leaf.stats.dropped_batches["queue_full"] >= 15
        await eventually(lambda: leaf.stats.states_sent["lost"], "a state behind what is missing")
        await reading.holds(leaf)


@pytest.mark.parametrize("more", [0, 40], ids=["less than was read", "more than was read"])
async def test_a_server_without_its_data_gets_the_state_in_a_later_epoch(kind, more):
    async with fleet(kind) as log:
        leaf = log.leaf(queue_batches=20)
        for _ in range(30):
            leaf.store(3)
            await leaf.written()
        reading = await log.reading()
        await reading.holds(leaf)
        before = reading.follower.epoch
        kind.server.kill()
        kind.server.lose()
        await asyncio.to_thread(kind.server.start)
        await kind.make()
        leaf.store(5)
        await eventually(lambda: leaf.stats.refused["data_lost"], "the writer to notice")
        await eventually(lambda: leaf.stats.states_sent["lost"], "the state in the log before anybody reads again")
        for _ in range(more):
            leaf.store(1)
            await leaf.written()
        await reading.holds(leaf)
        assert reading.follower.epoch > before
        assert reading.follower.counts["lost"] == 0
        await (await log.reading()).holds(leaf)


async def test_an_append_without_an_answer_is_in_the_log_once(kind):
    await kind.make()
    async with Link("log", free_port(), kind.server.port) as between:
        writer = await insist(lambda: kind.opened(kind.place(between.address)).claim(KEY))
        first = await writer.append([b"a"])
        between.cut_answer = True
        second = await writer.append([b"b", b"c"])
        assert between.cuts == 1
        between.cut_answer = True
        third = await writer.append([b"d"])
        await writer.close()
    reader = await kind.open().read({KEY: START})
    entries = await taken(reader, 4)
    await reader.close()
    assert [entry.data for entry in entries] == [b"a", b"b", b"c", b"d"]
    assert [entries[n].position for n in (0, 2, 3)] == [first, second, third]
