"""Clients of Kafka as the log needs them: started and stopped, a reader of partitions, and who leads them."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, Final

from aiokafka import AIOKafkaClient, AIOKafkaConsumer, AIOKafkaProducer, TopicPartition, errors
from aiokafka.partitioner import murmur2
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.record.memory_records import MemoryRecords

from kvbus.common.tasks import close_within, end_tasks
from kvbus.parts.log.contract import UNREADABLE_BATCH, Refused
from kvbus.parts.log.kafka_errors import PROBE, shown
from kvbus.parts.log.place import Place
from kvbus.parts.log.refusals import PAUSE, REQUEST

STOP: Final = 2.0
"""Seconds that a client has to commit, and to close its connections."""

MAX_RECORDS: Final = 500
"""Records taken at once."""

FETCH_BYTES: Final = 1024 * 1024
"""Bytes of a partition that are fetched at once; a batch that is larger comes whole."""

EARLIEST: Final = -2
LATEST: Final = -1
"""Times that stand for a partition's first offset, and for its end."""


UNDECODABLE: Final = (
    ValueError,
    RuntimeError,
    EOFError,
    errors.UnsupportedCodecError,
    errors.CorruptRecordException,
    zlib.error,
)
"""Errors of aiokafka for a batch that it cannot decode: a header that is not UTF-8, a compression not installed."""


async def started(start: Coroutine[Any, Any, object]) -> None:
    """Start a client. If the caller is cancelled, give the start up to :data:`STOP` to end.

    aiokafka forgets the connection of a first question that is cancelled, so nobody could close it.
    """
    task = asyncio.ensure_future(start)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            await asyncio.wait([task], timeout=STOP)
        finally:
            task.cancel()
        raise


async def stop(client: AIOKafkaProducer) -> None:
    """Stop a producer, and wait up to :data:`STOP` for it.

    It waits until the broker has answered for every record. It goes on waiting in the background: the next producer
    with its transactional id fences it, and then it ends.
    """
    await close_within(_stopped(client), STOP)


async def _stopped(client: AIOKafkaProducer) -> None:
    try:
        await client.stop()
    finally:  # a producer whose sending has failed raises that, and does not close its connections
        await client.client.close()


class PartitionReader:
    """Read partitions with aiokafka's consumer, and skip the batches that it cannot decode.

    A batch is of one producer, so its records are missing in that producer's streams alone. The consumer raises an
    error and does not say where. So this class then asks the leaders for the same records, and decodes each batch.

    Attributes:
        client: a client that knows the brokers and the leaders; the consumer does not show its own.
    """

    def __init__(self, options: dict[str, Any], refused: Refused) -> None:
        self.client = AIOKafkaClient(**options)
        self._consumer = AIOKafkaConsumer(auto_offset_reset="earliest", enable_auto_commit=False, **options)
        self._refused = refused
        self._next: dict[TopicPartition, int] = {}
        """Offsets after the last record that was taken."""

    async def start(self, topic: str) -> list[TopicPartition]:
        """Connect, and return the partitions of the topic."""
        await started(self.client.bootstrap())
        await self.client.set_topics([topic])
        await started(self._consumer.start())
        return partitions_of(self.client, topic)

    def begin(self, starts: Mapping[TopicPartition, int]) -> None:
        """Read these partitions from these offsets on."""
        self._next = dict(starts)
        self._consumer.assign(list(starts))
        self._rewind()

    def _rewind(self) -> None:
        for part, offset in self._next.items():
            self._consumer.seek(part, offset)

    async def take(self, seconds: float) -> dict[TopicPartition, list[Any]]:
        """Take the next records of each partition; none if none came for so long."""
        try:
            found: dict[TopicPartition, list[Any]] = await self._consumer.getmany(
                timeout_ms=int(1000 * seconds), max_records=MAX_RECORDS
            )
        except UNDECODABLE:
            self._rewind()  # the consumer has dropped what it had decoded
            return await self._decode()
        for part, records in found.items():
            self._next[part] = records[-1].offset + 1
        return found

    async def position(self, part: TopicPartition) -> int:
        """Return the offset of the partition's next record. Offsets of transactions' own records are passed over."""
        position: int = await self._consumer.position(part)
        return position

    async def _decode(self) -> dict[TopicPartition, list[Any]]:
        """Fetch the next batches of each partition, and decode those that can be decoded."""
        fetched = {part: await self._fetch(part, offset) for part, offset in self._next.items()}
        found = {}
        for part, data in fetched.items():
            first, batches = self._next[part], MemoryRecords(data)
            records: list[Any] = []
            while batches.has_next():
                batch = batches.next_batch()
                records += [record for record in self._records(part, batch) if record.offset >= first]
                self._next[part] = batch.next_offset
            self._consumer.seek(part, self._next[part])
            if records:
                found[part] = records
        return found

    async def _fetch(self, part: TopicPartition, offset: int) -> bytes:
        wanted = [(part.topic, [(part.partition, offset, FETCH_BYTES)])]
        leader = self.client.cluster.leader_for_partition(part)
        answer = await self.client.send(leader, FetchRequest(0, 0, FETCH_BYTES, 0, wanted))
        ((_, ((_, code, _, *_, data),)),) = answer.topics
        if code == errors.OffsetOutOfRangeError.errno:
            return b""  # the consumer goes to the first offset by itself
        if code:
            self.client.force_metadata_update()
            raise errors.for_code(code)(part.topic)
        return bytes(data or b"")

    def _records(self, part: TopicPartition, batch: Any) -> list[Any]:
        if batch.is_control_batch:
            return []
        try:
            if batch.validate_crc():
                return list(batch)
        except UNDECODABLE:
            pass
        where = f"{part.topic}, partition {part.partition}, offset {batch.base_offset}"
        self._refused.append((UNREADABLE_BATCH, where))
        return []

    async def close(self) -> None:
        """Close the connections."""
        await close_within(self._closed(), STOP)

    async def _closed(self) -> None:
        await asyncio.gather(self._consumer.stop(), self.client.close())


