"""A log in Kafka: one topic for records, a compacted one for pointers. Needs the extra ``kafka``.

A writer is a producer whose transactional id is the stream's key: the broker refuses what a former one of the same id
sends from the moment on when the next one has its id. Transactions are used for that fence alone. Readers see records
before the commit, which comes with the leases: a commit for each batch would cost 20 ms, and one that a dead writer has
left open would hold up every stream of its partition. An aborted record is one that was appended twice or by a writer
before, which (epoch, seq) tells.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition, errors
from aiokafka.client import AIOKafkaClient

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
    END,
    FIRST,
    STOP,
    Fetched,
    Producer,
    begin,
    client_options,
    fetch,
    insisted,
    leaders,
    offset,
    partition_of,
    partitions_of,
    said,
    stop,
    topic_client,
)
from kvbus.parts.log.place import REQUEST, Place

FETCH: Final = 0.2
"""Seconds to wait for records at a time. Behind the last ones are a transaction's own, which nobody is given."""

COMMIT: Final = 5.0
"""Seconds after which the next append also commits."""

TRANSACTION: Final = 60.0
"""Seconds after which the broker ends a transaction by itself, and fences who had it."""

CONFIRM: Final = 5.0
"""Seconds for which kvbus believes who leads a partition."""


class KafkaWriter:
    """See :class:`~kvbus.parts.log.contract.Writer`."""

    def __init__(self, place: Place, options: dict[str, Any], key: str, producer: Producer, epoch: int) -> None:
        self.epoch = epoch
        self._place = place
        self._options = options
        self._key = key.encode()
        self._producer = producer
        self._begun: float | None = None
        """When the open transaction began."""
        self._over: FencedError | UnavailableError | None = None
        """Why the turn is over."""

    async def append(self, records: Sequence[bytes]) -> int:
        """Append, and wait until every replica that has to has them."""
        return await self._send(self._place.topic, records)

    async def point(self, pointer: Pointer) -> None:
        """Put the pointer."""
        await self._send(self._place.pointers, [write_pointer(pointer)])

    async def keeps(self, position: int) -> bool:
        """Ask the leader of the partition for its first offset."""
        client = self._producer.client
        async with said(self._place):
            parts = partitions_of(client, self._place.topic)
            part = parts[partition_of(self._key.decode(), len(parts))]
            return await offset(client, client.cluster.leader_for_partition(part), part, FIRST) <= position

    async def _send(self, topic: str, values: Sequence[bytes]) -> int:
        if self._over is not None:
            raise self._over
        try:
            async with said(self._place):
                return await insisted(self._place, self._options, self._sent(topic, values))
        except (FencedError, UnavailableError) as error:
            self._over = error
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
        """Commit what is open, and close the connections."""
        if self._begun is not None and self._over is None:
            with contextlib.suppress(TimeoutError, FencedError, UnavailableError):
                async with asyncio.timeout(STOP), said(self._place):
                    await self._producer.commit_transaction()
        await stop(self._producer)


