"""A process without a file descriptor to spare: a replay that cannot be asked for waits, and nothing counts as lost."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.payloads import payload, store
from tests.system.bus import Bus, eventually, running_bus


@contextlib.contextmanager
def no_descriptor(spare: int = 0) -> Iterator[None]:
    """This process has so many descriptors left, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(spare):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def lose_one(bus: Bus, engine: EnginePublisher, spare: int) -> None:
    """The engine has a batch that the live stream lost, while so many descriptors are left."""
    stats, seq = bus.source.stats, engine.next_seq
    before = stats.requests_failed, stats.recovered, stats.lost
    with no_descriptor(spare):
        engine.publish(payload(store([10 * seq])), live=False)
        engine.publish(payload(store([10 * seq + 1])))
        # long enough for two requests without an answer, after which a gap is lost
        await eventually(
            lambda: stats.requests_failed >= before[0] + 5 or (stats.recovered, stats.lost) != before[1:],
            f"five attempts with {spare} descriptors, or the replay",
        )
        assert stats.lost == before[2]
    await eventually(lambda: bus.caught_up(seq + 1), "the replay")
    assert (stats.missing, stats.recovered, stats.lost) == (before[1] + 1, before[1] + 1, 0)


async def lose_some() -> None:
    async with (
        running_bus(replay_timeout=0.2, probe_interval=0) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await eventually(lambda: bus.source.state == "live", "the bus in sync")
        await engine.wait_for_subscriber(60)
        engine.publish(payload(store([1])))
        await eventually(lambda: bus.caught_up(0), "the first batch")
        for spare in range(4):  # with four it is sent, and the engine, in this process too, could not take it
            await lose_one(bus, engine, spare)
        assert bus.source.stats.requests_failed >= 5
        assert not bus.source.partial


def test_a_replay_that_cannot_be_asked_for_waits_for_a_descriptor() -> None:
    """In a process of its own: here a socket of an earlier test may close at any time, and leave one descriptor more."""
    alone = "import asyncio; from tests.system.test_descriptors import lose_some; asyncio.run(lose_some())"
    done = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
