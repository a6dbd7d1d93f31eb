"""Tests for writing to and reading from a log at a cluster of three servers under load.

One or two servers are killed and started again, or the leader changes.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any, Final

import pytest
from aiokafka.admin import NewTopic

from kvbus.parts.log.contract import START
from kvbus.parts.log.kafka_client import partition_of
from kvbus.parts.log.location import POINTERS
from kvbus.parts.log.nats import NatsLog
from tests.doubles.bus import eventually
from tests.log.clusters import Cluster
from tests.log.fleet import KEY, fleet
from tests.log.kinds import Kafka, Nats, insist
from tests.log.load import PATIENCE, BusState, asked
from tests.log.server import Server

PARTITIONS: Final = 2
MINE: Final = partition_of(KEY, PARTITIONS)


class Brokers(Kafka):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, PARTITIONS, 3)
        self.cluster = cluster

    async def _parts(self, topic: str) -> list[dict[str, Any]]:
        async with self.admin() as admin:
            (found,) = await admin.describe_topics([topic])
        parts: list[dict[str, Any]] = found["partitions"]
        return parts

    async def leader(self, topic: str = "") -> Server:
        """Return the broker that leads the partition of the tested stream, or the only partition of ``topic``."""
        (part,) = (each for each in await self._parts(topic or self.topic) if topic or each["partition"] == MINE)
        return self.cluster.members[range(1, 4).index(part["leader"])]

    async def whole(self) -> bool:
        topics = (self.topic, self.topic + POINTERS, "__transaction_state")
        parts = [part for each in topics for part in await self._parts(each)]
        return all(len(part["isr"]) == len(part["replicas"]) for part in parts)

    async def move(self) -> None:
        """Move the tested partition to another leader: stop its present leader with SIGTERM.

        On this signal, a broker hands over its partitions before it ends.
        """
        await asyncio.to_thread((await asked(self.leader, "a leader")).kill, signal.SIGTERM)

    async def victims(self) -> list[Server]:
        """Return the brokers whose death is worst for a writer.

        They are the leader of its partition, and the coordinator of its transactions.
        """
        return [await asked(self.leader, "a leader"), await asked(self._coordinator, "a coordinator")]

    async def _coordinator(self) -> Server:
        return await self.leader("__transaction_state")


class NatsServers(Nats):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, 3)
        self.cluster = cluster

    async def leader(self) -> Server:
        """Return the server that leads the NATS stream with the records."""
        return self.named((await self.api(f"STREAM.INFO.{self.stream}"))["cluster"]["leader"])

    def named(self, name: str) -> Server:
        return self.cluster.members[int(name[1:]) - 1]

    async def whole(self) -> bool:
        found = [(await self.api(f"STREAM.INFO.{each}"))["cluster"] for each in (self.stream, self.stream + POINTERS)]
        return all(each["leader"] and all(one["current"] for one in each["replicas"]) for each in found)

    async def move(self) -> None:
        """Let the leader of the NATS stream hand over to another server."""
        await self.api(f"STREAM.LEADER.STEPDOWN.{self.stream}")

    async def victims(self) -> list[Server]:
        return [await asked(self.leader, "a leader")]


@pytest.fixture(params=["kafka", "nats"])
def cluster(request):
    found = request.getfixturevalue(f"{request.param}_cluster")
    yield found
    found.restore()


@pytest.fixture
def kind(request, cluster):
    return {"kafka": Brokers, "nats": NatsServers}[request.node.callspec.params["cluster"]](cluster)


async def test_a_log_stays_exact_while_one_server_after_another_is_killed(kind, tmp_path, monkeypatch):
    await kind.make()
    await asked(kind.whole, "all replicas")
    kind.cluster.members[0].kill()  # the first server of the configuration
    async with fleet(kind, made=True) as log, BusState(kind, log, tmp_path / "aggregator", monkeypatch) as seen:
        await seen.exact()
        await asyncio.to_thread(kind.cluster.restore)
        await asked(kind.whole, "all replicas")
        async with seen.load():
            await seen.goes_on()
            before = seen.epoch
            await kind.move()
            await seen.goes_on()
            assert (seen.epoch, dict(seen.leaf.stats.dropped_batches)) == (before, {}), (
                "nothing was lost, and nobody noticed"
            )
            await asyncio.to_thread(kind.cluster.restore)
            for victim in await kind.victims():
                await asked(kind.whole, "all replicas")
                victim.kill()
                await seen.goes_on()
                await asyncio.to_thread(kind.cluster.restore)
        await seen.exact()


async def test_a_cluster_without_two_servers_accepts_no_record_until_they_return(kind, tmp_path, monkeypatch):
    async with fleet(kind) as log:
        await asked(kind.whole, "all replicas")
        async with BusState(kind, log, tmp_path / "aggregator", monkeypatch) as seen:
            await seen.exact()
            before = seen.epoch
            leader = await kind.leader()
            async with seen.load():
                next(each for each in kind.cluster.members if each is not leader).kill()
                leader.kill()
                late = log.leaf(topic="m␟late/engine␟0".encode())
                late.store(5)
                await eventually(lambda: seen.leaf.stats.refused and late.stats.refused, "both to be refused", PATIENCE)
                await eventually(lambda: seen.aggregator.failing, "the aggregator to notice", PATIENCE)
                assert seen.leaf.stats.dropped_batches["log_unavailable"]
                assert seen.aggregator.held["pod.a.engine.3"], "what was known stands"
                await asyncio.to_thread(kind.cluster.restore)
                await seen.goes_on()
            await seen.exact()
            assert seen.epoch > before
            await eventually(
                lambda: seen.aggregator.held.get("late.engine.0") == 5, "the stream that could not begin", PATIENCE
            )


async def test_a_new_epoch_replaces_records_that_an_unclean_election_lost(kafka_cluster, tmp_path, monkeypatch):
    kind = Brokers(kafka_cluster)
    loose = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
    assigned = {part: [1, 2] for part in range(PARTITIONS)}
    await kind.create(
        NewTopic(kind.topic, -1, -1, replica_assignments=assigned, topic_configs=loose),
        NewTopic(kind.topic + POINTERS, PARTITIONS, 3),
    )
    async with fleet(kind, made=True) as log:
        await asked(kind.whole, "all replicas")
        async with BusState(kind, log, tmp_path / "aggregator", monkeypatch) as seen:
            await seen.exact()
            before = seen.epoch
            leader = await kind.leader()
            (behind,) = (each for each in kafka_cluster.members[:2] if each is not leader)
            behind.kill()
            async with seen.load():
                for _ in range(5):
                    await seen.goes_on()
            await seen.exact()
            leader.kill()  # the leader has records that no other server has
            await asyncio.to_thread(behind.start)
            async with seen.load():
                await seen.goes_on()
            await seen.exact()
            assert seen.epoch > before
            await asyncio.to_thread(kafka_cluster.restore)


async def test_a_nats_reader_continues_after_the_server_of_its_consumer_dies(nats_cluster):
    kind = NatsServers(nats_cluster)
    await kind.make()
    await asked(kind.whole, "all replicas")
    writer = await insist(lambda: kind.open().claim(KEY))
    await writer.append([b"before"])
    leader = await kind.leader()

    async def elsewhere() -> Any:
        """Return a reader that is connected to the leader of the stream, but whose consumer is at another server."""
        reader = await NatsLog(kind.place(leader.address)).read({KEY: START})
        await reader.take(1.0)
        (name,) = (await kind.api(f"CONSUMER.NAMES.{kind.stream}"))["consumers"]
        keeps = kind.named((await kind.api(f"CONSUMER.INFO.{kind.stream}.{name}"))["cluster"]["leader"])
        if keeps is not leader:
            return reader, keeps
        await reader.close()
        await kind.api(f"CONSUMER.DELETE.{kind.stream}.{name}")
        return None

    reader, keeps = await asked(elsewhere, "such a consumer")
    try:
        keeps.kill()
        last = await writer.append([b"behind"])

        async def behind() -> Any:
            return [entry for entry in await reader.take(1.0) if entry.position == last]

        assert [entry.data for entry in await asked(behind, "the record")] == [b"behind"]
        assert await reader.reached(KEY) == (await reader.ends())[KEY]
    finally:
        await reader.close()
        await writer.close()
        await asyncio.to_thread(nats_cluster.restore)
