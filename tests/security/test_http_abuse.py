"""Tests that a bad client of kvbus's HTTP server uses few of its resources, and never delays the health probes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from itertools import chain, repeat
from typing import Any

import pytest

from kvbus.http import blocks, connections
from kvbus.telemetry.metrics import Exposition
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.typed import there


class Peer:
    """A client's raw TCP connection to kvbus's HTTP server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, text: str | bytes) -> None:
        self.writer.write(text if isinstance(text, bytes) else text.encode())

    async def status(self) -> int:
        async with asyncio.timeout(60):
            return int((await self.reader.readline()).split()[1])

    async def gone(self) -> bool:
        """Wait until the server has closed the connection, and return True. Fail after 60 seconds."""
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65536):
                    pass
        return True


class Crowd:
    """A bus and any number of raw TCP connections to its HTTP server."""

    def __init__(self, bus: Bus, stack: contextlib.AsyncExitStack) -> None:
        self.bus, self._stack = bus, stack
        self.closed = bus.daemon.process.http_closed

    async def connect(self, **limits: Any) -> Peer:
        host, port = there(self.bus.daemon.http_address)
        reader, writer = await asyncio.open_connection(host, port, **limits)

        async def close() -> None:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

        self._stack.push_async_callback(close)
        return Peer(reader, writer)

    async def probe(self) -> int:
        peer = await self.connect()
        peer.say("GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return await peer.status()

    @property
    def open(self) -> int:
        return self.bus.daemon.process.http_connections


@contextlib.asynccontextmanager
async def crowd(**settings) -> AsyncIterator[Crowd]:
    async with running_bus(**settings) as bus, contextlib.AsyncExitStack() as stack:
        yield Crowd(bus, stack)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(connections, "TIMEOUT", 0.3)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        b"GET",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nff",
        b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n",  # the client gets its answer, and sends nothing more
    ],
)
async def test_a_slow_http_client_is_disconnected(impatient, said):
    async with crowd() as them:
        peers = [await them.connect() for _ in range(10)]
        for peer in peers:
            peer.say(said)
        await eventually(lambda: them.open == 0, "all closed")
        for peer in peers:
            assert await peer.gone()
        assert await them.probe() == 200


async def test_sending_byte_by_byte_does_not_extend_the_time_limit(impatient):
    """The server's time limit begins with the request, and does not begin again with each byte of it."""
    async with crowd() as them:
        peer = await them.connect()
        # The request's header never ends, so the connection ends only by the server's timeout.
        head = chain(b"GET /livez HTTP/1.1\r\nHost: ", repeat(ord("x")))

        def dripping() -> bool:
            peer.say(bytes([next(head)]))
            return them.closed["slow"] == 1

        await eventually(dripping, "closed while it dripped")


async def test_a_connection_over_the_limit_closes_the_oldest_idle_connection():
    async with crowd() as them:
        peers = [await them.connect() for _ in range(connections.MAX_CONNECTIONS)]
        await eventually(lambda: them.open == connections.MAX_CONNECTIONS, "all open")
        for n in range(20):
            assert await them.probe() == 200, n
        assert them.open <= connections.MAX_CONNECTIONS
        assert await peers[0].gone()
        assert them.closed["too_many"] >= 1
        flood = [await them.connect() for _ in range(3 * connections.MAX_CONNECTIONS)]
        await eventually(lambda: them.closed["too_many"] >= len(flood) - connections.MAX_CONNECTIONS, "refused")
        assert them.open <= connections.MAX_CONNECTIONS
        assert await them.probe() == 200


