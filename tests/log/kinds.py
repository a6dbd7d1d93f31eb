"""The kinds of logs on which tests run: how a test creates each, deletes its old records, and stops its server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.errors import TopicAlreadyExistsError

from kvbus.config import KafkaTopic, NatsStream, RedisKeys
from kvbus.parts.log.contract import Log, UnavailableError
from kvbus.parts.log.kafka import KafkaLog
from kvbus.parts.log.kafka_client import partition_of
from kvbus.parts.log.location import POINTERS, KafkaLocation, NatsLocation, RedisLocation
from kvbus.parts.log.nats import NatsLog
from kvbus.parts.log.nats_client import Link
from kvbus.parts.log.nats_reader import SHIFT
from kvbus.parts.log.redis import RedisLog
from kvbus.parts.log.redis_client import names
from tests.log.broker import PATIENCE, Broker
from tests.log.clusters import PRIMARY, Cluster
from tests.log.memory import Kept, MemoryLog
from tests.log.nats_server import NatsServer
from tests.log.redis_server import RedisServer

_names = itertools.count()
Result = TypeVar("Result")


async def insist(what: Callable[[], Awaitable[Result]]) -> Result:
    """Call a function again until it no longer reports that the log is unavailable, and return its result."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(UnavailableError):
                return await what()
            await asyncio.sleep(0.02)


def more(address: str) -> dict[str, Any]:
    """Return the configuration key `more_servers` for an address list: all of its servers except the first."""
    _, *others = address.split(",")
    return {"more_servers": [f"tcp://{other}" for other in others]} if others else {}


def found_by(kind: Any, monkeypatch: Any) -> tuple[str, dict[str, Any]]:
    """Return the type of discovery that reads a log, and the configuration keys for it."""
    if isinstance(kind, Memory):  # kvbus has no discovery for a log in memory, so it replaces Kafka's
        monkeypatch.setattr("kvbus.parts.discovery.kafka.KafkaLog", lambda _: kind.open())
        return "kafka", {"endpoint": "tcp://127.0.0.1:9"}
    ((name, named),) = kind.settings().items()
    return name, {"endpoint": kind.endpoint, **named}


class Kind(Protocol):
    async def make(self) -> None:
        """Create an empty log."""

    def open(self) -> Log:
        """Return a client of the log, as one process uses it."""

    async def overtake(self, key: str, position: int) -> None:
        """Delete the records of a stream before a position, as the log's retention does."""

    async def squeeze(self, key: str, records: int) -> None:
        """Set the log's own size limit so that it keeps only about ``records`` records of its only stream, the
        newest ones.
        """

    async def restart(self) -> None:
        """Kill the log's server, and start it again."""


class Memory:
    """A log in the memory of this process."""

    def __init__(self) -> None:
        self.streams: dict[str, Kept] = {}

    async def make(self) -> None:
        """Do nothing: the first append creates the log."""

    def open(self) -> MemoryLog:
        return MemoryLog(self.streams)

    async def overtake(self, key: str, position: int) -> None:
        self.streams[key].delete_before(position)

    async def squeeze(self, key: str, records: int) -> None:
        self.streams[key].delete_before(self.streams[key].end - records)

    async def restart(self) -> None:
        """Do nothing, because a log in memory has no server."""


class Kafka:
    def __init__(self, broker: Broker | Cluster, partitions: int = 2, replicas: int = 1, **pointers: str) -> None:
        self.broker = broker
        self._replicas = replicas
        self.topic = f"kvbus-{next(_names)}"
        self.partitions = partitions
        self._compacted = {"cleanup.policy": "compact", **pointers}

    async def make(self) -> None:
        await self.create(
            NewTopic(self.topic, self.partitions, self._replicas),
            NewTopic(self.topic + POINTERS, self.partitions, self._replicas, topic_configs=self._compacted),
        )

    async def create(self, *topics: NewTopic) -> None:
        """Create topics as soon as enough brokers for them run."""
        for topic in topics:
            await insist(functools.partial(self._create, topic))

    async def _create(self, topic: NewTopic) -> None:
        async with self.admin() as admin:
            answer = await admin.create_topics([topic])
        if any(code not in {0, TopicAlreadyExistsError.errno} for _, code, *_ in answer.topic_errors):
            raise UnavailableError("the brokers do not make it")

    @contextlib.asynccontextmanager
    async def admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.broker.address)
        try:
            await admin.start()
            yield admin
        finally:
            await admin.close()

    def settings(self) -> dict[str, Any]:
        """Return the configuration keys of an output that writes the log, without its endpoint."""
        return {"kafka": {"topic": self.topic, **more(self.broker.address)}}

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.broker.address.split(',')[0]}"

    def open(self) -> KafkaLog:
        return KafkaLog(self.place(self.broker.address))

    def place(self, server: str, **keys: object) -> KafkaLocation:
        return KafkaLocation(server, KafkaTopic.model_validate({"topic": self.topic, **keys}))

    async def overtake(self, key: str, position: int) -> None:
        async with self.admin() as admin:
            parts = {
                TopicPartition(self.topic, partition_of(key, self.partitions)): RecordsToDelete(before_offset=position)
            }
            await admin.delete_records(parts)

    async def squeeze(self, key: str, records: int) -> None:
        async with self.admin() as admin:
            log = self.open()
            reader = await insist(lambda: log.read({key: 0}))
            end = (await reader.ends())[key]
            await reader.close()
            part = TopicPartition(self.topic, partition_of(key, self.partitions))
            await admin.delete_records({part: RecordsToDelete(before_offset=end - records)})

    async def restart(self) -> None:
        self.broker.kill()
        await asyncio.to_thread(self.broker.start)


