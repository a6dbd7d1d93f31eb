"""Tests for kvbus's HTTP server at the protocol level.

They test answers to several requests in their order, headers, errors, requests for other protocols, the shutdown, and
removed paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import shutil
import socket
from asyncio.subprocess import PIPE
from email.utils import parsedate_to_datetime

import pytest
import uvloop

from kvbus.http import server
from tests.doubles.bus import eventually
from tests.http.test_http import web
from tests.typed import there


async def exchange(client, text):
    """Send a text to kvbus's HTTP server, and return what the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection(*there(client.bus.daemon.http_address))
    writer.write(text)
    try:
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def request_of(path, *headers, method="GET", version="1.1"):
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: localhost", *headers, "", ""]).encode()


LAST = "Connection: close"


async def test_kvbus_answers_pipelined_http_requests_in_order():
    async with web() as client:
        said = await exchange(client, request_of("/livez") + request_of("/sources") + request_of("/nothing", LAST))
        assert [part[:3] for part in said.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"404"]
        assert said.index(b"ok\n") < said.index(b'"engine"') < said.index(b"no path")
        assert (await exchange(client, b"GET /livez HTTP/1.0\r\n\r\n")).count(b"200 OK") == 1


async def test_an_http_answer_has_a_date_but_no_server_header():
    async with web() as client:
        for path in ("/livez", "/metrics", "/nothing", "/blocks"):
            head = (await exchange(client, request_of(path, LAST, method="HEAD"))).decode()
            assert head.endswith("\r\n\r\n"), path
            fields = {line.split(": ")[0]: line.split(": ")[1] for line in head.split("\r\n")[1:-2]}
            assert parsedate_to_datetime(fields["Date"])
            assert "Server" not in fields
            assert "aiohttp" not in head


@pytest.mark.parametrize(
    "fields",
    [
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked, identity",),
        ("Content-Length: +5",),
        ("Content-Length : 5",),
        ("X: a\rb",),
        ("X: a\x00b",),
        ("X: y",) * 200,
    ],
)
async def test_kvbus_refuses_an_ambiguous_http_request(fields, caplog):
    async with web() as client:
        said = await exchange(client, request_of("/livez", *fields, method="GET") + b"hello")
        assert said.split(b" ")[1] == b"400"
        assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("asked", ["h2c", "websocket"])
async def test_kvbus_ignores_a_request_for_a_protocol_upgrade(asked):
    async with web() as client:
        said = await exchange(client, request_of("/livez", "Connection: Upgrade, close", f"Upgrade: {asked}"))
        assert said.startswith(b"HTTP/1.1 200")


async def test_kvbus_logs_an_error_of_a_request_and_answers_the_next_request(monkeypatch, caplog):
    monkeypatch.setattr(server, "router_entry", None)
    monkeypatch.setattr(server, "read_routers", lambda *_: [1 / 0])
    async with web() as client:
        with caplog.at_level(logging.ERROR):
            assert (await client.status("/routers"))[0] == 500
        assert "ZeroDivisionError" in caplog.text
        assert await client.text("/livez") == "ok\n"


async def test_blocks_without_a_source_is_an_empty_answer():
    async with web() as client:
        client.bus.daemon.relay.sources[0].gone = True
        assert await client.blocks() == []
        assert (await client.status("/blocks?source=engine"))[0] == 404
        client.bus.daemon.relay.sources[0].gone = False


async def test_kvbus_finishes_open_http_answers_at_its_end(monkeypatch):
    go_on = asyncio.Event()

    async def wait(work):
        await go_on.wait()
        return list(work) and []

    async with web() as client:
        monkeypatch.setattr(server, "in_slices", wait)
        asking = asyncio.create_task(exchange(client, request_of("/sources")))
        await eventually(lambda: client.bus.daemon.process.http_connections == 1, "the request")
        closing = asyncio.create_task(client.bus.daemon.admin.close())
        await asyncio.sleep(0)
        go_on.set()
        assert (await asking).startswith(b"HTTP/1.1 200")
        await closing


async def test_curl_gets_answers_from_kvbus_with_each_http_version():
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    async with web() as client:
        for options, expected in (
            (["--http2", f"{client.base}/livez", f"{client.base}/readyz"], "ok\nok\n"),
            (["--head", f"{client.base}/metrics"], "HTTP/1.1 200 OK"),
            (["--http1.0", f"{client.base}/blocks"], ""),
        ):
            command = [curl, "--silent", "--show-error", "--fail", "--max-time", "30", *options]
            program = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
            said, wrong = await program.communicate()
            assert (program.returncode, wrong.decode()) == (0, "")
            assert said.decode().startswith(expected)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_kvbus_accepts_http_connections_again_after_a_lack_of_descriptors(new_loop, caplog):
    async def run():
        async with web() as client:
            loop, address = asyncio.get_running_loop(), there(client.bus.daemon.http_address)
            with socket.socket() as peer:
                peer.setblocking(False)
                soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                # With this limit the process can open no descriptor, even if it closes others.
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
                try:
                    await loop.sock_connect(peer, address)
                    await eventually(lambda: "cannot accept an HTTP connection" in caplog.text, "said")
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                await loop.sock_sendall(peer, request_of("/livez", LAST))
                assert (await asyncio.wait_for(loop.sock_recv(peer, 100), 30)).startswith(b"HTTP/1.1 200")

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())