async def test_the_address_with_the_most_connections_loses_its_own_connections():
    """At its limit of connections, the server closes a connection of the client address that has the most connections.

    It chooses a connection on which no request has arrived yet.
    """
    async with crowd() as them:
        (alone,) = [await them.connect(local_addr=("127.0.0.2", 0))]
        crowded = [await them.connect() for _ in range(3 * connections.MAX_CONNECTIONS)]
        await eventually(lambda: them.closed["too_many"] == 1 + 2 * connections.MAX_CONNECTIONS, "those too many")
        assert await crowded[0].gone()
        alone.say("GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert await alone.status() == 200


async def test_dumps_of_clients_that_read_nothing_are_aborted(monkeypatch):
    """The server aborts the dumps of blocks for clients that do not read, so that other clients get their dumps."""
    monkeypatch.setattr(connections, "TIMEOUT", 5.0)  # all dumps begin before the server gives up the first one
    async with crowd() as them, EnginePublisher(them.bus.engine, them.bus.engine_replay, bind=True) as engine:
        await engine.wait_for_subscriber(60)
        for n in range(60):
            engine.publish(batch(*[store([1000 * n + i]) for i in range(500)]))
        await eventually(lambda: them.bus.caught_up(59), "many blocks")
        peers = [await them.connect(limit=1024) for _ in range(blocks.MAX_DUMPS)]
        for peer in peers:
            transport = peer.writer.transport
            assert isinstance(transport, asyncio.Transport)
            transport.pause_reading()
            peer.say("GET /blocks HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await eventually(lambda: them.bus.daemon.process.http_dumps == blocks.MAX_DUMPS, "all dumps under way")
        refused = await them.connect()
        refused.say("GET /blocks HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await refused.status() == 503
        await eventually(lambda: them.bus.daemon.process.http_dumps == 0, "all dumps given up")
        assert await them.probe() == 200


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("GET / HTTP/1.1\r\nHost: x\r\nX: " + "y" * 100_000 + "\r\n\r\n", 400),
        ("GET /" + "y" * 100_000 + " HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("GET /metrics HTTP/1.1\r\nHost: x\r\n" + "A: b\r\n" * 100_000 + "\r\n", 400),
        ("nonsense\r\n\r\n", 400),
        ("GET /metrics HTTP/9.9\r\nHost: x\r\n\r\n", 400),
        ("POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello", 405),
        ("PUT /sources HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", 405),
        ("DELETE /blocks HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        ("PATCH / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", 405),
        ("OPTIONS /livez HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        ("GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        ("GET /blocks?source=%00%ff%0d%0aX-Injected:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
    ],
)
async def test_unsupported_http_requests_are_refused(request_, status):
    async with crowd() as them:
        peer = await them.connect()
        peer.say(request_)
        try:
            said = await peer.status()
        except (ConnectionError, IndexError):  # the server refused the request by closing the connection
            said = 400
        assert said == status or (status == 400 and said in (400, 431))
        assert await them.probe() == 200


async def test_no_connection_stays_open_after_a_thousand_connections():
    async with crowd() as them:
        for _ in range(1000):
            _, writer = await asyncio.open_connection(*there(them.bus.daemon.http_address))
            writer.transport.abort()
        await eventually(lambda: them.open == 0, "all forgotten")
        assert await them.probe() == 200


async def test_the_http_server_listens_on_loopback_by_default():
    async with running_bus() as bus:
        assert there(bus.daemon.http_address)[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "said",
    [
        b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 200_000,
        b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n\r\n" + b"x" * 2_000_000,
        b"POST /livez HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"8\r\n12345678\r\n" * 200_000,
        b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" + b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" * 50_000,
    ],
    ids=["head", "body", "chunks", "requests ahead"],
)
async def test_an_http_client_that_sends_too_much_is_disconnected(said):
    """kvbus does not read the bytes beyond the limit, so they never use its memory."""
    async with crowd() as them:
        peer = await them.connect()
        peer.say(said)
        assert await peer.gone()
        await eventually(lambda: them.open == 0, "closed")
        assert await them.probe() == 200


async def test_a_probe_is_answered_while_all_connections_wait_for_an_answer(monkeypatch):
    """The server closes the newest connection that waits for an answer, so that a health probe can connect.

    The other clients get their answers.
    """
    go_on = threading.Event()
    render = Exposition.render
    monkeypatch.setattr(Exposition, "render", lambda self, readings: go_on.wait(60) and render(self, readings))
    asked: list[object] = []
    wait = connections.Connections.waiting

    def counted(self: connections.Connections, transport: asyncio.BaseTransport | None) -> Any:
        asked.append(transport)
        return wait(self, transport)

    monkeypatch.setattr(connections.Connections, "waiting", counted)
    async with crowd() as them:
        peers = [await them.connect() for _ in range(connections.MAX_CONNECTIONS)]
        for peer in peers:
            peer.say("GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        await eventually(lambda: len(asked) == len(peers), "all requests there")
        for n in range(20):
            assert await them.probe() == 200, n
        assert them.closed == {"too_many": 1}
        new = await them.connect()
        await eventually(lambda: them.open == connections.MAX_CONNECTIONS, "the new one there")
        another = await them.connect()  # the server closes a connection that waits for an answer, not the newest one
        await eventually(lambda: them.closed["too_many"] == 2, "room made")
        for peer in (new, another):
            peer.say("GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert await peer.status() == 200
        go_on.set()
        for peer in peers[-2:]:
            assert await peer.gone()
        for peer in peers[:-2]:
            assert await peer.status() == 200


async def test_idle_http_connections_beyond_the_limit_are_closed():
    async with crowd() as them:
        peers = [await them.connect() for _ in range(1000)]
        await eventually(lambda: them.closed["too_many"] == 1000 - connections.MAX_CONNECTIONS, "closed")
        assert them.open == connections.MAX_CONNECTIONS
        assert await them.probe() == 200
        assert await peers[0].gone()