MOVED: Final = (
    errors.NotLeaderForPartitionError,
    errors.LeaderNotAvailableError,
    errors.UnknownTopicOrPartitionError,
)
"""Errors of a broker that does not lead a partition, as the client's knowledge is old."""


async def offsets(
    client: AIOKafkaClient, parts: Iterable[TopicPartition], at: int
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Ask leaders for the first offsets of partitions (:data:`EARLIEST`) or for their ends (:data:`LATEST`).

    Returns:
        The offsets, and the leaders that were asked.
    """

    async def one(part: TopicPartition, leader: int) -> int:
        answer = await client.send(leader, OffsetRequest(-1, 0, [(part.topic, [(part.partition, at)])]))
        ((_, ((_, code, *_, offset),)),) = answer.topics
        if code:
            raise errors.for_code(code)(part.topic)
        return int(offset)

    async with asyncio.timeout(REQUEST):
        while True:
            led = {part: client.cluster.leader_for_partition(part) for part in parts}
            try:
                found = await asyncio.gather(*(one(part, leader) for part, leader in led.items()))
            except MOVED:
                await client.force_metadata_update()
                await asyncio.sleep(PAUSE)
            else:
                return dict(zip(led, found, strict=True)), led


def client_options(place: Place, options: dict[str, Any]) -> dict[str, Any]:
    """What every client takes, with those of TLS and authentication."""
    return {"bootstrap_servers": place.servers.split(","), "request_timeout_ms": int(1000 * REQUEST), **options}


def partition_of(key: str, partitions: int) -> int:
    """Where Kafka's own clients put a key."""
    return int(murmur2(key.encode()) & 0x7FFFFFFF) % partitions


def partitions_of(client: AIOKafkaClient, topic: str) -> list[TopicPartition]:
    """All partitions of a topic.

    Raises:
        TopicAuthorizationFailedError: no ACL shows the topic.
        UnknownTopicOrPartitionError: the broker that was asked knows none.
    """
    if topic in client.cluster.unauthorized_topics:
        raise errors.TopicAuthorizationFailedError(topic)
    found = sorted(client.cluster.partitions_for_topic(topic) or ())
    if not found:
        raise errors.UnknownTopicOrPartitionError(topic)
    return [TopicPartition(topic, number) for number in found]


async def leaders(client: AIOKafkaClient, options: dict[str, Any], topics: list[str]) -> dict[TopicPartition, int]:
    """Who leads each partition, as most of the brokers say that have it: the node's number.

    A broker that is cut off from the others does not know that it leads no more, and what it says of its partitions is
    old. Of two brokers one is enough, as nobody could read otherwise while the other one is away. A partition of which
    too few say the same is left out.
    """
    votes: dict[TopicPartition, Counter[int]] = {}
    sizes: dict[TopicPartition, int] = {}
    asked = {
        asyncio.ensure_future(shown(each.host, each.port, options, topics)): each.nodeId
        for each in client.cluster.brokers()
    }

    def agreed(part: TopicPartition, needed: float) -> int | None:
        ((leader, count),) = votes[part].most_common(1)
        return leader if leader >= 0 and count >= needed * sizes[part] else None

    left = set(asked)
    try:
        async with asyncio.timeout(PROBE):
            while left and not (votes and all(agreed(part, 0.51) is not None for part in votes)):
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    with contextlib.suppress(errors.KafkaError, OSError, TimeoutError):
                        for code, topic, _, parts in each.result().topics:
                            for _, number, leader, replicas, *_ in () if code else parts:
                                if asked[each] in replicas:
                                    part = TopicPartition(topic, number)
                                    votes.setdefault(part, Counter())[leader] += 1
                                    sizes[part] = len(replicas)
    except TimeoutError:
        pass
    finally:
        await end_tasks(left)
    return {part: leader for part in votes if (leader := agreed(part, 0.5)) is not None}
