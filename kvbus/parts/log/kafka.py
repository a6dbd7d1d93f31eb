"""A log in Kafka, with one topic for records and a compacted topic for pointers.

The extra ``kafka`` is required.

A writer is a producer whose transactional id is the stream's key. When another producer starts with this id, the broker
refuses all further records of the former producer. kvbus uses transactions only to fence writers in this way.

Readers get records before they are committed. The writer commits rarely, together with a lease, because a commit for
each batch would take 20 ms. If readers waited for commits, the open transaction of a dead writer would delay every
stream of its partition. So readers also get the records of aborted transactions. Such a record was appended a second
time later, or it is of a former writer. Readers recognize both cases by the record's epoch and seq.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition, errors
from aiokafka.protocol.offset import OffsetRequest

from kvbus.parts.log.contract import (
    MAX_REFUSED,
    START,
    Entry,
    FencedError,
    Pointer,
    Refused,
    UnavailableError,
    next_turn,
    take_pointer,
    write_pointer,
)
from kvbus.parts.log.kafka_client import (
    STOP,
    Keys,
    Producer,
    client_options,
    inner,
    insisted,
    leaders,
    partition_of,
    partitions_of,
    shield_bootstrap,
    stop,
    translated_errors,
)
from kvbus.parts.log.location import REQUEST, KafkaLocation

FETCH: Final = 0.2
"""Maximum time in seconds for which one request waits for records while a topic is read to its end.

It is short because such a request may wait in vain: the last offsets of a partition may belong to the markers of a
transaction, which consumers do not get.
"""

COMMIT: Final = 5.0
"""If a transaction has been open for this number of seconds, the next append commits it."""

TRANSACTION: Final = 60.0
"""Time in seconds after which the broker aborts an open transaction and fences its producer."""

EARLIEST: Final = -2
"""Special time in an OffsetRequest, with which the broker returns the first offset of a partition."""

CONFIRM: Final = 5.0
"""Time in seconds between two checks that a reader reads from the brokers that are the leaders of the partitions."""

MAX_RECORDS: Final = 500
"""Maximum number of records that one call of :meth:`KafkaReader.take` returns."""


class KafkaWriter:
    """A writer of one stream in Kafka; see :class:`~kvbus.parts.log.contract.Writer`."""

    def __init__(
        self, location: KafkaLocation, options: dict[str, Any], key: str, producer: Producer, epoch: int
    ) -> None:
        self.epoch = epoch
        self._location = location
        self._options = options
        self._key = key.encode()
        self._producer = producer
        self._begun: float | None = None
        """Time at which the open transaction began; None if no transaction is open."""
        self._failure: FencedError | UnavailableError | None = None
        """The error after which this writer must not append any more; None if there was none."""

    async def append(self, records: Sequence[bytes]) -> int:
        """Append records, and wait until all required replicas have them."""
        return await self._send(self._location.topic, records)

    async def point(self, pointer: Pointer) -> None:
        """Append the pointer to the topic of pointers."""
        await self._send(self._location.pointers, [write_pointer(pointer)])

    async def keeps(self, position: int) -> bool:
        """Return whether Kafka still has the stream's records from ``position`` on.

        Kafka deletes the oldest records of a partition first. So it has them if the first offset of the stream's
        partition is not after ``position``. The partition's leader is asked for that offset.
        """
        client, topic = self._producer.client, self._location.topic
        async with translated_errors(self._location):
            partition = partition_of(self._key.decode(), len(partitions_of(client, topic)))
            leader = client.cluster.leader_for_partition(TopicPartition(topic, partition))
            answer = await client.send(leader, OffsetRequest(-1, 0, [(topic, [(partition, EARLIEST)])]))
            ((_, ((_, code, *_, first),)),) = answer.topics
            if code:
                raise errors.for_code(code)(topic)
        return bool(first <= position)

    async def _send(self, topic: str, values: Sequence[bytes]) -> int:
        if self._failure is not None:
            raise self._failure
        try:
            async with translated_errors(self._location):
                return await insisted(self._location, self._options, self._sent(topic, values))
        except (FencedError, UnavailableError) as error:
            self._failure = error
            raise

    async def _sent(self, topic: str, values: Sequence[bytes]) -> int:
        now = asyncio.get_running_loop().time()
        if self._begun is not None and now - self._begun >= COMMIT:
            await self._producer.commit_transaction()
            self._begun = None
        if self._begun is None:
            await self._producer.begin_transaction()
            self._begun = now
        sent = [await self._producer.send(topic, value, key=self._key) for value in values]
        found = await asyncio.gather(*sent)
        position: int = found[-1].offset
        return position

    async def close(self) -> None:
        """Commit the open transaction, and close the connections."""
        if self._begun is not None and self._failure is None:
            with contextlib.suppress(TimeoutError, FencedError, UnavailableError):
                async with asyncio.timeout(STOP), translated_errors(self._location):
                    await self._producer.commit_transaction()
        await stop(self._producer)


class KafkaReader:
    """A reader of streams in Kafka; see :class:`~kvbus.parts.log.contract.Reader`."""

    def __init__(
        self,
        location: KafkaLocation,
        consumer: AIOKafkaConsumer,
        starts: Mapping[str, int],
        parts: Mapping[str, TopicPartition],
    ) -> None:
        self._location = location
        self._consumer = consumer
        self._parts = parts
        self._starts = {key.encode(): (key, start) for key, start in starts.items()}
        self._next: dict[TopicPartition, int] = {}
        """By partition: the offset after the last record that :meth:`take` has returned."""
        self._known: dict[TopicPartition, int | None] = {}
        """By partition: the broker from which the records were read at the last successful check by :func:`_confirm`.

        It is None if the consumer knew no leader of the partition.
        """
        self._confirmed_at = 0.0

    async def take(self, seconds: float) -> list[Entry]:
        """Return the next records of this reader's streams.

        Leave out the records of other streams in the same partitions.
        """
        found = []
        async with translated_errors(self._location):
            taken = await self._consumer.getmany(timeout_ms=int(1000 * seconds), max_records=MAX_RECORDS)
        for part, records in taken.items():
            # An offset that is lower than the expected one shows that Kafka has lost records, and that the offsets
            # begin again. So read all streams of the partition from its beginning.
            if records[0].offset < self._next.get(part, START):
                for name, (key, _) in self._starts.items():
                    if self._parts[key] == part:
                        self._starts[name] = key, START
            self._next[part] = records[-1].offset + 1
            for record in records:
                wanted = self._starts.get(record.key or b"")
                if wanted is not None and record.offset >= wanted[1]:
                    found.append(Entry(wanted[0], record.offset, record.value or b"", record.timestamp / 1000))
        return found

    async def ends(self) -> dict[str, int]:
        """Return the end offset of each stream's partition.

        Every few seconds, also check that the consumer reads from the brokers that are the leaders of these partitions.
        """
        parts = set(self._parts.values())
        known = _led(self._consumer, parts)
        async with translated_errors(self._location):
            ends = await self._consumer.end_offsets(parts)
        now = asyncio.get_running_loop().time()
        if known != self._known or now - self._confirmed_at >= CONFIRM:
            await _confirm(self._location, self._consumer, known)
            self._known, self._confirmed_at = known, now
        return {key: ends[part] for key, part in self._parts.items()}

    async def reached(self, key: str) -> int:
        """Return the offset of the next record that the consumer reads in the stream's partition."""
        async with translated_errors(self._location):
            position: int = await self._consumer.position(self._parts[key])
        return position

    async def close(self) -> None:
        """Close the connections."""
        await stop(self._consumer)


