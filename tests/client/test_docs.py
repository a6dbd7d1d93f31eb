"""Tests that the code examples of docs/CLIENT.md run without an error."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec

from kvbus.client import BlockView, Subscriber, Synced
from kvbus.core.wire.encoding import encode_batch
from kvbus.core.wire.schema import BlockStored
from kvbus.transport.engine.publisher import EnginePublisher
from tests.client.blocks import batch, removed, stored, tokens
from tests.doubles.bus import eventually, running_bus
from tests.ports import free_ports
from tests.typed import there

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "CLIENT.md"


def names_of(page):
    names: dict[Any, Any] = {}
    for source in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(source, str(page), "exec"), names)  # noqa: S102 - our own page
    return names


def example():
    return names_of(PAGE)["wait_for_block"]


def test_the_first_example_has_at_most_fifteen_lines():
    source = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert len(source.splitlines()) <= 15


async def test_the_router_example_chooses_the_worker_with_the_blocks(capsys):
    route = names_of(PAGE)["route"]
    async with (
        running_bus() as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as publisher,
        EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True) as engine,
    ):
        publisher.publish(batch(stored(1, 2)))
        engine.publish(batch(stored(1)))
        await eventually(lambda: bus.caught_up(0), "the batch relayed")
        workers = {"a": (engine.endpoint, engine.replay_endpoint), "b": (bus.out, bus.out_replay)}
        prompts = [tokens(1, 2, 3), tokens(7)]
        assert await asyncio.to_thread(lambda: list(route(workers, prompts))) == ["b", "a"]
    assert capsys.readouterr().out == "a live \nb live \n"


async def test_the_examples_of_blocks_and_tokens_run():
    names = names_of(PAGE)
    async with EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True) as engine:
        engine.publish(batch(stored(1, 2)))
        engine.publish(batch(removed(2)))
        endpoints = engine.endpoint, there(engine.replay_endpoint)
        assert await asyncio.to_thread(names["blocks_of"], *endpoints) == 1
        async with names["measured_router"](*endpoints) as router:
            await router.settled()
        assert names["updates"] == {("pod-a", "batch"): 2, ("pod-a", "synced"): 1}
        view = BlockView()
        async with Subscriber(*endpoints) as subscriber:
            while not isinstance(update := await subscriber.receive(), Synced):
                names["index"](view, update)
        assert names["tokens_of"] == {1: tokens(1)}


async def test_the_example_waits_for_a_block_and_returns_its_tokens(capsys):
    wait_for_block = example()
    tokens = msgspec.Raw(msgspec.msgpack.encode([1, 2]))
    async with EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True) as publisher:
        publisher.publish(encode_batch([BlockStored((41, 42), None, msgspec.Raw(b"\x94\1\2\3\4"), 2)], 1.0, 0))
        found = await wait_for_block(publisher.endpoint, publisher.replay_endpoint, 42)
        assert found == [3, 4]
        publisher.publish(encode_batch([BlockStored((43,), None, tokens, 2)], 1.0, 0))
        assert await wait_for_block(publisher.endpoint, publisher.replay_endpoint, 43) == [1, 2]
    assert capsys.readouterr().out == "in step: 2 blocks at seq 0\nin step: 3 blocks at seq 1\n"


async def test_the_example_waits_for_a_block_with_snapshots(capsys):
    wait_for_block = example()
    ports = free_ports(3)
    live, replay, snapshot = (f"tcp://127.0.0.1:{port}" for port in ports)
    served = {"endpoint": live, "replay_endpoint": replay, "snapshot_endpoint": snapshot}
    async with (
        running_bus(output=served) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as publisher,
    ):
        await eventually(lambda: bus.source.state == "live", "the bus in sync")
        publisher.publish(encode_batch([BlockStored((41, 42), None, msgspec.Raw(b"\x94\1\2\3\4"), 2)], 1.0, 0))
        await eventually(lambda: bus.caught_up(0), "the batch relayed")
        assert await wait_for_block(live, replay, 42, snapshot) == [3, 4]
    assert capsys.readouterr().out.startswith("in step: 2 blocks at seq ")
