"""Tests that kvbus notices a peer that vanished silently.

It uses only the kernel's TCP keepalive for this.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import zmq

from kvbus.core.wire.frames import replay_request
from kvbus.transport.client.raw import RawSubscriber
from kvbus.transport.client.subscriber import StreamSockets
from kvbus.transport.request import RequestConnection
from kvbus.transport.sockets import OPTIONS, PeerPolicy, check_peer, make_context, make_socket
from kvbus.transport.subscription import DialledStream, Events
from tests.doubles.bus import eventually
from tests.ports import free_port
from tests.transport.live.test_stream import stream_of
from tests.transport.loops import turns
from tests.transport.test_replay_server import served

ROOT = Path(__file__).parents[2]
ESTABLISHED, KEEPALIVE = "01", "02"
IDLE_S = 30.0
TICKS = os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("kind", OPTIONS)
def test_sockets_use_tcp_keepalive_and_no_zmtp_heartbeat(context, kind):
    with make_socket(context, kind) as socket:
        assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
        assert socket.getsockopt(zmq.TCP_MAXRT) == 0
        assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
        assert socket.getsockopt(zmq.TCP_KEEPALIVE_IDLE) == IDLE_S
        assert socket.getsockopt(zmq.TCP_KEEPALIVE_INTVL) == 10
        assert socket.getsockopt(zmq.TCP_KEEPALIVE_CNT) == 3


def probes(port: int, *, accepted: bool) -> list[float | None]:
    """Return for each connection to a port the idle time in seconds after which the kernel probes it, or None for
    never.

    With ``accepted``, look at the accepting end of each connection, otherwise at the connecting end.
    """
    found: list[float | None] = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, remote, state, _, timer, *_ = line.split()
            end = local if accepted else remote
            if state == ESTABLISHED and int(end.rpartition(":")[2], 16) == port:
                kind, _, ticks = timer.partition(":")
                found.append(int(ticks, 16) / TICKS if kind == KEEPALIVE else None)
    return found


async def probed(port: int, *, accepted: bool) -> None:
    """Wait until the only connection to a port has a keepalive timer of at most `IDLE_S` seconds.

    With ``accepted``, the timer of the accepting end counts, otherwise the timer of the connecting end.
    """

    def settled() -> bool:
        seconds = probes(port, accepted=accepted)
        return len(seconds) == 1 and seconds[0] is not None and seconds[0] <= IDLE_S

    await eventually(settled, f"keepalive after {IDLE_S:g} s on the connection of port {port}")


@contextlib.contextmanager
def peer(kind: int, *, listens: bool, port: int) -> Iterator[zmq.Socket[bytes]]:
    """Yield a socket of the peer to which kvbus's socket is connected. It sets no keepalive option."""
    with zmq.Context() as own, own.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        (socket.bind if listens else socket.connect)(f"tcp://127.0.0.1:{port}")
        yield socket


async def test_kvbus_probes_silent_routers_with_tcp_keepalive(context):
    async with stream_of(context, state=False) as output, served(1) as replay:
        with peer(zmq.SUB, listens=False, port=output.port):
            await probed(output.port, accepted=True)
        replay_port = int(replay.endpoint.rpartition(":")[2])
        with peer(zmq.DEALER, listens=False, port=replay_port):
            await probed(replay_port, accepted=True)


async def test_kvbus_probes_silent_engines_with_tcp_keepalive(context):
    port, replay_port = free_port(), free_port()
    where, replay = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}"
    with peer(zmq.PUB, listens=True, port=port), peer(zmq.ROUTER, listens=True, port=replay_port):
        events = Events(lambda _: None, lambda _: None)
        stream = DialledStream(where, topics=[b""], events=events, policy=PeerPolicy(1000))
        question = RequestConnection(context, replay, replay_request(0), lambda _: None)
        try:
            await probed(port, accepted=False)
            await probed(replay_port, accepted=False)
        finally:
            stream.close()
            question.close()
            await turns()


async def test_client_sockets_probe_a_silent_publisher_with_tcp_keepalive():
    port, replay_port = free_port(), free_port()
    where, replay = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}"
    with peer(zmq.PUB, listens=True, port=port), peer(zmq.ROUTER, listens=True, port=replay_port):
        async with RawSubscriber(where):
            await probed(port, accepted=False)
        sockets = StreamSockets(where, replay, handler=mock.Mock())
        sockets.open()
        try:
            await eventually(lambda: len(probes(port, accepted=False)) == 1, "its own connection alone")
            await probed(port, accepted=False)
            sockets.ask(0)
            await probed(replay_port, accepted=False)
        finally:
            await sockets.aclose()


async def test_client_sockets_give_up_the_handshake_of_a_silent_peer():
    """kvbus's client sockets give up a handshake after three seconds, as the daemon does, and connect again.

    libzmq's default is 30 s.
    """
    begun = asyncio.get_running_loop().time()
    accepted: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with RawSubscriber(f"tcp://127.0.0.1:{port}"):
        sockets = StreamSockets(f"tcp://127.0.0.1:{port}", None, handler=mock.Mock())
        sockets.open()
        try:
            await eventually(lambda: len(accepted) >= 4, "each has tried a second time")
        finally:
            await sockets.aclose()
    assert asyncio.get_running_loop().time() - begun < 20
    for writer in accepted:
        writer.close()
    server.close()


def test_the_context_has_sockets_for_a_thousand_sources():
    """kvbus's ZeroMQ context has sockets for a thousand sources, which need at least two each. libzmq's default is
    1,023.
    """
    with make_context() as context, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(make_socket(context, zmq.SUB)) for _ in range(1_100)]
        assert len(sockets) == 1_100


async def test_the_endpoint_of_a_bound_subscriber_has_host_and_port():
    async with RawSubscriber("tcp://127.0.0.1:*", bind=True) as bound:
        assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", bound.endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:9",
        "tcp://engine-0.engines_x:9",
        "tcp://[::1]:9",
        "tcp://[fe80::1%lo]:9",
        "tcp://0.0.0.0:0;127.0.0.1:9",
        "tcp://:9",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1",
        "tcp://a b:9",
        "tcp://ä:9",
        "tcp://-a:9",
        "tcp://",
        "ipc://@kvbus-none",
        "ipc://" + "p" * 107,
        "ipc://" + "p" * 108,
        "inproc://a",
        "127.0.0.1:9",
        "nonsense",
        "nonsense://a",
        "",
    ],
)
def test_check_peer_refuses_exactly_the_endpoints_that_libzmq_refuses(context, endpoint):
    with make_socket(context, zmq.DEALER) as socket:
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            with pytest.raises(ValueError, match="cannot connect to"):
                check_peer(endpoint)
        else:
            check_peer(endpoint)
