"""Tests for who may read token ids over HTTP.

Clients on loopback that use a local host name may read them, unless a page of another site sends the request. All
clients may read the paths without token ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from http.client import HTTPResponse
from typing import Any, NamedTuple
from unittest import mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from kvbus.core.stats import HttpRefusal
from kvbus.http import blocks
from kvbus.http.access import Access
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.ports import free_port
from tests.typed import there

TOKEN, NAME, PARENT, REFUSED = 71_234_567, 8_812_345_678, 9_912_345_678, 81_234_567
OPEN = {
    "/",
    "/page.css",
    "/page.js",
    "/metrics",
    "/livez",
    "/readyz",
    "/sources",
    "/routers",
    "/findings",
    "/overview",
} | {
    "/history",
    "/events",
}
"""Paths whose answers contain no token ids. Every client may read them."""


class Answer(NamedTuple):
    status: int
    body: str

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"])


class Asking:
    """A bus with one block and one refused event, and a client that sends raw HTTP requests to it."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.address = there(bus.daemon.http_address)

    async def ask(self, request: str, *, local_address: str | None = None) -> Answer:
        """Send the text as a request. In the text, ``|`` ends a line, and PORT stands for the server's port."""
        text = request.replace("PORT", str(self.address[1])).replace("|", "\r\n") + "\r\n"
        return await asyncio.to_thread(self._ask, text.encode("latin-1"), local_address)

    def _ask(self, request: bytes, local_address: str | None) -> Answer:
        source = None if local_address is None else (local_address, 0)
        with socket.create_connection(self.address, 20, source) as connection:
            connection.sendall(request)
            answer = HTTPResponse(connection, method=request.split()[0].decode())
            answer.begin()
            endless = answer.headers["Content-Type"] == "text/event-stream"
            body = b"".join(answer.readline() for _ in range(4)) if endless else answer.read()
            return Answer(answer.status, body.decode())

    async def get(self, path: str, host: str = "localhost:PORT") -> Answer:
        return await self.ask(f"GET {path} HTTP/1.1|Host: {host}|")

    async def refused(self) -> dict[str, float]:
        """Return the numbers of refused HTTP requests that kvbus's metrics show, by reason."""
        lines = (await self.get("/metrics")).body.splitlines()
        found = [line for line in lines if line.startswith("kvbus_http_refused_total{")]
        return {line.split('"')[1]: float(line.split()[-1]) for line in found}


