"""An output's live stream against real subscribers: the healthy ones get everything, whatever the others do."""

import contextlib
from typing import Any

import pytest
import zmq

from kvbus.core.stats import OutputStats
from kvbus.transport.libzmq_live import LiveOutput
from kvbus.transport.pump import Pump
from tests.ports import free_port
from tests.transport.loops import both_loops, eventually, read_all, turns, u64


def endpoint():
    return f"tcp://127.0.0.1:{free_port()}"


@contextlib.asynccontextmanager
async def live_output(context, where, *, bind=True, send_hwm=1000, queue_limit=100_000):
    stats = OutputStats()
    output = LiveOutput(context, where, bind=bind, send_hwm=send_hwm, queue_limit=queue_limit, stats=stats)
    try:
        yield output, stats
    finally:
        output.close()
        await turns()


def subscriber(context, where, *, bind=False, hwm=0, topics=(b"",), receive_buffer=None):
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.RCVHWM, hwm)
    sub.setsockopt(zmq.LINGER, 0)
    sub.setsockopt(zmq.RECONNECT_IVL, 5)
    if receive_buffer:
        sub.setsockopt(zmq.RCVBUF, receive_buffer)
    for topic in topics:
        sub.setsockopt(zmq.SUBSCRIBE, topic)
    if bind:
        sub.bind(where)
    else:
        sub.connect(where)
    return sub


def read_on(sub, got):
    """Add what has come to what was there."""
    got += read_all(sub)
    return got


def seqs(got):
    return [int.from_bytes(frames[1], "big") for frames in got]


@both_loops
async def test_without_subscribers_nothing_waits_and_nothing_is_dropped(context):
    async with live_output(context, endpoint(), send_hwm=1) as (output, stats):
        for n in range(5000):
            output.publish(b"", u64(n), b"x", 1)
        await eventually(lambda: stats.batches == 5000, "all of them sent to nobody")
        assert not stats.dropped_batches


@both_loops
async def test_a_stalled_router_loses_its_own_batches_and_nobody_elses(context):
    """One subscriber never reads: the other one gets 20,000 of 20,000, and the loop turns all the while."""
    where = endpoint()
    count, in_flight, payload = 20_000, 400, b"p" * 1000
    async with live_output(context, where, send_hwm=1000) as (output, stats):
        stalled = subscriber(context, where, hwm=10, receive_buffer=4096)
        healthy = []
        reader = Pump(subscriber(context, where), lambda frames: healthy.append(frames[1]))
        await eventually(lambda: stats.subscribers == 2, "both subscriptions")
        for n in range(count):
            output.publish(b"", u64(n), payload, 2)
            if n % 100 == 99:
                # healthy is who keeps up; how far behind it is does not depend on how fast this machine is
                await eventually(lambda n=n: len(healthy) + in_flight > n, "the healthy router's next batches")
        await eventually(lambda: len(healthy) == count, "the healthy router has every batch")
        assert healthy == [u64(n) for n in range(count)]
        assert stats.queue_depth == 0
        assert stats.batches == count

        # the stalled one finds whole batches in order, and a hole in a dense numbering
        got: list[Any] = []
        number = count

        def caught_up():
            nonlocal number
            output.publish(b"", u64(number), b"more", 0)
            number += 1
            got.extend(read_all(stalled))
            return got and seqs(got)[-1] >= count

        await eventually(caught_up, "a batch from after the stall")
        found = seqs(got)
        assert found == sorted(set(found))
        lost = count - sum(n < count for n in found)
        assert lost > 5000
        assert all(len(frames) == 3 for frames in got)
        # every time it was found full is counted; libzmq does not tell of the batches that pass it by while it is
        assert 1 <= stats.dropped_batches["slow_router"] <= lost
        assert stats.dropped_events["slow_router"] <= 2 * lost
        assert stats.dropped_events["slow_router"] >= stats.dropped_batches["slow_router"]
        assert set(stats.dropped_batches) == {"slow_router"}

        # it stops once more: that is counted once more
        before = stats.dropped_batches["slow_router"]

        def full_again():
            nonlocal number
            for _ in range(100):
                output.publish(b"", u64(number), payload, 1)
                number += 1
            return stats.dropped_batches["slow_router"] > before

        await eventually(full_again, "the second stretch of being full")
        reader.close()
        stalled.close()
        await turns()


