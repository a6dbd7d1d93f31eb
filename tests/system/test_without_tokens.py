"""Tests that an output without token ids sends none in any message, and that the client library can read it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from functools import partial

import pytest
import uvloop
import zmq

from kvbus.client import BlockView, Subscriber
from kvbus.core.wire.frames import END_SEQ
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.payloads import pack, payload, removed, store
from tests.ports import free_port

TOKEN = 0xF0F0F0F0
MARKS = (pack(TOKEN), str(TOKEN).encode(), b"XYZZY")
BLOCKS = set(range(1, 41)) - set(range(3, 39, 5))


def batch(block: int) -> bytes:
    event = store(
        [block],
        block - 1 or None,
        tokens=[TOKEN] * 16,
        extra_keys=[["XYZZY-salt"]],
        session_id="XYZZY-session",
        lookahead_token_ids=[[TOKEN]],
        lora_name="adapter",
    )
    return payload(event, *([removed([block - 2])] if block % 5 == 0 else []))


@contextlib.asynccontextmanager
async def relayed(token_ids: str) -> AsyncIterator[tuple[Bus, str]]:
    """Yield a bus that has relayed 40 batches, and the address of its snapshot endpoint.

    ``token_ids`` is the value of the output's setting of this name.
    """
    snapshots = f"tcp://127.0.0.1:{free_port()}"
    output = {"token_ids": token_ids, "snapshot_endpoint": snapshots, "journal_batches": 10, "on_subscribe": "state"}
    async with running_bus(output=output) as bus, EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine:
        await engine.wait_for_subscriber(60)
        for block in range(1, 41):
            engine.publish(batch(block))
        await eventually(lambda: bus.caught_up(39), "every batch relayed")
        yield bus, snapshots


async def read(bus: Bus, snapshots: str) -> bytes:
    """Return all bytes that routers can receive from the output.

    They are the state on subscription, live batches, a complete replay and a snapshot.
    """
    found: list[bytes] = []
    with zmq.Context() as context:
        live = context.socket(zmq.SUB)
        live.setsockopt(zmq.SUBSCRIBE, b"")
        live.connect(bus.out)
        replay, snapshot = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        replay.connect(bus.out_replay)
        snapshot.connect(snapshots)
        replay.send_multipart([b"", bytes(8)])
        snapshot.send_multipart([b"snapshot"])
        try:
            for socket, last in ((live, b"BlockStored"), (replay, END_SEQ), (snapshot, b"BlockStored")):
                frames: list[bytes] = []
                while not any(last in frame for frame in frames):
                    await eventually(partial(socket.poll, 0), "a message")
                    frames = socket.recv_multipart()
                    found += frames
        finally:
            for socket in (live, replay, snapshot):
                socket.close(0)
    return b"".join(found)


async def view_of(bus: Bus) -> set[int | bytes]:
    """Return the blocks that a subscriber of the client library has."""
    view = BlockView()
    async with asyncio.timeout(60), Subscriber(bus.out, bus.out_replay) as subscriber:
        while {block.hash for block in view} != BLOCKS:
            view.update(await subscriber.receive())
    return {block.hash for block in view}


async def output_of_command(*args: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvbus", *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, out
    return out


@pytest.mark.parametrize("token_ids", ["keep", "drop"])
def test_kvbus_sends_prompt_content_only_with_token_ids_keep(token_ids: str) -> None:
    async def main() -> None:
        async with relayed(token_ids) as (bus, snapshots):
            sent = await read(bus, snapshots)
            assert await view_of(bus) == BLOCKS
            dumped = await output_of_command("dump", "--replay-endpoint", bus.out_replay, "--json")
            assert dumped.count(b'"hash"') == len(BLOCKS)
            for mark in MARKS[::2]:
                assert (mark in sent) == (token_ids == "keep")
            assert (MARKS[1] in dumped) == (token_ids == "keep")
            assert b"adapter" in sent

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
