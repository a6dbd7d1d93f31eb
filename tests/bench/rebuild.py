"""How long a reader takes from nothing against many streams of one real log, and where the time goes.

``python -m tests.bench.rebuild kafka --streams 10 --streams 1000``. The log is a server of its own, started for this; each
stream has a state and batches behind it, of as many bytes again, from a simulated engine whose cache is full. The reader
begins at the pointers and has one reader of the log; each stream has a follower and a :class:`~kvbus.client.BlockView`.

``network`` is waiting for the log, ``client`` the CPU of its Python client, ``decode`` checksums, unpacking, numbers and
batches, ``apply`` the views. At the end each holds what the engine holds. Then the same by ``kvbus run`` as a process, up
to a router that holds every block of every stream (``kvbus``).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from kvbus.client.view import BlockView
from kvbus.core.commands import Publish, SendState
from kvbus.core.events import BatchReceived, SourceUp, Subscribed
from kvbus.core.normalizing.rules import Rules
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.sequencing.settings import Settings
from kvbus.core.source_spec import SourceSpec
from kvbus.core.types import Reason
from kvbus.core.wire import codec
from kvbus.core.wire.profiles import PROFILES
from kvbus.daemon.collector import rest_collector
from kvbus.parts.log.contract import Pointer
from kvbus.parts.log.follower import Follower
from kvbus.parts.log.record import Kind, Stream, divided
from kvbus.tools.sim.dialects import DIALECTS
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import synthetic
from tests.log import broker, kinds, nats_server, redis_server
from tests.log.records import record

from .topic_reader import TopicReader

AT_ONCE: Final = 16
"""Streams written side by side."""

SERVERS: Final[dict[str, Any]] = {
    "kafka": (broker.Broker, kinds.Kafka),
    "nats": (nats_server.NatsServer, kinds.Nats),
    "redis": (redis_server.RedisServer, kinds.Redis),
}
RUN: Final = """
from kvbus.cli import main
from kvbus.parts.discovery.streams import LogStreams
LogStreams.give_up = 3600.0  # nobody writes leases meanwhile
main()
"""

MOST: Final = 300.0
"""Seconds that one reading may take."""


@dataclass
class Times:
    """Seconds, and bytes of records."""

    streams: int
    blocks: int = 0
    taken_mb: float = 0.0
    written_mb: float = 0.0
    pointers: float = 0.0
    network: float = 0.0
    client: float = 0.0
    decode: float = 0.0
    apply: float = 0.0
    whole: float = 0.0
    kvbus: float = 0.0


class Content:
    """The records of one stream, the same for all: a state, and batches behind it. What is true at the end."""

    def __init__(self, blocks: int) -> None:
        engine = SimEngine(DIALECTS["vllm-0.33"], synthetic(0, 0), options=EngineOptions(blocks=blocks, max_running=8))
        relay = Relay(
            [SourceSpec("engine", 0, Settings(replay=False), Rules())],
            [OutputSpec("log", PROFILES["vllm"].without_tokens(), [b"t"], heartbeat=0)],
        )
        batches = _published(relay, engine)
        for _ in islice(batches, 400):
            pass
        state = _state(relay)
        self.records = [(Kind.STATE if at else Kind.CLEAR, piece) for at, piece in enumerate(state)]
        left = sum(map(len, state))
        for parts in batches:
            self.records += [(Kind.BATCH, part) for part in parts]
            left -= sum(map(len, parts))
            if left <= 0:
                break
        self.live = {entry["hash"] for entry in engine.truth()}
        self.states = len(state)

    def written(self, epoch: int) -> list[bytes]:
        """As they stand in the log."""
        return [
            record(kind, epoch, seq, payload=payload, origin=seq, more=kind is not Kind.BATCH and seq + 1 < self.states)
            for seq, (kind, payload) in enumerate(self.records)
        ]


def _published(relay: Relay, engine: SimEngine) -> Iterator[list[bytes]]:
    relay.handle(SourceUp(0), 0.0)
    seq = 0
    while (data := engine.step(0.0)) is not None:
        commands = relay.handle(BatchReceived(0, [b"", seq.to_bytes(8, "big"), data]), 0.0)
        yield [
            part
            for each in commands
            if isinstance(each, Publish) and each.events
            for part in divided(each.payload, each.events)
        ]
        seq += 1


def _state(relay: Relay) -> list[bytes]:
    (sent,) = [each for each in relay.handle(Subscribed(0, 0, (1,)), 0.0) if isinstance(each, SendState)]
    reader, pieces = sent.transfer.reader(), []
    while not reader.done:
        batch = reader.next_batch()
        if batch is not None:
            pieces += divided(batch[1], 2**31)
    return pieces


async def fill(kind: Any, content: Content, count: int) -> float:
    """Write the streams; megabytes of their records."""
    await kind.make()
    turns, sizes = asyncio.Semaphore(AT_ONCE), []

    async def one(number: int) -> None:
        async with turns:
            log = kind.open()
            writer = await kinds.insist(lambda: log.claim(Stream("eu", "m", f"pod-{number}/engine", 0).key))
            records = content.written(writer.epoch)
            position = await writer.append(records[:1])
            for at in range(1, len(records), 64):
                await writer.append(records[at : at + 64])
            await writer.point(Pointer(writer.epoch, 0, position))
            await writer.close()
            sizes.append(sum(map(len, records)))

    await asyncio.gather(*(one(number) for number in range(count)))
    return sum(sizes) / 1e6


async def rebuilt(kind: Any, content: Content, count: int) -> Times:
    """Read all of it, as who knows nothing."""
    times = Times(count)
    clock = time.perf_counter
    began = clock()
    log = kind.open()
    pointers = await log.pointers()
    times.pointers = clock() - began
    assert len(pointers) == count
    followers = {key: Follower() for key in pointers}
    views = {key: BlockView() for key in pointers}
    reader = await log.read({key: pointer.position for key, pointer in pointers.items()})
    left = count * len(content.records)
    while left:
        at, cpu = clock(), time.process_time()
        entries = await reader.take(0.1)
        used = time.process_time() - cpu
        times.client += used
        times.network += max(0.0, clock() - at - used)
        for entry in entries:
            times.taken_mb += len(entry.data) / 1e6
            at = clock()
            record = followers[entry.key].take(entry.data, 0.0)
            assert record is not None
            batch = codec.decode(record.payload, 1 << 20)
            then = clock()
            times.decode += then - at
            assert not isinstance(batch, Reason)
            views[entry.key].apply_batch(batch)
            times.apply += clock() - then
        left -= len(entries)
    times.whole = clock() - began
    await reader.close()
    await log.close()
    for key, view in views.items():
        assert not followers[key].counts, followers[key].counts
        assert {block.hash for block in view} == content.live
        times.blocks += len(view)
    return times


def served(kind: Any, content: Content, count: int, directory: Path) -> float:
    """Seconds from the start of an aggregator to a router that holds all."""
    ((log, keys),) = kind.settings().items()
    endpoint = f"ipc://{directory / 'out'}"
    settings = {
        "sources": [{"name": "fleet", "discover": {log: {"endpoint": kind.endpoint, **keys}}}],
        "outputs": [{"endpoint": endpoint, "layout": "per_topic", "topic": "kv@{source}@m", "replay_endpoint": None}],
        "limits": {"max_sources": max(1000, count)},
        "http": None,
    }
    config = directory / "kvbus.yaml"
    config.write_bytes(msgspec.json.encode(settings))
    command = ["timeout", "--signal=KILL", str(MOST), sys.executable, "-c", RUN, "run", "-c", str(config)]
    router = TopicReader(endpoint)
    began = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                router.read()
                if len(router.built) == count and all(len(view) == len(content.live) for view in router.built.values()):
                    break
                assert process.poll() is None, "kvbus ended by itself"
                assert time.perf_counter() - began < MOST, "the router does not get everything"
                time.sleep(0.01)
            took = time.perf_counter() - began
        finally:
            process.terminate()
    assert all({block.hash for block in view} == content.live for view in router.built.values())
    assert (router.violations, router.again) == ([], 0)
    router.close()
    return took


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("log", type=click.Choice(list(SERVERS)))
@click.option("--streams", multiple=True, type=click.IntRange(1), default=(10, 100, 1000), show_default=True)
@click.option("--blocks", type=click.IntRange(64), default=1000, show_default=True, help="Of an engine's cache.")
def main(log: str, streams: tuple[int, ...], blocks: int) -> None:
    """Measure readers from nothing on one real log."""
    rest_collector()
    content = Content(blocks)
    make, kind_of = SERVERS[log]
    click.echo("  ".join(f"{field.name:>10}" for field in fields(Times)))
    for count in streams:
        with tempfile.TemporaryDirectory() as made:
            directory = Path(made)
            server = make(directory)
            server.start()
            try:
                kind = kind_of(server)
                written = asyncio.run(fill(kind, content, count))
                times = asyncio.run(rebuilt(kind, content, count))
                times.written_mb = written
                times.kvbus = served(kind, content, count, directory)
            finally:
                server.kill()
        click.echo("  ".join(f"{getattr(times, field.name):>10.4g}" for field in fields(Times)))


if __name__ == "__main__":
    main()
