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
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError, ProducerFenced
from aiokafka.partitioner import murmur2

from kvbus.log.contract import Entry, FencedError, Pointer, UnavailableError, next_turn, read_pointer, write_pointer

POINTERS: Final = "-pointers"
"""What the topic of pointers has behind the name of the other one."""

REQUEST: Final = 10.0
"""Seconds that the broker has for a request, all attempts together."""

COMMIT: Final = 5.0
"""Seconds after which the next append also commits."""

TRANSACTION: Final = 60.0
"""Seconds after which the broker ends a transaction by itself, and fences who had it."""

STOP: Final = 2.0
"""Seconds that a client has to close its connections."""

MOST: Final = 500
"""Records taken at once."""


@dataclass(frozen=True)
class Place:
    """Where a log is.

    Attributes:
        servers: ``host:port``, several with commas.
        topic: of the records; that of the pointers has :data:`POINTERS` behind it.
        options: for each of aiokafka's clients: TLS and authentication.
    """

    servers: str
    topic: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def client(self) -> dict[str, Any]:
        """What every client takes."""
        return {"bootstrap_servers": self.servers, "request_timeout_ms": int(1000 * REQUEST), **self.options}


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """Errors of the client in the words of the contract."""
    try:
        yield
    except ProducerFenced as error:
        raise FencedError("another producer has this transactional id") from error
    # an assertion is how the client says that a transaction has failed before
    except (KafkaError, OSError, TimeoutError, IllegalStateError, AssertionError) as error:
        raise UnavailableError(f"{type(error).__name__}: {error}") from error


async def _stop(client: AIOKafkaConsumer | AIOKafkaProducer) -> None:
    """Close a client's connections.

    One that has only just begun is cancelled by its own stop, so this is a task of its own. Whatever else goes wrong,
    nobody needs the client any more.
    """
    stopping = asyncio.ensure_future(client.stop())
    done, _ = await asyncio.wait([stopping], timeout=STOP)
    if not done:
        stopping.cancel()
    elif not stopping.cancelled():
        stopping.exception()


def partition_of(key: str, partitions: int) -> int:
    """Where Kafka's own clients put a key."""
    return int(murmur2(key.encode()) & 0x7FFFFFFF) % partitions


class KafkaWriter:
    """See :class:`~kvbus.log.contract.Writer`."""

    def __init__(self, place: Place, key: str, producer: AIOKafkaProducer, epoch: int) -> None:
        self.epoch = epoch
        self._place = place
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
        await self._send(self._place.topic + POINTERS, [write_pointer(pointer)])

    async def _send(self, topic: str, values: Sequence[bytes]) -> int:
        if self._over is not None:
            raise self._over
        try:
            with _said():
                return await self._sent(topic, values)
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
        with contextlib.suppress(FencedError, UnavailableError), _said():
            if self._begun is not None and self._over is None:
                await self._producer.commit_transaction()
        await _stop(self._producer)


class KafkaReader:
    """See :class:`~kvbus.log.contract.Reader`."""

    def __init__(self, consumer: AIOKafkaConsumer, starts: Mapping[str, int]) -> None:
        self._consumer = consumer
        self._starts = {key.encode(): (key, start) for key, start in starts.items()}

    async def take(self, seconds: float) -> list[Entry]:
        """Take what the client has fetched."""
        found = []
        with _said():
            taken = await self._consumer.getmany(timeout_ms=int(1000 * seconds), max_records=MOST)
        for records in taken.values():
            for record in records:
                wanted = self._starts.get(record.key or b"")
                if wanted is not None and record.offset >= wanted[1]:
                    found.append(Entry(wanted[0], record.offset, record.value or b""))
        return found

    async def close(self) -> None:
        """Close the connections."""
        await _stop(self._consumer)


class KafkaLog:
    """See :class:`~kvbus.log.contract.Log`.

    Args:
        place: where it is. Both topics have to be there.
    """

    def __init__(self, place: Place) -> None:
        self._place = place

    async def claim(self, key: str) -> KafkaWriter:
        """A producer with the stream's transactional id, and the next epoch of the stream in the topic of pointers."""
        producer = AIOKafkaProducer(
            **self._place.client,
            transactional_id=key,
            transaction_timeout_ms=int(1000 * TRANSACTION),
            acks="all",
            max_request_size=2 * 1024 * 1024,
        )
        try:
            with _said():
                await producer.start()
            writer = KafkaWriter(self._place, key, producer, 0)
            # whoever had the stream has put its last pointer: nothing of it comes any more
            pointer = next_turn((await self._pointers_of(key)).get(key))
            await writer.point(pointer)
        except BaseException:
            await _stop(producer)
            raise
        writer.epoch = pointer.epoch
        return writer

    async def pointers(self) -> dict[str, Pointer]:
        """Read the whole topic of pointers: as a rule one record a stream."""
        return await self._pointers_of(None)

    async def _pointers_of(self, key: str | None) -> dict[str, Pointer]:
        topic = self._place.topic + POINTERS
        found: dict[str, Pointer] = {}
        async with self._consumer(topic) as (consumer, parts):
            wanted = parts if key is None else [parts[partition_of(key, len(parts))]]
            with _said():
                ends = await consumer.end_offsets(wanted)
                consumer.assign(wanted)
                await consumer.seek_to_beginning(*wanted)
                for part in wanted:
                    while await consumer.position(part) < ends[part]:
                        records = (await consumer.getmany(part, timeout_ms=int(1000 * REQUEST))).get(part, [])
                        if not records and await consumer.position(part) < ends[part]:
                            raise UnavailableError(f"{topic} cannot be read to its end")
                        for record in records:
                            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                                found[(record.key or b"").decode()] = read_pointer(record.value or b"")
        return found

    async def read(self, starts: Mapping[str, int]) -> KafkaReader:
        """Read the partitions of these streams, each from the first of their positions on."""
        async with self._consumer(self._place.topic, keep=True) as (consumer, parts):
            first: dict[TopicPartition, int] = {}
            for key, start in starts.items():
                part = parts[partition_of(key, len(parts))]
                first[part] = min(start, first.get(part, start))
            with _said():
                consumer.assign(list(first))
                for part, start in first.items():
                    consumer.seek(part, start)
        return KafkaReader(consumer, starts)

    @contextlib.asynccontextmanager
    async def _consumer(
        self, topic: str, *, keep: bool = False
    ) -> AsyncIterator[tuple[AIOKafkaConsumer, list[TopicPartition]]]:
        """A consumer, and the partitions of a topic.

        It is stopped behind the block, with ``keep`` only if something went wrong.
        """
        # by a subscription it learns of the partitions; which of them it reads is another matter
        consumer = AIOKafkaConsumer(topic, **self._place.client, auto_offset_reset="earliest", enable_auto_commit=False)
        try:
            with _said():
                await consumer.start()
                parts = [TopicPartition(topic, number) for number in sorted(consumer.partitions_for_topic(topic) or ())]
                consumer.unsubscribe()
            yield consumer, parts
        except BaseException:
            await _stop(consumer)
            raise
        if not keep:
            await _stop(consumer)

    async def close(self) -> None:
        """Writers and readers have connections of their own."""