class Consumer:
    """A consumer of a topic, and a client that asks the brokers about the topic.

    Args:
        place: where the log is.
        consumer: reads the records.
        client: knows the brokers.
        topic: the topic.
        refused: gets batches that cannot be decoded.
    """

    def __init__(
        self, place: Place, consumer: AIOKafkaConsumer, client: AIOKafkaClient, topic: str, refused: Refused
    ) -> None:
        self.consumer = consumer
        self.parts = partitions_of(client, topic)
        self._place = place
        self._client = client
        self._topic = topic
        self._refused = refused
        self._leaders: dict[TopicPartition, int] = {}
        self._leaders_at = -CONFIRM

    async def take(self, positions: Mapping[TopicPartition, int], seconds: float) -> Fetched:
        """Take the next records of these partitions: of each from its position on."""
        async with said(self._place):
            return await fetch(self.consumer, positions, seconds, self._refused)

    async def ends(self, parts: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Ask the leader of each partition for its end.

        The leaders are those that most of the brokers name. A consumer that reads a broker which is cut off from the
        others does not come to that end. Otherwise it would hide what was appended since: an epoch would be handed out
        twice, or one that lives be given up.

        Raises:
            UnavailableError: too few brokers say who leads a partition, or the leader does not answer.
        """
        time = asyncio.get_running_loop().time
        async with said(self._place):
            if time() - self._leaders_at >= CONFIRM:
                self._leaders = await leaders(self._client, self._place.options(), self._topic)
                self._leaders_at = time()
            ends = {}
            for part in parts:
                if part not in self._leaders:
                    self._leaders_at = -CONFIRM
                    raise UnavailableError("too few brokers say who leads a partition")
                try:
                    ends[part] = await offset(self._client, self._leaders[part], part, END)
                except errors.KafkaError:
                    self._leaders_at = -CONFIRM
                    raise
        return ends

    async def reached(self, part: TopicPartition) -> int:
        """Return the offset after the last record that was taken of a partition."""
        async with said(self._place):
            position: int = await self.consumer.position(part)
        return position

    async def close(self) -> None:
        """Close the connections."""
        await stop(self.consumer, self._client)


class KafkaReader:
    """See :class:`~kvbus.parts.log.contract.Reader`."""

    def __init__(self, consumer: Consumer, starts: Mapping[str, int], parts: Mapping[str, TopicPartition]) -> None:
        self._consumer = consumer
        self._parts = parts
        self._starts = {key.encode(): (key, start) for key, start in starts.items()}
        self._begin: dict[TopicPartition, int] = {}
        """The first offset wanted of each partition."""
        self._next: dict[TopicPartition, int] = {}
        """The offset after the last record that was taken of a partition."""
        for key, start in starts.items():
            self._begin[parts[key]] = min(start, self._begin.get(parts[key], start))
        consumer.consumer.assign(list(self._begin))
        for part, start in self._begin.items():
            consumer.consumer.seek(part, start)

    async def take(self, seconds: float) -> list[Entry]:
        """Take what the client has fetched."""
        found = []
        taken = await self._consumer.take(self._begin | self._next, seconds)
        for part, records in taken.items():
            if records[0].offset < self._next.get(part, START):  # the log has lost what was taken, and begins again
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
        """Ask the brokers for the ends of the partitions."""
        ends = await self._consumer.ends(self._begin)
        return {key: ends[part] for key, part in self._parts.items()}

    async def reached(self, key: str) -> int:
        """Where the client is in the stream's partition."""
        return await self._consumer.reached(self._parts[key])

    async def close(self) -> None:
        """Close the connections."""
        await self._consumer.close()


class KafkaLog:
    """See :class:`~kvbus.parts.log.contract.Log`.

    Args:
        place: where it is. Both topics have to be there.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self.refused: Refused = Refused(maxlen=MAX_REFUSED)

    async def claim(self, key: str) -> KafkaWriter:
        """A producer with the stream's transactional id, and the next epoch of the stream in the topic of pointers."""
        async with said(self._place):
            options = self._place.options()
            producer = Producer(
                **client_options(self._place, options),
                transactional_id=key,
                transaction_timeout_ms=int(1000 * TRANSACTION),
                acks="all",
                max_request_size=2 * 1024 * 1024,
            )
        try:
            async with said(self._place):
                await insisted(self._place, options, begin(producer.start()))
            writer = KafkaWriter(self._place, options, key, producer, 0)
            # whoever had the stream has put its last pointer: nothing of it comes any more
            pointer = next_turn((await self.pointers(key)).get(key))
            await writer.point(pointer)
        except BaseException:
            await stop(producer)
            raise
        writer.epoch = pointer.epoch
        return writer

    async def pointers(self, key: str | None = None) -> dict[str, Pointer]:
        """Read the whole topic of pointers, or the partition of a key: as a rule one record a stream."""
        found: dict[str, Pointer] = {}
        async with contextlib.aclosing(self._everything(self._place.pointers, key)) as records:
            async for record in records:
                take_pointer(found, self.refused, record.key or b"", record.value or b"")
        return found if key is None else {name: found[name] for name in found if name == key}

    async def _everything(self, topic: str, key: str | None = None) -> AsyncGenerator[ConsumerRecord, None]:
        """Every record that is in a topic now, or in the partition of a key: each partition in its order.

        Raises:
            UnavailableError: they cannot be read to the end, or nobody knows whether that was the end.
        """
        time = asyncio.get_running_loop().time
        opened = await self._consumer(topic)
        try:
            wanted = opened.parts if key is None else [opened.parts[partition_of(key, len(opened.parts))]]
            ends = await opened.ends(wanted)
            opened.consumer.assign(wanted)
            await opened.consumer.seek_to_beginning(*wanted)
            for part in wanted:
                position, moved = await opened.reached(part), time()
                while position < ends[part]:
                    records = (await opened.take({part: position}, FETCH)).get(part, [])
                    before, position = position, await opened.reached(part)
                    if records or position > before:
                        moved = time()
                    elif time() - moved > REQUEST:
                        raise UnavailableError(f"{topic} cannot be read to its end")
                    for record in records:
                        yield record
        finally:
            await opened.close()

    async def read(self, starts: Mapping[str, int]) -> KafkaReader:
        """Read the partitions of these streams, each from the first of their positions on."""
        opened = await self._consumer(self._place.topic)
        parts = {key: opened.parts[partition_of(key, len(opened.parts))] for key in starts}
        return KafkaReader(opened, starts, parts)

    async def _consumer(self, topic: str) -> Consumer:
        """Open a consumer of a topic that reads no partition yet."""
        async with said(self._place):
            options = self._place.options()
            client = await topic_client(self._place, options, topic)
            consumer = AIOKafkaConsumer(
                **client_options(self._place, options),
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                metadata_max_age_ms=int(1000 * CONFIRM),
            )
            try:
                await begin(consumer.start())
                return Consumer(self._place, consumer, client, topic, self.refused)
            except BaseException:
                await stop(consumer, client)
                raise

    async def close(self) -> None:
        """Writers and readers have connections of their own."""
