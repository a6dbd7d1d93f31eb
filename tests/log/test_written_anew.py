"""Tests for a stream that is erased from the log and written again.

Each reader holds the new blocks without delay, wherever it was reading.
"""

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import RecordsToDelete

from kvbus.parts.log import follower
from kvbus.parts.log.kafka_client import partition_of
from kvbus.parts.log.location import POINTERS
from kvbus.parts.log.redis_client import names
from tests.doubles.bus import eventually
from tests.doubles.socket_routers import TopicRouter
from tests.log.fleet import KEY, fleet
from tests.log.kinds import Kafka, Nats, Redis
from tests.log.test_aggregator import TOPIC, Aggregator

KINDS = {"kafka": Kafka, "nats": Nats, "redis": Redis}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param](request.getfixturevalue(request.param))


async def erase(kind):
    """Delete a stream's pointer and records with the tools of the log's server, as docs/LOG.md says."""
    if isinstance(kind, Kafka):
        producer = AIOKafkaProducer(bootstrap_servers=kind.broker.address)
        await producer.start()
        try:
            await producer.send_and_wait(kind.topic + POINTERS, None, key=KEY.encode())
        finally:
            await producer.stop()
        part = TopicPartition(kind.topic, partition_of(KEY, kind.partitions))
        async with kind.admin() as admin:
            await admin.delete_records({part: RecordsToDelete(before_offset=-1)})
    elif isinstance(kind, Nats):
        for stream in (kind.stream + POINTERS, kind.stream):
            await kind.api(f"STREAM.PURGE.{stream}", filter=f"{stream}.{KEY}")
    else:
        async with kind.server.client() as client:
            await client.delete(*names(kind.place(""), KEY))
    assert await kind.open().pointers(KEY) == {}


async def written(log, blocks):
    leaf = log.leaf()
    leaf.store(blocks)
    await leaf.written()
    return leaf


async def test_a_reader_follows_an_erased_and_rewritten_stream_immediately(kind):
    """A reader follows the new stream at once.

    Its clock does not advance, so it cannot notice that the old stream expired.
    """
    async with fleet(kind) as log:
        leaf, level = await log.followed_leaf()
        before = await log.reading()
        leaf.store(5, gone=2)
        await leaf.written()
        await level.holds(leaf)
        await leaf.close()
        await erase(kind)
        away = await log.reading(start=0)
        again = await written(log, 7)
        for reading in (level, before, away):
            await reading.holds(again)
            assert reading.follower.counts["old_epoch"] == 0
        again.store(3, gone=1)
        await again.written()
        for reading in (level, before, away):
            await reading.holds(again)


async def test_routers_of_an_aggregator_get_the_blocks_of_the_rewritten_stream(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(follower, "LEASE_TTL", 3600.0)
    async with fleet(kind) as log:
        leaf = await written(log, 10)
        aggregator = Aggregator(kind, tmp_path / "bus", monkeypatch)
        await aggregator.daemon.start()
        router = TopicRouter(aggregator.endpoint)
        try:
            await eventually(lambda: router.blocks(TOPIC) == leaf.blocks, "the engine's blocks")
            await leaf.close()
            await erase(kind)
            again = await written(log, 7)
            await eventually(lambda: router.blocks(TOPIC) == again.blocks, "those of the new stream")
            again_or_back = [each.partition(": ")[2].split(" after ") for each in router.violations]
            assert all(new == old for new, old in again_or_back), (
                "a source that leaves is cleared under its newest number"
            )
        finally:
            router.close()
            await aggregator.daemon.close(0)
