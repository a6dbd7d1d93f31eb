"""Tests for playing a capture as an engine: the schedule of batches and simulated faults, and the publisher."""

import asyncio

import pytest

from kvbus.tools.capture.format import Message
from kvbus.tools.capture.play import Again, Faults, Restart, Stats, play, schedule
from kvbus.transport.client.raw import RawSubscriber
from kvbus.transport.engine.publisher import EnginePublisher


def capture(*seqs):
    return [Message(n * 0.01, b"", seq, b"%d/%d" % (n, seq)) for n, seq in enumerate(seqs)]


def short(steps):
    names = {Restart: "restart"}
    return [
        names.get(type(s))
        or (f"again {s.seq}" if isinstance(s, Again) else f"{'' if s.live else 'quiet '}{s.message.seq}")
        for s in steps
    ]


def planned(seqs, **faults):
    stats = Stats()
    return short(schedule(capture(*seqs), Faults(**faults), stats)), stats


def test_without_faults_every_batch_is_published_once():
    assert planned([0, 1, 4]) == (["0", "1", "4"], Stats(published=3))


def test_a_seq_that_goes_back_is_played_as_a_restart():
    steps, stats = planned([0, 1, 2, 0, 1, 0])
    assert steps == ["0", "1", "2", "restart", "0", "1", "restart", "0"]
    assert stats.epochs == 3


@pytest.mark.parametrize(
    ("fault", "steps"),
    [
        ({"drop": 1}, ["quiet 0", "quiet 1", "quiet 2"]),
        ({"duplicate": 1}, ["0", "again 0", "1", "again 1", "2", "again 2"]),
        ({"swap": 1}, ["quiet 0", "1", "again 0", "quiet 2", "again 2"]),
        ({"hole": 1}, []),
    ],
)
def test_each_simulated_fault_makes_its_steps(fault, steps):
    assert planned([0, 1, 2], **fault)[0] == steps


def test_a_swapped_batch_is_sent_before_the_restart():
    assert planned([1, 0], swap=1)[0] == ["quiet 1", "again 1", "restart", "quiet 0", "again 0"]


def test_equal_seeds_make_equal_faults():
    faults = {"drop": 0.2, "duplicate": 0.2, "swap": 0.2, "hole": 0.2}
    first, stats = planned(range(300), **faults, seed=1)
    assert first == planned(range(300), **faults, seed=1)[0]
    assert first != planned(range(300), **faults, seed=2)[0]
    assert min(stats.dropped, stats.duplicated, stats.swapped, stats.holes) > 10
    assert stats.published + stats.holes == 300


async def test_a_played_capture_has_the_recorded_seqs_and_payloads():
    messages = capture(5, 6, 9)
    async with EnginePublisher("tcp://127.0.0.1:*", None) as engine, RawSubscriber(engine.endpoint) as sub:
        await engine.wait_for_subscriber(60)
        stats = await play(engine, lambda: messages, rate=1e5)
        got = [await sub.recv() for _ in messages]
    assert [(int.from_bytes(seq, "big"), payload) for _, seq, payload in got] == [(m.seq, m.payload) for m in messages]
    assert stats.published == 3


async def test_a_played_restart_drops_the_replay_buffer():
    async with EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as engine:
        await play(engine, lambda: capture(0, 1, 2, 0), rate=1e5)
        assert engine.buffered == 1
        assert engine.next_seq == 1


async def test_each_repetition_of_a_loop_is_a_new_epoch():
    async with EnginePublisher("tcp://127.0.0.1:*", None) as engine:
        stats = Stats()
        task = asyncio.create_task(play(engine, lambda: capture(0, 1), rate=1e5, loop=True, stats=stats))
        async with asyncio.timeout(60):
            while stats.epochs < 3:  # noqa: ASYNC110 - a plain counter
                await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_capture_can_be_played_faster_than_recorded():
    clock = asyncio.get_running_loop().time
    times = []
    async with EnginePublisher("tcp://127.0.0.1:*", None) as engine:
        for speed in (1, 10, 10, 10):
            begin = clock()
            await play(engine, lambda: capture(*range(21)), pace="recorded", speed=speed)
            times.append(clock() - begin)
    assert times[0] >= 0.19
    assert min(times[1:]) >= 0.019
    assert min(times[1:]) < times[0]
