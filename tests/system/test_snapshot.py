"""Tests for the snapshot protocol at an output: a consistent state in one message, and 24-byte sequence frames."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import uvloop
import zmq

from kvbus.core.wire.frames import END_SEQ
from kvbus.tools.capture.play import play
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.payloads import payload, removed, store
from tests.doubles.router import PlainSetRouter, RankedRouter
from tests.ports import free_port, ports_in_a_row
from tests.system.test_outputs import four_engines, replay, subscribed, tcp
from tests.wire.captures import load, matches_truth

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


async def state_by_replay(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> list[tuple[bytes, bytes]]:
    """Send the request `snapshot` of vllm#50134 to the replay endpoint.

    Return the seq frames and batches of the answer, without END.
    """
    socket = ask(context, zmq.DEALER, endpoint, b"", b"snapshot")
    found: list[tuple[bytes, bytes]] = []
    while not found or found[-1][0] != END_SEQ:
        await eventually(lambda: socket.poll(0), "a part of the state")
        delimiter, topic, seq, chunk = socket.recv_multipart()
        assert delimiter == topic == b""
        found.append((seq, chunk))
    socket.close(0)
    return found[:-1]


async def with_the_capture(bus: Bus) -> None:
    messages = load(NAME)
    async with EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine:
        await eventually(lambda: bus.source.state == "live", "the bus in sync")
        await play(engine, lambda: messages, rate=4000, subscribers=1)
        await eventually(lambda: bus.caught_up(messages[-1].seq), "every batch relayed")


async def the_protocol(kind: int) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    # With "state", kvbus would answer a router that has just got the state on subscription with END only.
    output = {"snapshot_endpoint": endpoint, "journal_batches": 10, "on_subscribe": "nothing"}
    async with running_bus(output=output) as bus:
        with zmq.Context() as context:
            live = context.socket(zmq.SUB)
            live.setsockopt(zmq.SUBSCRIBE, b"")
            live.connect(bus.out)
            await eventually(lambda: bus.daemon.outputs.stats[0].subscribers, "the subscription")
            seq, publisher, *chunks = await answered(ask(context, kind, endpoint, b"snapshot"))
            assert int.from_bytes(seq, "big", signed=True) == -1
            assert len(publisher) == 16
            assert chunks == []

            await with_the_capture(bus)
            seq, again, *chunks = await answered(ask(context, kind, endpoint, b"snapshot"))
            stream = bus.daemon.relay.outputs[0].streams[0]
            assert again == publisher
            # kvbus may have sent further batches after the snapshot.
            assert 0 < int.from_bytes(seq, "big", signed=True) < stream.next_seq
            router = PlainSetRouter()
            for at, chunk in enumerate(chunks):
                router.apply(at, chunk)
            assert matches_truth(NAME, router) is None
            assert router.violations == []

            by_replay = PlainSetRouter()
            for frame, chunk in await state_by_replay(context, bus.out_replay):
                assert seq < frame[:8] <= stream.next_seq.to_bytes(8, "big")
                assert frame[8:] == publisher
                by_replay.take(0, chunk)
            assert by_replay.blocks == router.blocks

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
            first = (await answered(replay))[-2]
            assert first[8:] == publisher
            # The journal no longer contains seq 0, so the answer begins later: at the seqs of the state.
            assert 0 < int.from_bytes(first[:8], "big") < stream.next_seq


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
def test_a_snapshot_contains_the_live_state(kind: int) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(the_protocol(kind))


def held_by(chunks: list[bytes]) -> dict[int, set[int | bytes]]:
    """Return the hashes of the blocks, by rank, that a router of a merged stream holds after it applied these
    batches.
    """
    router = RankedRouter()
    for chunk in chunks:
        router.take(chunk)
    return router.hashes()


async def merged() -> None:
    """Check the snapshot of an output with all sources in one stream: it has the blocks of all sources.

    When an engine restarts, kvbus clears only the blocks of this engine's source.
    """
    port = ports_in_a_row(1)
    async with (
        four_engines(layout="merged", snapshot_endpoint=tcp(port), journal_batches=4) as (bus, engines, first),
        subscribed(bus, tcp(first)) as (live,),
    ):
        held: dict[int, set[int]] = {i: {100 * i + n for n in range(1, 20)} for i in range(4)}
        for n in range(20):
            for i, engine in enumerate(engines):
                engine.publish(payload(store([100 * i + n]), rank=i % 2))
        for i, engine in enumerate(engines):
            engine.publish(payload(removed([100 * i]), rank=i % 2))
        sources = bus.daemon.relay.sources
        await eventually(lambda: all(len(source.normalizer.index) == 19 for source in sources), "all relayed")

        async def everyone_holds(expected: dict[int, set[int]]) -> None:
            with zmq.Context() as context:
                snapshot = await answered(ask(context, zmq.REQ, tcp(port), b"snapshot"))
            assert held_by(snapshot[2:]) == expected
            answer = await replay(tcp(first + 4))
            seqs = [int.from_bytes(frames[-2][:8], "big") for frames in answer[:-1]]
            assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
            assert held_by([frames[-1] for frames in answer[:-1]]) == expected

        await everyone_holds(held)
        engines[2].restart()
        await eventually(lambda: sources[2].state == "live" and sources[2].stats.restarts == 1, "the new life noticed")
        await everyone_holds(held | {2: set()})
        stream = bus.daemon.relay.outputs[0].streams[0]
        await eventually(lambda: live.read() == stream.next_seq, "all that was sent")
        clears = [rank for _, events, rank in live.batches() if {"type": "AllBlocksCleared"} in events]
        assert clears == [2]
        await engines[2].wait_for_subscriber(60)
        engines[2].publish(payload(store([999]), rank=0))
        await eventually(lambda: len(sources[2].normalizer.index) == 1, "the new life's block")
        await everyone_holds(held | {2: {999}})


def test_a_snapshot_of_a_merged_stream_has_every_source() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(merged())
