"""Tests for one request to an engine and its answer, with real publishers, on a connection of its own."""

import socket as plain
from typing import Any

import pytest
import zmq

from kvbus.core.wire.frames import replay_request
from kvbus.transport.engine.publisher import EnginePublisher
from kvbus.transport.monitor import ConnectionMonitor, unread
from kvbus.transport.pump import receive
from kvbus.transport.request import RequestConnection
from kvbus.transport.sockets import make_socket
from tests.doubles.bus import eventually
from tests.ports import free_port
from tests.transport.loops import END, both_loops, turns, u64


def endpoint():
    return f"tcp://127.0.0.1:{free_port()}"


@both_loops
async def test_messages_that_libzmq_leaves_in_the_kernel_count_as_unread(context):
    where = endpoint()
    socket = make_socket(context, zmq.SUB, RCVHWM=1)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    monitor = ConnectionMonitor(socket, lambda up: None, abandoned=lambda stood: None)
    assert not monitor.unread
    socket.connect(where)
    try:
        async with EnginePublisher(where, None, bind=True) as engine:
            await engine.wait_for_subscriber(60)
            await eventually(lambda: monitor.up, "the connection")
            assert not monitor.unread
            for _ in range(100):
                engine.publish(bytes(100_000))
            await eventually(lambda: monitor.unread, "libzmq to have enough")
            for _ in range(100):
                await eventually(lambda: socket.poll(0), "a batch")
                receive(socket)
            assert not monitor.unread
        await eventually(lambda: monitor.peer is None, "the end of the connection")
        assert not monitor.unread
    finally:
        monitor.close()
        socket.close()
        await turns()


def test_a_reused_descriptor_of_another_connection_does_not_count_as_unread():
    with plain.create_server(("127.0.0.1", 0)) as server, plain.create_connection(server.getsockname()) as one:
        other, peer = server.accept()
        with other:
            assert not unread(other.fileno(), peer)
            one.sendall(b"x")
            other.recv(1, plain.MSG_PEEK)
            assert unread(other.fileno(), peer)
            assert not unread(other.fileno(), (peer[0], peer[1] + 1))
            assert not unread(server.fileno(), peer)
        assert not unread(other.fileno(), peer)


def replays(context, where, start):
    got: list[Any] = []
    return RequestConnection(context, where, replay_request(start), got.append), got


@both_loops
@pytest.mark.parametrize("framing", ["3", "4"])
async def test_a_replay_request_gets_all_batches_and_end(context, framing):
    async with EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True, framing=framing) as engine:
        for n in range(5000):
            engine.publish(b"%d" % n)
        client, got = replays(context, engine.replay_endpoint, 10)
        await eventually(lambda: got and END in got[-1], "the END")
        assert [frames[-2:] for frames in got[:-1]] == [[u64(n), b"%d" % n] for n in range(10, 5000)]
        client.close()
        await turns()


@both_loops
async def test_a_replay_request_made_before_the_engine_starts_is_answered(context):
    where = endpoint()
    client, got = replays(context, where, 0)
    async with EnginePublisher("tcp://127.0.0.1:*", where, bind=True):
        await eventually(lambda: got and END in got[-1], "the END")
    client.close()
    await turns()


@both_loops
async def test_the_answer_to_an_older_request_never_reaches_a_newer_request(context):
    """The engine answers two requests late and together. kvbus has cancelled the first request and reads only the
    second answer.
    """
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    where = f"tcp://127.0.0.1:{port}"
    old, old_got = replays(context, where, 1)
    asked = {}

    def request():
        if router.poll(0):
            identity, _, start = router.recv_multipart()
            asked[int.from_bytes(start, "big")] = identity
        return asked

    await eventually(lambda: 1 in request(), "the old request")
    old.close()
    await turns()
    new, new_got = replays(context, where, 2)
    await eventually(lambda: 2 in request(), "the new request")
    assert asked[1] != asked[2]
    for at in range(100):
        router.send_multipart([asked[1], b"", b"", u64(at), b"old"])
        router.send_multipart([asked[2], b"", b"", u64(at), b"new"])
    for identity in asked.values():
        router.send_multipart([identity, b"", b"", END, b""])
    await eventually(lambda: new_got and END in new_got[-1], "the END of the new answer")
    assert old_got == []
    assert [frames[-1] for frames in new_got[:-1]] == [b"new"] * 100
    new.close()
    router.close(0)
    await turns()


@both_loops
async def test_hundreds_of_cancelled_requests_leak_no_descriptor(context):
    """Cancelling requests at any moment leaks no file descriptor, and the engine answers the next request."""
    async with EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True) as engine:
        for n in range(50):
            engine.publish(b"%d" % n)
        for n in range(300):
            client, got = replays(context, engine.replay_endpoint, 0)
            if n % 10 == 0:
                await eventually(lambda got=got: got, "a first answer")
            client.close()
            await turns(2)
        client, got = replays(context, engine.replay_endpoint, 0)
        await eventually(lambda: got and END in got[-1], "the last one's END")
        assert len(got) == 51
        client.close()
        await turns()
