"""The examples of docs/CLIENT.md and README.md run."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path
from typing import Any

import msgspec

from kvbus.core.wire.encoding import encode_batch
from kvbus.core.wire.schema import BlockStored
from kvbus.transport.engine.publisher import EnginePublisher
from tests.ports import free_ports
from tests.system.bus import eventually, running_bus

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "CLIENT.md"
README = ROOT / "README.md"


def names_of(page):
    names: dict[Any, Any] = {}
    for source in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(source, str(page), "exec"), names)  # noqa: S102 - our own page
    return names


def example():
    return names_of(PAGE)["wait_for_block"]


async def test_the_example_of_the_front_page(capsys):
    follow = names_of(README)["follow"]
    async with (
        running_bus() as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as publisher,
    ):
        await eventually(lambda: bus.source.state == "live", "the bus in sync")
        publisher.publish(encode_batch([BlockStored((41, 42), None, msgspec.Raw(b"\x94\1\2\3\4"), 2)], 1.0, 0))
        await eventually(lambda: bus.caught_up(0), "the batch relayed")
        told = ""

        def says_so():
            nonlocal told
            told += capsys.readouterr().out
            return told == "2 blocks at seq 0\n"

        following = asyncio.create_task(follow(bus.out, bus.out_replay))
        await eventually(says_so, "the blocks counted")
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


async def test_the_example(capsys):
    wait_for_block = example()
    tokens = msgspec.Raw(msgspec.msgpack.encode([1, 2]))
    async with EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True) as publisher:
        publisher.publish(encode_batch([BlockStored((41, 42), None, msgspec.Raw(b"\x94\1\2\3\4"), 2)], 1.0, 0))
        found = await wait_for_block(publisher.endpoint, publisher.replay_endpoint, 42)
        assert found == [3, 4]
        publisher.publish(encode_batch([BlockStored((43,), None, tokens, 2)], 1.0, 0))
        assert await wait_for_block(publisher.endpoint, publisher.replay_endpoint, 43) == [1, 2]
    assert capsys.readouterr().out == "in step: 2 blocks at seq 0\nin step: 3 blocks at seq 1\n"


async def test_the_example_with_snapshots(capsys):
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
