"""Tests for the client library's subscribers at a real kvbus, whose journal keeps only ten batches.

With replays, snapshots or both, each subscriber ends with the engine's true blocks.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import uvloop

from kvbus.client import BlockView, Snapshot, Subscriber, Synced
from kvbus.core.wire.encoding import encode_batch
from kvbus.core.wire.schema import BlockStored
from kvbus.tools.capture.play import play
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import Bus, eventually, running_bus
from tests.ports import free_ports
from tests.wire.captures import load, truth

NAME = "vllm033_map_int"
NEW = 987654321
TOKENS = msgspec.Raw(msgspec.msgpack.encode(list(range(16))))


def run(main):
    async def guarded():
        async with asyncio.timeout(60):
            await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(guarded())


def output():
    ports = free_ports(3)
    live, replay, snapshot = (f"tcp://127.0.0.1:{port}" for port in ports)
    return {"endpoint": live, "replay_endpoint": replay, "snapshot_endpoint": snapshot, "journal_batches": 10}


def keys(view):
    return {key[1:] for key in view.keys()}  # noqa: SIM118 - iterating a view gives blocks


async def until(subscriber, view, condition):
    """Receive updates until one fulfils a condition. Return all received updates."""
    seen: list[Any] = []
    while not seen or not condition(seen[-1]):
        seen.append(await subscriber.receive())
        view.update(seen[-1])
    return seen


async def fill(bus: Bus, engine):
    messages = load(NAME)
    await eventually(lambda: bus.source.state == "live", "the bus in sync")
    await play(engine, lambda: messages, rate=4000, subscribers=1)
    await eventually(lambda: bus.caught_up(messages[-1].seq), "every batch relayed")


@pytest.mark.parametrize("how", ["replay", "snapshot", "both"])
def test_a_router_that_joins_late_gets_the_blocks_of_the_bus(how):
    async def main():
        served = output()
        async with (
            running_bus(output=served) as bus,
            EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
        ):
            await fill(bus, engine)
            view = BlockView()
            async with Subscriber(
                served["endpoint"],
                None if how == "snapshot" else served["replay_endpoint"],
                snapshot_endpoint=None if how == "replay" else served["snapshot_endpoint"],
            ) as router:
                seen = await until(router, view, lambda update: isinstance(update, Synced))
                assert keys(view) == truth(NAME)
                assert sum(isinstance(update, Snapshot) for update in seen) == (how != "replay")
                assert {update.kind for update in seen} <= {"batch", "snapshot", "synced"}
                if how == "snapshot":
                    assert [update.kind for update in seen] == ["snapshot", "synced"]
                # After the state, the subscriber gets the batches of the live stream.
                engine.publish(encode_batch([BlockStored((NEW,), None, TOKENS, 16, None, "GPU")], 1.0, 0))
                await until(router, view, lambda _: NEW in view)
                assert {key[-1] for key in keys(view)} == {key[-1] for key in truth(NAME)} | {NEW}
                assert router.epoch == 0

    run(main)
