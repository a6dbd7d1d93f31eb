"""Tests for diagnostic connection attempts, which report how far a connection gets.

They connect to libzmq sockets of every type, to kvbus's endpoints and to other servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
import zmq
from zmq.utils import z85

from kvbus.transport.curve import Curve, generate
from kvbus.transport.dialling import ClosedError, accept, dial, name_of
from kvbus.transport.grants import Client
from kvbus.transport.reach import Outcome, Stop
from kvbus.transport.zmtp.endpoint import Listener
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.protocol import Limits
from kvbus.transport.zmtp.reasons import ProtocolError
from kvbus.transport.zmtp.wire import encode_message
from kvbus.transport.zmtp_keys import Keys
from tests.doubles.bus import eventually
from tests.ports import free_port
from tests.transport.zmtp.peers import SIGNATURE, Recorder, hello, hello_2

HOST = "tcp://127.0.0.1"
TYPES = ["PUB", "XPUB", "SUB", "XSUB", "ROUTER", "DEALER", "REP", "REQ", "PUSH", "PULL", "PAIR"]


class Peers:
    """libzmq sockets to which a test connects. They are closed at the end of the test."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._made: list[zmq.Socket] = []

    def socket(self, kind: int) -> zmq.Socket:
        self._made.append(self._context.socket(kind))
        return self._made[-1]

    def close(self) -> None:
        for made in self._made:
            made.close(0)
        self._context.term()


@pytest.fixture
def context() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()


@pytest.mark.parametrize("role", [Role.SUB, Role.DEALER, Role.PUB])
@pytest.mark.parametrize("kind", TYPES)
async def test_dial_names_every_socket_type_of_libzmq(context, kind, role):
    bound = context.socket(getattr(zmq, kind))
    endpoint = f"{HOST}:{bound.bind_to_random_port(HOST)}"
    async with dial(endpoint, role, seconds=30) as dialled:
        outcome = dialled.outcome
    assert (outcome.stop, outcome.socket_type, outcome.version, outcome.mechanism) == (Stop.OPEN, kind, (3, 1), "NULL")
    assert (outcome.no_publisher() is not None) == (kind not in {"PUB", "XPUB"})


@pytest.mark.parametrize("mine", [Role.PUB, Role.ROUTER])
@pytest.mark.parametrize("role", [Role.SUB, Role.DEALER])
async def test_dial_names_the_socket_type_of_a_kvbus_listener(mine, role):
    handler = Recorder()
    listener = Listener(f"{HOST}:0", mine, handler, refused=handler.refuse)
    try:
        async with dial(listener.endpoint, role, seconds=30) as dialled:
            assert (dialled.outcome.stop, dialled.outcome.socket_type) == (Stop.OPEN, mine.socket_type.decode())
    finally:
        listener.close()


async def test_dial_sends_and_receives_messages(context):
    publisher = context.socket(zmq.XPUB)
    endpoint = f"{HOST}:{publisher.bind_to_random_port(HOST)}"
    large = Limits(frame_bytes=100_000, message_bytes=100_000)
    async with dial(endpoint, Role.SUB, seconds=30, limits=large) as dialled:
        assert dialled.connection is not None
        await dialled.connection.send(b"\x01kv")
        await eventually(lambda: publisher.poll(0), "its subscription")
        assert publisher.recv() == b"\x01kv"
        publisher.send_multipart([b"kv", b"x" * 70_000])
        assert await dialled.connection.receive() == [b"kv", b"x" * 70_000]
        publisher.close(0)
        with pytest.raises(ClosedError):
            await dialled.connection.receive()


async def test_dial_fails_at_a_frame_over_the_limit(context):
    publisher = context.socket(zmq.XPUB)
    endpoint = f"{HOST}:{publisher.bind_to_random_port(HOST)}"
    async with dial(endpoint, Role.SUB, seconds=30, limits=Limits(frame_bytes=10)) as dialled:
        assert dialled.connection is not None
        await dialled.connection.send(b"\x01")
        await eventually(lambda: publisher.poll(0), "its subscription")
        publisher.send(b"x" * 11)
        with pytest.raises(ProtocolError, match="11 bytes"):
            await dialled.connection.receive()


# -- CURVE


class Pair:
    def __init__(self) -> None:
        self.public, self.secret = generate()

    def towards(self, server: Pair) -> Curve:
        return Curve(self.public, self.secret, server.public)


