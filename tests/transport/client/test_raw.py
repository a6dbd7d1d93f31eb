"""Tests that the client library's RawSubscriber misses no message, on asyncio and on uvloop.

libzmq wakes it only once when messages arrive (edge-triggered), so it must read all of them.
"""

import asyncio

import pytest

from kvbus.transport import pump
from kvbus.transport.client.raw import RawSubscriber
from kvbus.transport.engine.publisher import EnginePublisher
from kvbus.transport.pump import receive
from tests.transport.loops import COUNTING, reads

ANY = "tcp://127.0.0.1:*"


@pytest.fixture(params=list(COUNTING.values()), ids=list(COUNTING))
def run(request):
    def go(main):
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(main())

    return go


def test_20000_messages_arrive_completely_and_in_order(run):
    async def main():
        async with EnginePublisher(ANY, None) as engine, RawSubscriber(engine.endpoint) as sub:
            await engine.wait_for_subscriber(60)
            for n in range(20_000):
                engine.publish(n.to_bytes(4, "big"))
            return [int.from_bytes((await sub.recv())[2], "big") for _ in range(20_000)]

    assert run(main) == list(range(20_000))


def test_single_messages_wake_a_waiting_reader_each_time(run):
    async def main():
        async with EnginePublisher(ANY, None) as engine, RawSubscriber(engine.endpoint) as sub:
            await engine.wait_for_subscriber(60)
            got = []
            for n in range(200):
                waiting = asyncio.ensure_future(sub.recv())
                await asyncio.sleep(0)  # let the task begin to wait
                engine.publish(b"%d" % n)
                async with asyncio.timeout(60):
                    got.append((await waiting)[2])
            return got

    assert run(main) == [b"%d" % n for n in range(200)]


def test_a_waiting_reader_does_not_spin_the_loop(run, monkeypatch):
    looks = []

    def looking(*args):
        looks.append(args)
        return receive(*args)

    monkeypatch.setattr(pump, "receive", looking)

    async def main():
        async with EnginePublisher(ANY, None) as engine, RawSubscriber(engine.endpoint) as sub:
            await engine.wait_for_subscriber(60)
            waiting = asyncio.ensure_future(sub.recv())
            for _ in range(1000):
                await asyncio.sleep(0)
            waited = len(looks)
            engine.publish(b"x")
            async with asyncio.timeout(60):
                return waited, (await waiting)[2]

    waited, got = run(main)
    assert (waited <= 5, got) == (True, b"x"), waited


def test_an_unread_message_does_not_make_the_loop_spin(run):
    async def main():
        async with EnginePublisher(ANY, None) as engine, RawSubscriber(engine.endpoint) as sub:
            await engine.wait_for_subscriber(60)
            before = reads()
            engine.publish(b"x")
            while reads() == before:  # noqa: ASYNC110 - receiving would consume the message
                await asyncio.sleep(0)
            before = reads()
            for _ in range(1000):
                await asyncio.sleep(0)
            spun = reads() - before
            return spun, await sub.recv()

    spun, frames = run(main)
    assert spun < 5
    assert frames[2] == b"x"


def test_a_subscriber_receives_all_topics_with_its_prefix(run):
    async def main():
        async with (
            EnginePublisher(ANY, None) as engine,
            RawSubscriber(engine.endpoint, topic=b"kv@a") as sub,
        ):
            await engine.wait_for_subscriber(60)
            engine.send_frames(b"kv@b", b"no")
            engine.send_frames(b"kv@a@m", b"yes")
            async for frames in sub:
                return frames
            return None

    assert run(main) == [b"kv@a@m", b"yes"]


def test_a_malformed_endpoint_raises_value_error(run):
    async def main():
        for bind, verb in ((False, "connect to"), (True, "bind")):
            with pytest.raises(ValueError, match=f"cannot {verb} nonsense"):
                RawSubscriber("nonsense", bind=bind).start()
        with pytest.raises(RuntimeError, match="not started"):
            await RawSubscriber(ANY).recv()

    run(main)
