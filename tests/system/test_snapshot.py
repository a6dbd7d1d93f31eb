"""The snapshot protocol on an output: a live cut in one message, and 24-byte sequence frames around it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import uvloop
import zmq

from kvbus.play import play
from kvbus.transport.publisher import EnginePublisher
from tests.system.bus import Bus, eventually, free_ports, running_bus
from tests.wire.captures import PlainSetRouter, load, matches_truth

NAME = "vllm033_map_int"


def ask(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, *frames: bytes) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.connect(endpoint)
    socket.send_multipart(frames)
    return socket


async def answered(socket: zmq.Socket[bytes]) -> list[bytes]:
    try:
        await eventually(lambda: socket.poll(0), "a snapshot")
        return socket.recv_multipart()
    finally:
        socket.close(0)


async def with_the_capture(bus: Bus) -> None:
    messages = load(NAME)
    async with EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine:
        await eventually(lambda: bus.source.state == "live", "the bus in sync")
        await play(engine, lambda: messages, rate=4000, subscribers=1)
        await eventually(lambda: bus.caught_up(messages[-1].seq), "every batch relayed")


async def the_protocol(kind: int) -> None:
    endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    async with running_bus(output={"snapshot_endpoint": endpoint, "journal_batches": 10}) as bus:
        with zmq.Context() as context:
            live = context.socket(zmq.SUB)
            live.setsockopt(zmq.SUBSCRIBE, b"")
            live.connect(bus.out)
            await eventually(lambda: bus.daemon.relay.outputs[0].stats.subscribers, "the subscription")
            seq, publisher, *chunks = await answered(ask(context, kind, endpoint, b"snapshot"))
            assert int.from_bytes(seq, "big", signed=True) == -1
            assert len(publisher) == 16
            assert chunks == []

            await with_the_capture(bus)
            seq, again, *chunks = await answered(ask(context, kind, endpoint, b"snapshot"))
            stream = bus.daemon.relay.outputs[0].streams[0]
            assert again == publisher
            # heartbeats may have been sent since: the snapshot names the batch it includes, not the newest one
            assert 0 < int.from_bytes(seq, "big", signed=True) < stream.next_seq
            router = PlainSetRouter()
            for at, chunk in enumerate(chunks):
                router.apply(at, chunk)
            assert matches_truth(NAME, router) is None
            assert router.violations == []

            unknown = await answered(ask(context, kind, endpoint, b"snapshot, please"))
            assert int.from_bytes(unknown[0], "big", signed=True) == -2
            assert len(unknown) == 2

            topic, frame, payload = live.recv_multipart(zmq.NOBLOCK)
            live.close(0)
            assert topic == b""
            assert len(frame) == 24
            assert frame[8:] == publisher
            assert len(msgspec.msgpack.decode(payload)) == 3
            replay = ask(context, zmq.DEALER, bus.out_replay, b"", (0).to_bytes(8, "big"))
            assert (await answered(replay))[-2] == bytes(8) + publisher


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
def test_a_snapshot_is_the_live_state(kind: int) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(the_protocol(kind))
