"""Tests for the dialler, which connects to routers that bind their SUB, and reconnects, without blocking kvbus."""

import asyncio
import contextlib
import itertools
import socket

import pytest
import zmq

from kvbus.common.errors import BindError
from kvbus.transport.zmtp import endpoint as endpoint_module
from kvbus.transport.zmtp.endpoint import Dialler
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.reasons import Reason
from kvbus.transport.zmtp.settings import Settings
from tests.doubles.bus import eventually
from tests.ports import free_port
from tests.transport.loops import both_loops, turns
from tests.transport.zmtp.peers import Recorder
from tests.transport.zmtp.test_listener import received


@contextlib.asynccontextmanager
async def dialling(endpoint, *, keys=None, **settings):
    """Yield a dialler, with CURVE if there are keys, and a handler that records the events of its peers."""
    seen = Recorder()
    mechanism = None if keys is None else keys.mechanism
    dialler = Dialler(endpoint, Role.PUB, seen, settings=Settings(**settings), refused=seen.refuse, mechanism=mechanism)
    try:
        yield dialler, seen
    finally:
        dialler.close()
        await turns(5)
        assert not dialler.peers


@pytest.fixture
def bind(context):
    """A function that binds a socket. The test's end closes it."""
    made = []

    def one(kind, endpoint):
        socket = context.socket(kind)
        made.append(socket)
        socket.linger = 0
        socket.ipv6 = True
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.bind(endpoint)
        return socket

    yield one
    for each in made:
        each.close()


def subscribes(sub, seen, count=1):
    """Return whether kvbus has got ``count`` subscriptions.

    A bound SUB sends them only when its application calls libzmq.
    """
    sub.poll(0)
    return len(seen.topics) == count


async def bound_again(bind, endpoint):
    """Bind an endpoint that was just closed. Try again until libzmq has released it."""
    made = []

    def free():
        with contextlib.suppress(zmq.ZMQError):
            made.append(bind(zmq.SUB, endpoint))
        return made

    await eventually(free, "the endpoint free")
    return made[0]


@both_loops
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", None])
async def test_a_binding_router_gets_every_message(bind, tmp_path, host):
    endpoint = f"ipc://{tmp_path}/kv" if host is None else f"tcp://{host}:{free_port()}"
    sub = bind(zmq.SUB, endpoint.replace("localhost", "127.0.0.1"))
    async with dialling(endpoint) as (_, seen):
        await eventually(lambda: subscribes(sub, seen), "its subscription")
        sent = [[b"kv", n.to_bytes(8, "big"), b"p" * (n % 2_000)] for n in range(2_000)]
        for frames in sent:
            seen.send(*frames)
        assert await received(sub, len(sent)) == sent


@both_loops
async def test_a_dialler_connects_again_each_time_its_router_restarts(bind):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    async with dialling(endpoint) as (_, seen):
        await asyncio.sleep(0.3)  # wait for some failed attempts
        for n in range(3):
            sub = await bound_again(bind, endpoint)
            await eventually(lambda n=n, sub=sub: subscribes(sub, seen, n + 1), "the router found")
            seen.send(b"here")
            assert await received(sub, 1) == [[b"here"]]
            sub.close()
            await eventually(lambda n=n: len(seen.ends) == n + 1, "its end")
        assert set(seen.ends) == {Reason.LEFT}
        assert seen.refused == []


@both_loops
async def test_waits_between_connection_attempts_double_up_to_a_maximum(monkeypatch):
    monkeypatch.setattr(endpoint_module, "FIRST", 0.01)
    monkeypatch.setattr(endpoint_module, "LONGEST", 0.08)
    at, loop = [], asyncio.get_running_loop()

    def refuse(_reader, writer):
        at.append(loop.time())
        writer.transport.abort()

    port = free_port()
    async with await asyncio.start_server(refuse, "127.0.0.1", port), dialling(f"tcp://127.0.0.1:{port}"):
        await eventually(lambda: len(at) >= 16, "sixteen attempts")
    waits = [b - a for a, b in itertools.pairwise(at)]
    tick = 0.001  # uvloop's timers and its clock count whole milliseconds
    least = [longest / 2 - 2 * tick for longest in (0.01, 0.02, 0.04, 0.08, 0.08)]
    assert all(wait >= shortest for wait, shortest in zip(waits, least, strict=False))
    assert sum(waits) < 60  # pauses that double without a limit would take longer


@both_loops
async def test_a_dialler_resolves_the_host_name_at_each_attempt(monkeypatch, bind):
    endpoint = f"tcp://router.example:{free_port()}"
    asked: list[str] = []
    answers = [socket.gaierror(-2, "Name or service not known")] * 2

    def look_up(host, port, flags=0, **given):
        if host != "router.example" or flags:
            return real(host, port, flags=flags, **given)
        asked.append(host)
        if answers:
            raise answers.pop()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    sub = bind(zmq.SUB, endpoint.replace("router.example", "127.0.0.1"))
    async with dialling(endpoint) as (_, seen):
        await eventually(lambda: subscribes(sub, seen), "the router found")
        assert asked == ["router.example"] * 3


@both_loops
async def test_a_dialler_refuses_an_unsuitable_peer_and_connects_again(bind):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    other = bind(zmq.PULL, endpoint)
    async with dialling(endpoint) as (_, seen):
        await eventually(lambda: len(seen.refused) > 1, "two refusals: ours, or its own")
        other.close()
        sub = await bound_again(bind, endpoint)
        await eventually(lambda: subscribes(sub, seen), "the router in its place")


@both_loops
async def test_a_dialler_gives_up_a_silent_peer_at_the_handshake_timeout():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        async with dialling(endpoint, handshake_timeout=0.05) as (_, seen):
            await eventually(lambda: len(seen.refused) > 1, "two attempts")
            assert set(seen.refused) == {Reason.HANDSHAKE_TIMEOUT}


@pytest.mark.parametrize("endpoint", ["tcp://nowhere", "udp://127.0.0.1:1", "tcp://:1"])
async def test_an_endpoint_to_which_nothing_can_connect_raises_bind_error(endpoint):
    with pytest.raises(BindError, match=f"cannot connect to {endpoint}"):
        Dialler(endpoint, Role.PUB, Recorder())