class Redis:
    def __init__(self, server: RedisServer, sentinels: Cluster | None = None) -> None:
        self.server = server
        self._sentinels = sentinels
        self.prefix = f"kvbus-{next(_names)}"

    async def make(self) -> None:
        """Do nothing: the first append creates the log."""

    def settings(self) -> dict[str, Any]:
        """Return the configuration keys of an output that writes the log, without its endpoint."""
        named = {} if self._sentinels is None else {"sentinel": PRIMARY, **more(self._sentinels.address)}
        return {"redis": {"prefix": self.prefix, **named}}

    @property
    def endpoint(self) -> str:
        return f"tcp://{self._address.split(',')[0]}"

    def open(self) -> RedisLog:
        named = {} if self._sentinels is None else {"sentinel": PRIMARY}
        return RedisLog(self.place(self._address, **named))

    @property
    def _address(self) -> str:
        return (self.server if self._sentinels is None else self._sentinels).address

    def place(self, server: str, **keys: object) -> RedisLocation:
        return RedisLocation(server, RedisKeys.model_validate({"prefix": self.prefix, **keys}))

    async def overtake(self, key: str, position: int) -> None:
        async with self.server.client() as client:
            await client.xtrim(names(self.place(""), key)[0], minid=position, approximate=False)

    async def squeeze(self, key: str, records: int) -> None:
        async with self.server.client() as client:
            await client.xtrim(names(self.place(""), key)[0], maxlen=records, approximate=False)

    async def restart(self) -> None:
        self.server.kill()
        await asyncio.to_thread(self.server.start)


class Nats:
    def __init__(self, server: NatsServer | Cluster, replicas: int = 1) -> None:
        self.server = server
        self._replicas = replicas
        self.stream = f"kvbus-{next(_names)}"

    async def make(self) -> None:
        for name, limits in ((self.stream, {}), (self.stream + POINTERS, {"max_msgs_per_subject": 1})):
            await self.api(
                f"STREAM.CREATE.{name}", name=name, subjects=[f"{name}.>"], num_replicas=self._replicas, **limits
            )

    async def api(self, subject: str, **request: Any) -> Any:
        """Send a request to JetStream's API as an administrator, and return the answer."""
        link = Link(self.place(self.server.address))
        try:
            return await insist(lambda: link.api(subject, **request))
        finally:
            await link.close()

    def settings(self) -> dict[str, Any]:
        """Return the configuration keys of an output that writes the log, without its endpoint."""
        return {"nats": {"stream": self.stream, **more(self.server.address)}}

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.server.address.split(',')[0]}"

    def open(self) -> NatsLog:
        return NatsLog(self.place(self.server.address))

    def place(self, server: str, **keys: object) -> NatsLocation:
        return NatsLocation(server, NatsStream.model_validate({"stream": self.stream, **keys}))

    async def overtake(self, key: str, position: int) -> None:
        await self.api(f"STREAM.PURGE.{self.stream}", filter=f"{self.stream}.{key}", seq=position >> SHIFT)

    async def squeeze(self, key: str, records: int) -> None:
        """Limit the log to ``records`` messages for a moment, so that the server deletes older ones, and remove the
        limit again.
        """
        for most in (records, -1):
            await self.api(
                f"STREAM.UPDATE.{self.stream}", name=self.stream, subjects=[f"{self.stream}.>"], max_msgs=most
            )

    async def restart(self) -> None:
        self.server.kill()
        await asyncio.to_thread(self.server.start)