def guarded(context, kind: int, keys: Pair) -> str:
    bound = context.socket(kind)
    bound.curve_server, bound.curve_publickey, bound.curve_secretkey = 1, keys.public, keys.secret
    return f"{HOST}:{bound.bind_to_random_port(HOST)}"


async def test_dial_tells_right_curve_keys_from_wrong_or_missing_keys(context):
    engine, ours, other = Pair(), Pair(), Pair()
    endpoint, replay = guarded(context, zmq.PUB, engine), guarded(context, zmq.ROUTER, engine)
    found = []
    for where, curve in (
        (endpoint, ours.towards(engine)),
        (replay, ours.towards(engine)),
        (endpoint, ours.towards(other)),
        (endpoint, None),
    ):
        async with dial(where, Role.SUB, seconds=30, curve=curve) as dialled:
            found.append((dialled.outcome.stop, dialled.outcome.socket_type))
    assert found == [(Stop.OPEN, "PUB"), (Stop.OPEN, "ROUTER"), (Stop.KEYS, ""), (Stop.MECHANISM, "")]


async def test_dial_reports_a_key_that_is_not_on_the_list():
    kvbus, ours = Pair(), Pair()
    keys = Keys(Curve(kvbus.public, kvbus.secret), bind=True)
    handler = Recorder()
    listener = Listener(f"{HOST}:0", Role.PUB, handler, refused=handler.refuse, mechanism=keys.mechanism)
    try:
        async with dial(listener.endpoint, Role.SUB, seconds=30, curve=ours.towards(kvbus)) as dialled:
            assert dialled.outcome.stop is Stop.KEYS
    finally:
        listener.close()


# -- what does not get so far


@contextlib.asynccontextmanager
async def saying(data: bytes, *, close: bool = False) -> AsyncIterator[str]:
    opened = []

    class Says(asyncio.Protocol):
        def connection_made(self, transport) -> None:
            opened.append(transport)
            transport.write(data)
            if close:
                transport.close()

    server = await asyncio.get_running_loop().create_server(Says, "127.0.0.1", 0)
    yield f"{HOST}:{server.sockets[0].getsockname()[1]}"
    server.close()
    for transport in opened:
        transport.abort()


@pytest.mark.parametrize(
    ("data", "stop", "sentence"),
    [
        (b"SSH-2.0-x\r\n", Stop.STRANGER, "does not speak ZeroMQ (an SSH server)"),
        (b"HTTP/1.1 400 Bad Request\r\n", Stop.STRANGER, "(an HTTP server)"),
        (b"\x15\x03\x01\x00\x02\x02\x46", Stop.STRANGER, "(a TLS server)"),
        (b"-ERR unknown command\r\n", Stop.STRANGER, "(a Redis server)"),
        (b"\x00\x00\x12\x04\x00", Stop.STRANGER, "(an HTTP/2 or gRPC server)"),
        (b"220 mail ready\r\n", Stop.STRANGER, "(it says '220 mail ready')"),
        (b"\x07\x1b[2J", Stop.STRANGER, "(it begins with 07 1b 5b 32 4a)"),
        (b"\x01\x00", Stop.VERSION, "speaks ZMTP 1.0"),
        (b"", Stop.SILENT, "sends nothing"),
        (SIGNATURE, Stop.CLOSED, "ends the connection in the ZeroMQ handshake"),
    ],
)
async def test_dial_names_a_peer_that_does_not_greet_as_zmtp(data, stop, sentence):
    async with saying(data) as endpoint, dial(endpoint, Role.SUB, seconds=8) as dialled:
        assert dialled.outcome.stop is stop
        assert sentence in dialled.outcome.sentence
        found = dialled.outcome.no_publisher()
        assert found is not None
        assert endpoint in found.text


async def test_dial_reports_a_peer_that_closes_without_a_byte_as_silent():
    async with saying(b"", close=True) as endpoint, dial(endpoint, Role.SUB, seconds=8) as dialled:
        assert dialled.outcome.stop is Stop.SILENT


async def test_dial_refuses_zmtp_2_and_accepts_zmtp_3_0():
    async with saying(hello_2(1)) as endpoint, dial(endpoint, Role.SUB, seconds=8) as dialled:
        assert dialled.outcome.stop is Stop.VERSION
    async with saying(hello(b"PUB", minor=0)) as endpoint, dial(endpoint, Role.SUB, seconds=8) as dialled:
        assert (dialled.outcome.version, dialled.outcome.socket_type) == ((3, 0), "PUB")