@both_loops
async def test_a_burst_within_the_mark_reaches_a_router_that_keeps_up(context):
    """A small mark and no pause between batches: what the router has taken is looked up before anything is dropped."""
    where = endpoint()
    async with live_output(context, where, send_hwm=64) as (output, stats):
        got: list[Any] = []
        sub = subscriber(context, where)
        await eventually(lambda: stats.subscribers == 1, "the subscription")
        for n in range(5000):
            output.publish(b"", u64(n), b"x", 1)
            if n % 16 == 15:
                output.flush()
                await eventually(lambda n=n: len(read_on(sub, got)) == n + 1, "this burst")
        await eventually(lambda: len(read_on(sub, got)) == 5000, "all of it")
        assert seqs(got) == list(range(5000))
        assert not stats.dropped_batches
        sub.close()


@both_loops
async def test_subscriptions_are_counted_coming_and_going(context):
    where = endpoint()
    async with live_output(context, where) as (_, stats):
        subs = [subscriber(context, where) for _ in range(5)]
        await eventually(lambda: stats.subscribers == 5, "five routers")
        subs.append(subscriber(context, where, topics=(b"", b"kv@")))
        await eventually(lambda: stats.subscribers == 7, "one with two subscriptions")
        for sub in subs[:3]:
            sub.close()
        await eventually(lambda: stats.subscribers == 4, "three gone")
        for sub in subs[3:]:
            sub.close()
        await eventually(lambda: stats.subscribers == 0, "all gone")


@both_loops
async def test_close_takes_the_subscribers_out_of_the_count(context):
    where = endpoint()
    async with live_output(context, where) as (output, stats):
        sub = subscriber(context, where)
        await eventually(lambda: stats.subscribers == 1, "the subscription")
        output.close()
        output.close()
        assert stats.subscribers == 0
        sub.close()


@both_loops
async def test_a_message_that_is_no_subscription_changes_nothing(context):
    """Any peer may send frames to an XPUB: they are read, and are no subscribers."""
    where = endpoint()
    async with live_output(context, where) as (output, stats):
        odd = context.socket(zmq.XSUB)
        odd.setsockopt(zmq.LINGER, 0)
        odd.connect(where)
        for message in (b"", b"\x02hello", b"\x00never subscribed", b"x" * 100_000):
            odd.send(message)
        odd.send(b"\x01")
        await eventually(lambda: stats.subscribers == 1, "the one real subscription")
        output.publish(b"", u64(0), b"x", 0)
        await eventually(lambda: odd.poll(0), "a batch")
        assert stats.subscribers == 1
        odd.close()


@both_loops
@pytest.mark.parametrize("first", ["router", "bus"])
async def test_dialling_out_to_a_router_that_binds(context, first):
    where = endpoint()
    subs = [subscriber(context, where, bind=True)] if first == "router" else []
    async with live_output(context, where, bind=False) as (output, stats):
        if not subs:
            output.publish(b"", u64(0), b"to nobody", 1)
            await eventually(lambda: stats.batches == 1, "a batch that nobody was there for")
            subs.append(subscriber(context, where, bind=True))
        # a SUB that binds takes note of who dialled in, and subscribes, only while somebody looks at it
        await eventually(lambda: subs[0].poll(0) or stats.subscribers == 1, "the router's subscription")
        output.publish(b"kv", u64(1), b"x", 1)
        got: list[Any] = []
        await eventually(lambda: read_on(subs[0], got), "the batch")
        assert got == [[b"kv", u64(1), b"x"]]
        subs[0].close()
        await eventually(lambda: stats.subscribers == 0, "the router's end")
        # and it comes back

        def bound_again():
            with contextlib.suppress(zmq.ZMQError):
                subs.append(subscriber(context, where, bind=True))
            return len(subs) == 2

        await eventually(bound_again, "the router's address, free again")
        await eventually(lambda: subs[1].poll(0) or stats.subscribers == 1, "the router's new subscription")
        subs[1].close()


@both_loops
async def test_topics_are_matched_by_prefix(context):
    where = endpoint()
    async with live_output(context, where) as (output, stats):
        sub = subscriber(context, where, topics=(b"kv@a",))
        await eventually(lambda: stats.subscribers == 1, "the subscription")
        for n, topic in enumerate((b"kv@b@m", b"kv@a@m", b"", b"kv@a@n")):
            output.publish(topic, u64(n), b"x", 1)
        got: list[Any] = []
        await eventually(lambda: len(read_on(sub, got)) == 2, "both of its topic")
        assert seqs(got) == [1, 3]
        sub.close()
