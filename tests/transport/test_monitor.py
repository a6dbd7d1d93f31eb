"""Tests for how kvbus learns from libzmq's monitor that a source's connection has begun or ended."""

import asyncio
import contextlib
import socket
from typing import Any

import zmq

from kvbus.transport.monitor import ConnectionMonitor
from kvbus.transport.sockets import make_socket
from tests.doubles.bus import eventually
from tests.ports import free_port
from tests.transport.loops import both_loops, turns


class Watched:
    """A SUB socket and the connection changes that its monitor has reported."""

    def __init__(self, context):
        self.socket = make_socket(context, zmq.SUB, RECONNECT_IVL=5, RECONNECT_IVL_MAX=0)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.said: list[Any] = []
        self.monitor = ConnectionMonitor(self.socket, self.said.append)


@contextlib.asynccontextmanager
async def watched(context):
    one = Watched(context)
    try:
        yield one
    finally:
        one.monitor.close()
        one.monitor.close()  # a second close must do nothing
        one.socket.close()
        await turns()


def publisher(context, endpoint, *, bind=True):
    pub = context.socket(zmq.PUB)
    pub.setsockopt(zmq.LINGER, 0)
    pub.setsockopt(zmq.RECONNECT_IVL, 5)
    try:
        if bind:
            pub.bind(endpoint)
        else:
            pub.connect(endpoint)
    except BaseException:
        pub.close()
        raise
    return pub


async def bound_again(context, endpoint):
    """Try to bind an address until the previous publisher has released it, and return the new publisher."""
    found = []

    def bind():
        with contextlib.suppress(zmq.ZMQError):
            found.append(publisher(context, endpoint))
        return found

    await eventually(bind, "the address, free again")
    return found[0]


def endpoint():
    return f"tcp://127.0.0.1:{free_port()}"


def refused(where):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(where.rpartition(":")[2]))) != 0


@both_loops
async def test_a_publisher_that_starts_late_and_restarts_is_reported_each_time(context):
    where = endpoint()
    async with watched(context) as one:
        one.socket.connect(where)
        # no publisher listens yet, so at least one of libzmq's connection attempts fails
        await eventually(lambda: refused(where), "a refused connection")
        assert not one.monitor.up
        for life in range(1, 6):
            pub = await bound_again(context, where)
            await eventually(lambda life=life: one.said == [True, False] * (life - 1) + [True], f"life {life} found")
            assert one.monitor.up
            pub.close()
            await eventually(lambda life=life: one.said == [True, False] * life, f"the end of life {life}")
            assert not one.monitor.up


@both_loops
async def test_a_bound_source_is_up_while_any_of_two_peers_is_connected(context):
    """A bound source is up from the first peer's connection to the last peer's disconnection.

    It reports nothing when a second peer connects or one of two leaves.
    """
    where = endpoint()
    async with watched(context) as one:
        one.socket.bind(where)
        first = publisher(context, where, bind=False)
        await eventually(lambda: one.said == [True], "the first peer")
        second = publisher(context, where, bind=False)
        await heard_from(second, one.socket)
        first.close()
        third = publisher(context, where, bind=False)
        await heard_from(third, one.socket)  # so the monitor has already reported the end of the first connection
        assert one.said == [True]
        second.close()
        third.close()
        await eventually(lambda: one.said == [True, False], "the last one gone")
        fourth = publisher(context, where, bind=False)
        await eventually(lambda: one.said == [True, False, True], "a peer after all were gone")
        fourth.close()


async def heard_from(pub, sub):
    """Wait until a message of the publisher reaches the subscriber, so that their handshake is complete."""

    def heard():
        pub.send(b"x")
        return sub.poll(0)

    await eventually(heard, "a message of this peer")
    while sub.poll(0):
        sub.recv()


@both_loops
async def test_a_connection_without_a_handshake_is_not_reported(context):
    """A connection without a ZMTP handshake, such as a port scan, does not count as an engine."""
    where = endpoint()
    port = int(where.rpartition(":")[2])
    async with watched(context) as one:
        one.socket.bind(where)
        for words in (b"", b"GET / HTTP/1.0\r\n\r\n" + b"x" * 64):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(words)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        engine = publisher(context, where, bind=False)
        await eventually(lambda: one.said == [True], "the engine")
        engine.close()
        await eventually(lambda: one.said == [True, False], "its end")


@both_loops
async def test_a_silent_peer_does_not_keep_the_source_up(context):
    """The source goes down with the engine, even if another peer that never sent a byte is still connected."""
    where = endpoint()
    async with watched(context) as one:
        one.socket.bind(where)
        engine = publisher(context, where, bind=False)
        await eventually(lambda: one.said == [True], "the engine")
        _, stranger = await asyncio.open_connection("127.0.0.1", int(where.rpartition(":")[2]))
        late = publisher(context, where, bind=False)
        await heard_from(late, one.socket)  # this peer was accepted after the stranger, so libzmq knows the stranger
        late.close()
        engine.close()
        await eventually(lambda: one.said == [True, False], "no engine any more")
        stranger.close()
        await stranger.wait_closed()


@both_loops
async def test_monitors_opened_and_closed_quickly_do_not_disturb_each_other(context):
    """Monitors that are opened and closed quickly do not disturb each other.

    The address of a monitor contains the number of a file descriptor, and the kernel reuses these numbers.
    """
    where = endpoint()
    pub = publisher(context, where)
    for _ in range(25):
        async with watched(context) as one:
            one.socket.connect(where)
            await eventually(lambda one=one: one.said == [True], "the connection")
    pub.close()


@both_loops
async def test_a_closed_monitor_reports_nothing(context):
    where = endpoint()
    pub = publisher(context, where)
    async with watched(context) as one:
        one.socket.connect(where)
        await eventually(lambda: one.said == [True], "the connection")
        one.monitor.close()
        pub.close()
        again = await bound_again(context, where)
        await heard_from(again, one.socket)
        assert one.said == [True]
        again.close()