async def test_dial_reports_a_refused_connection_if_nothing_listens():
    for endpoint in (f"{HOST}:{free_port()}", "ipc:///nowhere/at/all"):
        async with dial(endpoint, Role.SUB, seconds=8) as dialled:
            assert dialled.outcome.stop is Stop.REFUSED


async def test_dial_connects_to_an_ipc_endpoint(context, tmp_path):
    endpoint = f"ipc://{tmp_path / 'live'}"
    publisher = context.socket(zmq.PUB)
    publisher.bind(endpoint)
    async with dial(endpoint, Role.SUB, seconds=30) as dialled:
        assert dialled.outcome.socket_type == "PUB"


async def test_dial_reports_a_host_name_that_does_not_resolve():
    async with dial("tcp://engine.invalid:5557", Role.SUB, seconds=8) as dialled:
        assert dialled.outcome.stop is Stop.NAME


async def test_dial_reports_a_name_server_that_does_not_answer(monkeypatch):
    async def never(_endpoint):
        await asyncio.Future()

    monkeypatch.setattr("kvbus.transport.reach.find", never)
    async with dial("tcp://engine:5557", Role.SUB, seconds=0.1) as dialled:
        assert dialled.outcome.sentence == (
            "the host name of tcp://engine:5557 does not resolve (no name server answers within 0.1 s)"
        )


async def test_dial_names_an_address_that_libzmq_would_not_try(monkeypatch, context):
    """kvbus requests replays with libzmq, which tries only the first address. Live streams try every address."""
    port = context.socket(zmq.ROUTER).bind_to_random_port(HOST)
    live = context.socket(zmq.PUB).bind_to_random_port(HOST)

    def both(_host, port, family=0, **_):
        prefix = "::ffff:" if family else ""
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (prefix + each, port)) for each in ("127.0.0.2", "127.0.0.1")
        ]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    async with dial(f"tcp://engine:{live}", Role.SUB, seconds=8) as dialled:
        assert (dialled.outcome.stop, dialled.outcome.socket_type) == (Stop.OPEN, "PUB")
    async with dial(f"tcp://engine:{port}", Role.DEALER, seconds=8) as dialled:
        assert dialled.outcome.stop is Stop.OTHER_ADDRESS
        assert dialled.outcome.addresses == ("127.0.0.2", "127.0.0.1")
        assert dialled.outcome.detail == "127.0.0.2; 127.0.0.1 accepts"


# -- who dials in


@pytest.mark.parametrize("encrypted", [False, True])
async def test_accept_names_a_connecting_peer_and_reads_its_messages(context, encrypted):
    endpoint = f"{HOST}:{free_port()}"
    kvbus, engine = Pair(), Pair()
    allowed = Curve(kvbus.public, kvbus.secret, clients={z85.decode(engine.public): Client()}) if encrypted else None
    found: list[str] = []
    heard: list[list[bytes]] = []

    async def listen() -> None:
        async for dialled in accept(endpoint, Role.SUB, allowed, Limits()):
            found.append(dialled.outcome.socket_type)
            if dialled.connection is not None and dialled.outcome.socket_type == "PUB":
                await dialled.connection.send(b"\x01")
                heard.append(await dialled.connection.receive())

    listening = asyncio.ensure_future(listen())
    await asyncio.sleep(0)
    publisher, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    for each in (publisher, router) if encrypted else ():
        each.curve_serverkey, each.curve_publickey, each.curve_secretkey = kvbus.public, engine.public, engine.secret
    router.connect(endpoint)
    await eventually(lambda: found == ["ROUTER"], "the ROUTER")
    publisher.connect(endpoint)

    def message_received() -> bool:
        publisher.send_multipart([b"", b"batch"])
        return bool(heard)

    await eventually(message_received, "a message")
    assert found == ["ROUTER", "PUB"]
    assert heard == [[b"", b"batch"]]
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


def test_each_outcome_of_dial_has_a_sentence_with_the_endpoint():
    for stop in Stop:
        assert "tcp://engine:1" in Outcome("tcp://engine:1", stop).sentence
    assert name_of(encode_message([b"\x00"])) != ""
