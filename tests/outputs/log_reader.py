"""Readers of a log (Kafka, NATS or Redis) for tests of output drivers, each in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbus.config import OutputConfig
from kvbus.core.stats import OutputStats
from kvbus.parts.log.contract import START, Log, UnavailableError
from kvbus.parts.log.record import Kind, Stream, read
from tests.doubles.payloads import payload, removed
from tests.log.kinds import Kafka, Nats, Redis, insist

TOPIC = b"kv@pod@model"


class LogReader:
    """A reader of one stream of a log. It returns the valid batches, and omits batches of a fenced writer."""

    def __init__(self, log: Log, key: str) -> None:
        self._taken: deque[tuple[bytes, int, bytes]] = deque()
        self._given = 0
        self._over = threading.Event()
        self.stats = OutputStats()
        """The statistics of the output that writes the stream, which say what the server has confirmed."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read(log, key)))
        self._thread.start()

    async def _read(self, log: Log, key: str) -> None:
        last = (0, 0)
        reader = await insist(lambda: log.read({key: START}))
        while not self._over.is_set():
            with contextlib.suppress(UnavailableError):
                for entry in await reader.take(0.02):
                    record = read(entry.data)
                    if record.kind is Kind.BATCH and (record.epoch, record.seq) >= last:
                        last = (record.epoch, record.seq + 1)
                        self._taken.append((TOPIC, record.origin, record.payload))
        await reader.close()

    def take(self) -> list[tuple[bytes, int, bytes]]:
        # the reader may have a batch before the server has confirmed it to the writer, so return only confirmed batches
        count = min(len(self._taken), self.stats.batches - self._given)
        self._given += count
        return [self._taken.popleft() for _ in range(count)]

    def ask(self, start: int) -> None:
        raise NotImplementedError

    def answers(self) -> list[Any]:
        raise NotImplementedError

    def close(self) -> None:
        self._over.set()
        self._thread.join()


class LogKind:
    """The properties of one kind of log. ``server`` is the log server of the tests."""

    asks = False
    loses = False
    seen = False
    sends_state = False
    server: Any
    log: Kafka | Nats | Redis

    def __init__(self, make: Callable[[Any], Kafka | Nats | Redis]) -> None:
        self._make = make

    def settings(self, directory: Path) -> dict[str, Any]:
        self.log = log = self._make(self.server)
        made = threading.Thread(target=lambda: asyncio.run(log.make()))
        made.start()
        made.join()
        return {"endpoint": f"tcp://{self.server.address}", **log.settings()}

    def connect(self, config: OutputConfig, stream: int, *, slow: bool) -> LogReader:
        assert config.log is not None
        return LogReader(self.log.open(), Stream(config.log.cluster, "", TOPIC.decode(), stream).key)

    def joined(self, stats: OutputStats, readers: list[LogReader]) -> bool:
        for reader in readers:
            reader.stats = stats
        return True

    def payload(self, number: int, size: int) -> bytes:
        return payload(removed([number, *range(2**63, 2**63 + size // 9)]))

    def places(self, config: OutputConfig, stream: int) -> list[str]:
        return []

    def occupied(self, place: str) -> contextlib.AbstractContextManager[object]:
        raise NotImplementedError
