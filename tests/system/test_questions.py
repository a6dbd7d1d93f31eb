"""Test that kvbus opens a socket for each request to an engine, and closes it after the answer."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually, running_bus

ANSWERS = 40
SLACK = 8
"""Number of file descriptors that one or two open requests need, counted at both ends of each connection."""


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_answered_replay_requests_leave_no_open_descriptors() -> None:
    empty = msgspec.msgpack.encode([1.0, [], 0])
    async with (
        running_bus(probe_interval=0.02) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await eventually(lambda: bus.source.state == "live", "the bus in sync")
        engine.publish(empty)
        await eventually(lambda: bus.caught_up(0), "the first batch relayed")
        before = descriptors()
        for _ in range(ANSWERS):
            # This batch is lost on the live stream. kvbus finds it when it probes the silent engine, with one complete answer.
            seq = engine.publish(empty, live=False)
            await eventually(lambda seq=seq: bus.caught_up(seq), "the lost tail found")
            engine.publish(empty)
            await eventually(lambda seq=seq: bus.caught_up(seq + 1), "the next batch relayed")
        assert engine.replay_requests > ANSWERS
        await eventually(lambda: descriptors() <= before + SLACK, "the sockets of answered questions closed")
