"""Tests for the client library's live subscription with real publishers."""

import contextlib
from typing import Any

import pytest
import zmq

from kvbus.common.errors import BindError
from kvbus.transport.client.live import LiveStream
from kvbus.transport.engine.publisher import EnginePublisher
from kvbus.transport.sockets import PLAIN
from tests.doubles.bus import eventually
from tests.ports import free_port
from tests.transport.loops import both_loops, turns, u64


def endpoint():
    return f"tcp://127.0.0.1:{free_port()}"


def subscribed(context, where, message, connection, *, bind=False, topic=b""):
    """Return a live stream of the client library."""
    return LiveStream(
        context,
        where,
        bind=bind,
        topics=[topic],
        message=message,
        connection=connection,
        refused=lambda _: None,
        policy=PLAIN,
        hwm=200_000,
    )


@contextlib.asynccontextmanager
async def live_stream(context, where, *, bind=False, topic=b""):
    got: list[Any] = []
    said: list[Any] = []
    stream = subscribed(context, where, got.append, said.append, bind=bind, topic=topic)
    try:
        yield got, said
    finally:
        stream.close()
        await turns()


@both_loops
@pytest.mark.parametrize("bind", [False, True])
async def test_a_live_stream_receives_every_batch_in_order(context, bind):
    where = endpoint()
    async with (
        live_stream(context, where, bind=bind) as (got, said),
        EnginePublisher(where, None, topic=b"kv", bind=not bind) as engine,
    ):
        await engine.wait_for_subscriber(60)
        await eventually(lambda: said == [True], "the connection")
        for n in range(3000):
            engine.publish(b"%d" % n)
        await eventually(lambda: len(got) == 3000, "every batch")
        assert got == [[b"kv", u64(n), b"%d" % n] for n in range(3000)]


@both_loops
async def test_an_engine_that_starts_late_and_restarts_is_read(context):
    where = endpoint()
    async with live_stream(context, where) as (got, said):
        async with EnginePublisher(where, None, bind=True) as engine:
            await engine.wait_for_subscriber(60)
            engine.publish(b"first life")
            await eventually(lambda: got, "a batch")
            engine.restart()
            await engine.wait_for_subscriber(60)
            engine.publish(b"second life")
            await eventually(lambda: len(got) == 2, "a batch of the new life")
        await eventually(lambda: said[-1] is False, "the engine's end")
        assert said == [True, False] * 2
        assert got == [[b"", u64(0), b"first life"], [b"", u64(0), b"second life"]]


@both_loops
async def test_a_live_stream_receives_only_topics_with_its_prefix(context):
    where = endpoint()
    async with (
        live_stream(context, where, topic=b"kv@") as (got, _),
        EnginePublisher(where, None, bind=True) as engine,
    ):
        await engine.wait_for_subscriber(60)
        for topic in (b"", b"kv", b"kv@a", b"metrics", b"kv@b", b"KV@c"):
            engine.send_frames(topic, u64(0), b"x")
        engine.send_frames(b"kv@end", u64(0), b"x")
        await eventually(lambda: got and got[-1][0] == b"kv@end", "the last one")
        assert [frames[0] for frames in got] == [b"kv@a", b"kv@b", b"kv@end"]


@both_loops
async def test_malformed_messages_are_passed_on_unchanged(context):
    """The transport passes malformed messages on, because kvbus's core checks and counts them."""
    where = endpoint()
    async with live_stream(context, where) as (got, _), EnginePublisher(where, None, bind=True) as engine:
        await engine.wait_for_subscriber(60)
        shapes = [[b""], [b"", b""], [b"t", u64(1), b"p", b"more"], [b"", u64(2), b"x" * 3_000_000]]
        for shape in shapes:
            engine.send_frames(*shape)
        await eventually(lambda: len(got) == len(shapes), "every message")
        assert got == shapes


@both_loops
async def test_the_error_names_an_endpoint_in_use(context):
    where = endpoint()
    async with live_stream(context, where, bind=True):
        with pytest.raises(BindError, match=where):
            subscribed(context, where, print, print, bind=True)
        await turns()


@both_loops
@pytest.mark.parametrize("bind", [False, True])
async def test_the_batches_of_a_connection_are_delivered_before_its_end(context, bind):
    """kvbus reads the batches of a connection before it reports the connection's end.

    Otherwise it would attribute them to the next connection.
    """
    where, beside = endpoint(), endpoint()
    order: list[Any] = []
    engines = zmq.Context()
    engine = engines.socket(zmq.XPUB)
    engine.setsockopt(zmq.SNDHWM, 0)
    engine.setsockopt(zmq.LINGER, 60_000)
    witness = context.socket(zmq.SUB)
    ended = witness.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def received(frames: list[bytes]) -> None:
        order.append(int.from_bytes(frames[1], "big"))
        if order == [True, 0]:  # publish a thousand batches and close the engine before kvbus reads again
            for n in range(1, 1000):
                engine.send_multipart([b"", u64(n), b"batch"])
            engine.close()
            engines.term()
            assert ended.poll(60_000)

    witness.setsockopt(zmq.SUBSCRIBE, b"nothing")
    engine.bind(beside)
    witness.connect(beside)
    if not bind:
        engine.bind(where)
    stream = subscribed(context, where, received, order.append, bind=bind)
    if bind:
        engine.connect(where)
    try:
        await eventually(lambda: order == [True], "the connection")
        for _ in range(2):
            await eventually(lambda: engine.poll(0), "both subscriptions")
            engine.recv()
        engine.send_multipart([b"", u64(0), b"batch"])
        await eventually(lambda: order[-1] is False, "its end")
        assert order == [True, *range(1000), False]
    finally:
        stream.close()
        witness.disable_monitor()
        ended.close()
        witness.close()
        await turns()