@contextlib.asynccontextmanager
async def asking(**settings: Any) -> AsyncIterator[Asking]:
    async with (
        running_bus(**settings) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await engine.wait_for_subscriber(60)
        refused = store([REFUSED], tokens=[REFUSED] * 7)
        engine.publish(batch(store([NAME], PARENT, tokens=[TOKEN] * 16), refused))
        await eventually(lambda: bus.caught_up(0), "one block")
        yield Asking(bus)


@pytest.mark.parametrize(
    "request_",
    [
        "GET /blocks HTTP/1.1|Host: localhost|",
        "GET /blocks HTTP/1.1|Host: localhost:PORT|",
        "GET /blocks HTTP/1.1|Host: localhost:1|",  # the local end of a port-forward has its own port
        "GET /blocks HTTP/1.1|Host: localhost:|",
        "GET /blocks HTTP/1.1|host: LocalHost.:PORT|",
        "GET /blocks HTTP/1.1|Host: 127.0.0.1:PORT|",
        "GET /blocks HTTP/1.1|Host: 127.8.9.10|",
        "GET /blocks HTTP/1.1|Host: [::1]:PORT|",
        "GET /blocks HTTP/1.1|Host: [0:0:0:0:0:0:0:1]|",
        "GET /blocks HTTP/1.1|Host: [::ffff:127.0.0.1]:PORT|",
        "GET /blocks HTTP/1.0|Host: localhost|",
        "GET /blocks?source=engine HTTP/1.1|Host: localhost|",
        "GET http://localhost:PORT/blocks HTTP/1.1|Host: localhost:PORT|",
        "GET /blocks HTTP/1.1|Host: localhost:PORT|Sec-Fetch-Site: none|",
        "GET /blocks HTTP/1.1|Host: localhost:PORT|Sec-Fetch-Site: same-origin|Origin: http://localhost:PORT|",
        "GET /blocks HTTP/1.1|Host: kvbus.example.internal:PORT|",
        "GET /blocks HTTP/1.1|Host: KVBUS.example.internal.|",
        "GET /blocks HTTP/1.1|Host: [FD00::7]:80|",
    ],
)
async def test_a_loopback_client_may_read_blocks_under_local_and_allowed_host_names(request_: str) -> None:
    async with asking(http_allowed_hosts=["Kvbus.Example.Internal", "[fd00:0::7]"]) as here:
        answer = await here.ask(request_)
        assert answer.status == 200, answer.body
        assert json.loads(answer.body)["token_ids"] == [TOKEN] * 16


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        *(
            (f"GET /blocks HTTP/1.1|Host: {host}|", "host")
            for host in (
                "evil.example",
                "evil.example:PORT",
                "localhost.evil.example",
                "evil.localhost",  # a resolver need not resolve these names to loopback
                "localhost@evil.example",
                "evil.example@localhost",
                "localhost evil.example",
                "localhost,evil.example",
                "127.0.0.1.evil.example",
                "127.0.0.1.nip.io",
                "127.1",
                "0177.0.0.1",
                "2130706433",
                "0.0.0.0:PORT",
                "10.1.2.3:PORT",
                "[::]",
                "[::2]",
                "[::ffff:10.1.2.3]",
                "::1",
                "[localhost]",
                "[127.0.0.1]",
                "[::1",
                ".",
                "",
                "localhost:PORT/blocks",
                "kvbus.example.internal",
            )
        ),
        ("GET /blocks HTTP/1.0|", "host"),
        ("GET http://evil.example/blocks HTTP/1.1|Host: localhost:PORT|", "host"),
        ("GET HTTP://evil.example:PORT/blocks HTTP/1.1|Host: localhost:PORT|", "host"),
        ("GET http://localhost@evil.example/blocks HTTP/1.1|Host: localhost:PORT|", "host"),
        ("GET http://localhost:PORT/blocks HTTP/1.1|Host: evil.example|", "host"),
        ("GET /blocks HTTP/1.1|Host: localhost:PORT|X-Forwarded-For: 127.0.0.1|", "forwarded"),
        ("GET /blocks HTTP/1.1|Host: localhost:PORT|x-forwarded-proto: https|", "forwarded"),
        ("GET /blocks HTTP/1.1|Host: localhost:PORT|Forwarded: for=127.0.0.1|", "forwarded"),
        ("GET /blocks HTTP/1.1|Host: localhost:PORT|X-Real-IP: 127.0.0.1|", "forwarded"),
        ("GET /blocks HTTP/1.1|Host: localhost:PORT|Via: 1.1 proxy|", "forwarded"),
        ("GET /blocks HTTP/1.1|Host: localhost:PORT|Sec-Fetch-Site: cross-site|", "cross_site"),
        # A browser sends this for a page of another server on the same host, at another port.
        ("GET /blocks HTTP/1.1|Host: localhost:PORT|Sec-Fetch-Site: same-site|", "cross_site"),
        ("GET /blocks HTTP/1.1|Host: localhost:PORT|Origin: http://evil.example|", "cross_site"),
        ("GET /blocks HTTP/1.1|Host: localhost:PORT|Origin: http://localhost:3000|", "cross_site"),
        ("GET /blocks HTTP/1.1|Host: localhost:PORT|Origin: https://localhost:PORT|", "cross_site"),
        ("GET /blocks HTTP/1.1|Host: localhost:PORT|Origin: null|", "cross_site"),
        ("HEAD /blocks HTTP/1.1|Host: evil.example|", "host"),
        ("GET /%62locks HTTP/1.1|Host: evil.example|", "host"),
        ("GET /blocks?source=nobody HTTP/1.1|Host: evil.example|", "host"),
    ],
)
async def test_a_forbidden_request_is_refused_with_advice_and_counted(request_: str, reason: str) -> None:
    async with asking() as here:
        answer = await here.ask(request_)
        assert answer.status == 403
        assert str(TOKEN) not in answer.body
        if not request_.startswith("HEAD"):
            assert f"http://127.0.0.1:{here.address[1]}/blocks" in answer.error
            assert answer.error.startswith("/blocks shows token ids")
        assert await here.refused() == {**dict.fromkeys(map(str, HttpRefusal), 0), reason: 1}


@pytest.mark.parametrize(
    "request_",
    [
        "GET /blocks HTTP/1.1|",
        "GET /blocks HTTP/1.1|Host: localhost|Host: localhost|",
        "GET /blocks HTTP/1.1|Host: localhost|Host: evil.example|",
    ],
)
async def test_a_request_without_exactly_one_host_header_is_invalid(request_: str) -> None:
    async with asking() as here:
        assert (await here.ask(request_)).status == 400


def request_for(path: str, headers: list[tuple[str, str]], transport: mock.Mock) -> web.Request:
    return make_mocked_request("GET", path, CIMultiDict(headers), transport=transport)


LOCAL, OWN, OTHER = ("127.0.0.1", 1), ("10.1.2.3", 9477), ("10.1.2.9", 1)


