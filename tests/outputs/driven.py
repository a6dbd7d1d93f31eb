"""An output driver under test, with substitutes for what the daemon provides, and with readers of its output."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvbus.config import OutputConfig, load, parts
from kvbus.core.commands import AnswerReplay, Publish
from kvbus.core.events import RelayEvent, ReplayAsked
from kvbus.core.outputs.journal import Journal
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.stats import OutputStats
from kvbus.core.wire.frames import parse_replay_request
from kvbus.core.wire.profiles import PROFILES
from kvbus.parts.outputs.contract import OutputDriver, Services
from kvbus.transport.sockets import PLAIN
from tests.doubles.answers import answer_of
from tests.doubles.bus import eventually
from tests.outputs.readers import KINDS, Batch, Reader
from tests.transport.loops import turns

TOPIC = b"kv@pod@model"
STREAMS = (0, 1)


def no_snapshot(_start: int) -> Any:
    raise AssertionError("the journal holds everything")


def make_driver(
    name: str, directory: Path, settings: dict[str, Any], services: Services
) -> tuple[OutputConfig, OutputDriver]:
    """Return a driver of an output type, and its configuration."""
    assert name in KINDS, f"tests/outputs/readers.py has no entry for the output type {name!r}"
    keys = {"type": name, **KINDS[name].settings(directory), **settings}
    # set this after the checks, which refuse a log without the state
    state = {"on_subscribe": keys.pop("on_subscribe")}
    overrides = {"model": "m", "sources": [{"endpoint": "ipc://engine"}], "outputs": [keys]}
    config = load(None, env={}, overrides=overrides).outputs[0].model_copy(update=state)
    return config, parts.load(parts.OUTPUTS, name)(0, config, services)


class Driven:
    """An output driver that has not opened a stream yet, and the two streams that it may serve."""

    def __init__(self, name: str, directory: Path, sessions: int, **settings: Any) -> None:
        self.stats = OutputStats()
        self.fed: list[ReplayAsked] = []
        self.sent: dict[int, list[Batch]] = {stream: [] for stream in STREAMS}
        self.readers: list[Reader] = []
        self._streams = {
            stream: OutputStream(TOPIC, PROFILES["vllm"], Journal(10**6, 2**40), heartbeat=0, rank=0)
            for stream in STREAMS
        }
        services = Services(self.stats, self._feed, lambda: 0.0, sessions)
        self.config, self.driver = make_driver(name, directory, {"on_subscribe": "nothing", **settings}, services)
        self.kind = KINDS[name]

    def _feed(self, event: RelayEvent) -> None:
        assert isinstance(event, ReplayAsked)
        self.fed.append(event)
        request = parse_replay_request(event.frames)
        assert request is not None
        answer = answer_of(self._streams[event.stream], request, no_snapshot)
        self.driver.answer(AnswerReplay(event.output, event.stream, answer), answer.messages())

    async def reader(self, stream: int = 0, *, slow: bool = False) -> Reader:
        """Connect another reader, and wait until it will get all batches that are published from now on."""
        reader = self.kind.connect(self.config, stream, slow=slow)
        self.readers.append(reader)
        await self.joined()
        return reader

    async def joined(self) -> None:
        await eventually(lambda: self.kind.joined(self.stats, self.readers), "every reader let in")

    def publish(self, count: int, stream: int = 0, *, size: int = 10, events: int = 1) -> None:
        """Pass ``count`` batches to the driver. A driver may keep them until `flush`."""
        for _ in range(count):
            payload = self.kind.payload(len(self.sent[stream]), size)
            seq = self._streams[stream].append(payload, 0.0)
            self.sent[stream].append((TOPIC, seq, payload))
            self.driver.publish(Publish(0, stream, TOPIC, seq, payload, events))

    def send(self, count: int, stream: int = 0, **how: int) -> None:
        self.publish(count, stream, **how)
        self.driver.flush()

    @property
    def dropped(self) -> int:
        return sum(self.stats.dropped_batches.values())


@contextlib.asynccontextmanager
async def driving(
    name: str, directory: Path, *, opened: int = 1, sessions: int = 4, **settings: Any
) -> AsyncIterator[Driven]:
    """Yield a driver with ``opened`` open streams. Close it at the end as the daemon does.

    The driver sends at most ``sessions`` replay answers at the same time.
    """
    driven = Driven(name, directory, sessions, **settings)
    try:
        for stream in STREAMS[:opened]:
            driven.driver.open(stream, TOPIC, PLAIN)
        yield driven
    finally:
        for stream in driven.driver.streams:
            driven.driver.close(stream)
        for reader in driven.readers:
            reader.close()
        await eventually(lambda: not driven.driver.busy, "everything closed")
        await turns()
