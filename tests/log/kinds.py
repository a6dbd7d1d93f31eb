"""The logs that the contract's suite runs on: how each is made, trimmed and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete

from kvbus.log.contract import Log, UnavailableError
from kvbus.log.kafka import POINTERS, KafkaLog, Place, partition_of
from tests.log.broker import Broker
from tests.log.directory import DirectoryLog
from tests.transport.loops import PATIENCE

_names = itertools.count()
Result = TypeVar("Result")


async def insist(what: Callable[[], Awaitable[Result]]) -> Result:
    """Ask again for as long as the log cannot be reached."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with contextlib.suppress(UnavailableError):
                return await what()
            await asyncio.sleep(0.02)


class Kind(Protocol):
    async def make(self) -> None:
        """An empty log."""

    def open(self) -> Log:
        """That log, as one process sees it."""

    async def overtake(self, key: str, position: int) -> None:
        """Retention deletes what is before a position."""

    async def restart(self) -> None:
        """What keeps the log is killed, and begins again."""


class Directory:
    def __init__(self, root: Path) -> None:
        self._root = root

    async def make(self) -> None:
        pass

    def open(self) -> DirectoryLog:
        return DirectoryLog(self._root, segment_bytes=1, keep=1000)

    async def overtake(self, key: str, position: int) -> None:
        for path in (self._root / key.replace("%", "%25")).glob("*.log"):
            if int(path.stem) < position:
                path.unlink()

    async def restart(self) -> None:
        """Nothing runs; an append that did not end is what a crash leaves."""
        for stream in self._root.iterdir():
            newest = max(stream.glob("*.log"))
            with newest.open("ab") as file:
                file.write(b"\0\0\0\x09\1\2\3\4half")


class Kafka:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.topic = f"kvbus-{next(_names)}"

    async def make(self, partitions: int = 2) -> None:
        async with self.admin() as admin:
            compacted = {"cleanup.policy": "compact"}
            await admin.create_topics(
                [
                    NewTopic(self.topic, partitions, 1),
                    NewTopic(self.topic + POINTERS, partitions, 1, topic_configs=compacted),
                ]
            )

    @contextlib.asynccontextmanager
    async def admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.broker.address)
        await admin.start()
        try:
            yield admin
        finally:
            await admin.close()

    def open(self) -> KafkaLog:
        return KafkaLog(Place(self.broker.address, self.topic))

    async def overtake(self, key: str, position: int) -> None:
        async with self.admin() as admin:
            parts = {TopicPartition(self.topic, partition_of(key, 2)): RecordsToDelete(before_offset=position)}
            await admin.delete_records(parts)

    async def restart(self) -> None:
        self.broker.kill()
        await asyncio.to_thread(self.broker.start)