@pytest.mark.parametrize(
    ("peer", "own", "refusal"),
    [
        (LOCAL, ("127.0.0.1", 9477), None),
        (("127.9.9.9", 1), ("127.0.0.1", 9477), None),
        (("::1", 1, 0, 0), ("::1", 9477, 0, 0), None),
        (("::ffff:127.0.0.1", 1, 0, 0), ("::ffff:127.0.0.1", 9477, 0, 0), None),
        (OTHER, OWN, HttpRefusal.PEER),
        (OWN, OWN, HttpRefusal.PEER),  # a client in the pod that uses the pod's own address
        (("::ffff:10.1.2.9", 1, 0, 0), ("::ffff:10.1.2.3", 9477, 0, 0), HttpRefusal.PEER),
        (("fe80::1%eth0", 1, 0, 2), ("fe80::2%eth0", 9477, 0, 2), HttpRefusal.PEER),
        (("127.0.0.6", 1), OWN, HttpRefusal.PEER),  # the proxy of a service mesh
        (OTHER, ("127.0.0.1", 9477), HttpRefusal.PEER),
        (None, None, HttpRefusal.PEER),  # the connection has ended meanwhile
    ],
)
def test_content_requires_loopback_addresses_at_each_end_of_the_connection(
    peer: tuple[str, int] | None, own: tuple[str, int] | None, refusal: HttpRefusal | None
) -> None:
    transport = mock.Mock()
    transport.get_extra_info = lambda name, default=None: {"peername": peer, "sockname": own}.get(name, default)
    headers = [("Host", "localhost:9477")]
    request = request_for("/blocks", headers, transport)
    assert Access([]).refusal(request) is refusal
    # The addresses that a peer claims in headers open nothing: such a request counts as forwarded.
    headers += [("x-forwarded-for", "127.0.0.1"), ("x-real-ip", "127.0.0.1")]
    request = request_for("/blocks", headers, transport)
    assert Access([]).refusal(request) is (refusal or HttpRefusal.FORWARDED)


async def test_the_access_rule_refuses_a_request_with_two_host_headers() -> None:
    transport = mock.Mock()
    transport.get_extra_info = lambda *_: LOCAL
    headers = [("Host", "localhost"), ("Host", "localhost")]
    request = request_for("/blocks", headers, transport)
    assert Access([]).refusal(request) is HttpRefusal.HOST


async def test_a_client_at_any_loopback_address_may_read_blocks() -> None:
    async with asking() as here:
        assert (await here.ask("GET /blocks HTTP/1.1|Host: localhost|", local_address="127.0.0.9")).status == 200


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("address", ["[::1]", "[::]"])
async def test_a_client_at_ipv6_loopback_may_read_blocks(address: str) -> None:
    async with asking(http=f"{address}:{free_port()}") as here:
        here.address = ("::1", here.address[1])
        assert (await here.get("/blocks", "[::1]:PORT")).status == 200
        assert (await here.get("/blocks", "evil.example")).status == 403


async def test_every_http_path_is_declared_open_or_protected() -> None:
    """Every HTTP path is in ``OPEN`` or is protected, so the test fails for a new path that is neither."""
    async with asking() as here:
        paths = {name: path.methods[0] for name, path in here.bus.daemon.admin.paths.items()}
        assert paths.keys() > OPEN
        for path, method in paths.items():
            headers = "Host: evil.example|Origin: http://evil.example|X-Forwarded-For: 10.0.0.1|"
            query = "?source=engine" if path == "/history" else ""
            answer = await here.ask(f"{method} {path}{query} HTTP/1.1|{headers}")
            assert answer.status == (200 if path in OPEN else 403), path


async def test_open_http_paths_and_logs_show_no_tokens_or_hashes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with asking() as here:
        metrics = (await here.get("/metrics")).body
        assert 'kvbus_events_rejected_total{reason="token_count",source="engine"} 1.0' in metrics
        told = caplog.text + "".join([(await here.get(path, "evil.example")).body for path in OPEN])
        (block,) = [json.loads(line) for line in (await here.get("/blocks")).body.splitlines()]
        assert (block["hash"], block["parent"], block["token_ids"][0]) == (NAME, PARENT, TOKEN)
        for secret in (NAME, PARENT, TOKEN, REFUSED):
            assert str(secret) not in told
            assert f"{secret:x}" not in told


async def test_the_log_line_of_a_refusal_contains_no_part_of_the_request(caplog: pytest.LogCaptureFixture) -> None:
    async with asking() as here:
        with caplog.at_level(logging.INFO):
            await here.get("/blocks?source=what-users-wrote", "evil.example")
        lines = [record for record in caplog.records if record.name == "kvbus.http"]
        assert [line.getMessage() for line in lines] == ["/blocks refused to 127.0.0.1: host"]
        # The rate limit distinguishes log lines by their template, so the template may contain no part of the request.
        assert {str(line.msg) for line in lines} == {"%s refused to %s: %s"}
        assert "what-users-wrote" not in caplog.text
        assert "evil.example" not in caplog.text


async def test_a_dump_beyond_max_dumps_counts_as_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_DUMPS", 0)
    async with asking() as here:
        assert (await here.get("/blocks")).status == 503
        assert (await here.refused())["busy"] == 1