def _led(consumer: AIOKafkaConsumer, parts: Iterable[TopicPartition]) -> dict[TopicPartition, int | None]:
    """Return the leader of each partition according to the consumer; None if the consumer knows no leader.

    The consumer reads each partition from its leader.
    """
    return {part: inner(consumer).cluster.leader_for_partition(part) for part in parts}


async def _confirm(
    location: KafkaLocation, consumer: AIOKafkaConsumer, known: dict[TopicPartition, int | None]
) -> None:
    """Check that the consumer has read each partition from the broker that most brokers call the partition's leader.

    A broker that is cut off from the other brokers lacks newer records. If kvbus read from it, kvbus could use an epoch
    twice, or abandon an epoch whose writer is running.

    Args:
        location: the settings of the connections.
        consumer: the consumer that has read the partitions.
        known: the broker from which the consumer has read each partition.

    Raises:
        UnavailableError: the consumer has read a partition from another broker, or too few brokers answer.
    """
    client = inner(consumer)
    async with translated_errors(location):
        found = await leaders(client, location.options(), list({part.topic for part in known}))
    if any(found.get(part) != leader for part, leader in known.items()):
        client.force_metadata_update()
        raise UnavailableError("too few brokers agree on a partition's leader, or kvbus has not read from the leader")


class KafkaLog:
    """A log in Kafka; see :class:`~kvbus.parts.log.contract.Log`.

    Args:
        location: the servers, and the name of the topic of records. This topic and the topic of pointers have to exist.
    """

    def __init__(self, location: KafkaLocation) -> None:
        self._location = location
        self.refused: Refused = Refused(maxlen=MAX_REFUSED)

    async def claim(self, key: str) -> KafkaWriter:
        """Become the writer of a stream.

        Start a producer whose transactional id is the stream's key, which fences the former writer's producer. Then
        append a pointer with the next epoch to the topic of pointers.
        """
        async with translated_errors(self._location):
            options = self._location.options()
            producer = Producer(
                **client_options(self._location, options),
                transactional_id=key,
                transaction_timeout_ms=int(1000 * TRANSACTION),
                acks="all",
                max_request_size=2 * 1024 * 1024,
            )
        shield_bootstrap(producer)
        try:
            async with translated_errors(self._location):
                await insisted(self._location, options, producer.start())
            writer = KafkaWriter(self._location, options, key, producer, 0)
            # Read the newest pointer only now. The former writer is fenced, so it cannot append another pointer.
            pointer = next_turn((await self.pointers(key)).get(key))
            await writer.point(pointer)
        except BaseException:
            await stop(producer)
            raise
        writer.epoch = pointer.epoch
        return writer

    async def pointers(self, key: str | None = None) -> dict[str, Pointer]:
        """Read the topic of pointers from its beginning to its end, and return the newest pointer of each stream.

        With ``key``, only the partition of that key is read, and only the pointer of that stream is returned. The topic
        is compacted, so it usually has one record for each stream.
        """
        found: dict[str, Pointer] = {}
        async with contextlib.aclosing(self._everything(self._location.pointers, key)) as records:
            async for record in records:
                take_pointer(found, self.refused, record.key or b"", record.value or b"")
        return found if key is None else {name: found[name] for name in found if name == key}

    async def _everything(self, topic: str, key: str | None = None) -> AsyncGenerator[ConsumerRecord, None]:
        """Yield every record that a topic has now, in the order of each partition.

        With ``key``, read only the key's partition.

        Raises:
            UnavailableError: the records cannot be read to the end, or kvbus cannot find out where the end is.
        """
        time = asyncio.get_running_loop().time
        async with self._consumer(topic) as (consumer, parts):
            wanted = parts if key is None else [parts[partition_of(key, len(parts))]]
            known = _led(consumer, wanted)
            async with translated_errors(self._location):
                ends = await consumer.end_offsets(wanted)
                consumer.assign(wanted)
                await consumer.seek_to_beginning(*wanted)
            for part in wanted:
                position, moved = -1, time()
                while position < ends[part]:
                    async with translated_errors(self._location):
                        records = (await consumer.getmany(part, timeout_ms=int(1000 * FETCH))).get(part, [])
                        before, position = position, await consumer.position(part)
                    if records or position > before:
                        moved = time()
                    elif time() - moved > REQUEST:
                        raise UnavailableError(f"{topic} cannot be read to its end")
                    for record in records:
                        yield record
            await _confirm(self._location, consumer, known)

    async def read(self, starts: Mapping[str, int]) -> KafkaReader:
        """Return a reader of the partitions of these streams.

        It begins in each partition at the lowest position from which one of the partition's streams is to be read.
        """
        async with self._consumer(self._location.topic, keep=True) as (consumer, parts):
            of = {key: parts[partition_of(key, len(parts))] for key in starts}
            first: dict[TopicPartition, int] = {}
            for key, start in starts.items():
                first[of[key]] = min(start, first.get(of[key], start))
            async with translated_errors(self._location):
                consumer.assign(list(first))
                for part, start in first.items():
                    consumer.seek(part, start)
        return KafkaReader(self._location, consumer, starts, of)

    @contextlib.asynccontextmanager
    async def _consumer(
        self, topic: str, *, keep: bool = False
    ) -> AsyncIterator[tuple[AIOKafkaConsumer, list[TopicPartition]]]:
        """Yield a started consumer, and the partitions of a topic. The caller assigns the partitions that it reads.

        The consumer is stopped at the end of the ``async with`` block. With ``keep``, it is stopped only if the block
        has failed.
        """
        # Subscribe to the topic, because the consumer then learns the topic's partitions. The subscription ends below:
        # the caller assigns partitions itself, which aiokafka refuses to a subscribed consumer.
        async with translated_errors(self._location):
            options = self._location.options()
            consumer = AIOKafkaConsumer(
                topic,
                **client_options(self._location, options),
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                key_deserializer=Keys(self.refused),
            )
        shield_bootstrap(consumer)
        try:
            async with translated_errors(self._location):
                await consumer.start()
                parts = partitions_of(inner(consumer), topic)
                consumer.unsubscribe()
            yield consumer, parts
        except BaseException:
            await stop(consumer)
            raise
        if not keep:
            await stop(consumer)
