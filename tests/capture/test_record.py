"""Tests for recording a capture: size limits, counted gaps, and messages that are not batches and are left out."""

import pytest

from kvbus.tools.capture.format import CaptureWriter, read_capture
from kvbus.tools.capture.record import Stats, record
from kvbus.transport.client.raw import RawSubscriber
from kvbus.transport.engine.publisher import EnginePublisher


@pytest.fixture
async def stream(tmp_path):
    async with (
        EnginePublisher("tcp://127.0.0.1:*", None, topic=b"kv") as engine,
        RawSubscriber(engine.endpoint) as sub,
    ):
        await engine.wait_for_subscriber(60)
        with CaptureWriter(tmp_path / "copy.jsonl") as writer:
            yield engine, sub, writer


async def test_recording_stops_after_count_messages(stream):
    engine, sub, writer = stream
    for n in range(5):
        engine.publish(b"%d" % n)
    assert await record(sub, writer, count=3) == Stats(recorded=3)
    got = list(read_capture(writer.path))
    assert [(m.topic, m.seq, m.payload) for m in got] == [(b"kv", n, b"%d" % n) for n in range(3)]
    assert got[0].t == 0
    assert [m.t for m in got] == sorted(m.t for m in got)


async def test_recording_stops_after_the_given_seconds(stream):
    _, sub, writer = stream
    assert await record(sub, writer, seconds=0.01) == Stats()


async def test_gaps_restarts_and_other_messages_are_counted(stream):
    engine, sub, writer = stream
    engine.publish(b"0")
    engine.publish(b"1", live=False)
    engine.send_frames(b"kv", b"no sequence")
    engine.publish(b"2")
    engine.send_again(2)  # a duplicate does not count as a restart
    engine.publish(b"0", seq=0)
    engine.send_frames(b"kv", (1).to_bytes(8, "big") + b"i" * 16, b"with a publisher id")
    stats = await record(sub, writer, count=5)
    assert stats == Stats(recorded=5, unusable=1, missing=1, restarts=1)
    assert [m.seq for m in read_capture(writer.path)] == [0, 2, 2, 0, 1]
