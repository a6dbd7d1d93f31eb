"""Tests for the HTTP front.

It forwards requests and answers unchanged. If the engine's answer breaks off, the client learns it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import aiohttp
import pytest
from aiohttp import web

from kvbus.common.errors import BindError
from kvbus.parts.front import server
from tests.doubles.bus import eventually
from tests.front.pod import Pod, running_pod

HEAD = b"Host: engine.example:8000\r\nConnection: close\r\n"


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND"])
async def test_the_front_forwards_a_request_unchanged(pod: Pod, method: str) -> None:
    path = b"/a%2Fb/../c//d;e=1?x=%20y&x=&z=%C3%A4"
    fields = b"X-Twice: 1\r\nx-twice: 2\r\nAuthorization: Bearer k\r\nX-Forwarded-For: 10.0.0.9\r\n"
    body = b"Content-Length: 4\r\n\r\nbody"
    answer = await pod.answer(method.encode() + b" " + path + b" HTTP/1.1\r\n" + HEAD + fields + body)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    ((seen, at, headers, content),) = pod.api.seen
    assert (seen, at.encode(), content) == (method, path, b"body")
    assert headers == [
        ("Host", "engine.example:8000"),
        ("X-Twice", "1"),
        ("X-Twice", "2"),
        ("Authorization", "Bearer k"),
        ("X-Forwarded-For", "10.0.0.9"),
        ("Content-Length", "4"),
    ]
    assert pod.stats.requests == {"passed": 1}


async def test_the_front_does_not_forward_headers_of_the_connection(pod: Pod) -> None:
    named = b"Connection: close, X-Mine, Content-Length, Host\r\nKeep-Alive: 5\r\nTE: trailers\r\nX-Mine: 1\r\n"
    await pod.answer(b"POST /x HTTP/1.1\r\nHost: e\r\nContent-Length: 1\r\nUpgrade: h2c\r\n" + named + b"\r\nz")
    ((_, _, headers, body),) = pod.api.seen
    assert (headers, body) == ([("Host", "e"), ("Content-Length", "1")], b"z")


async def test_the_front_forwards_an_answer_unchanged(pod: Pod) -> None:
    """The front forwards an answer without adding a header: no date, no server and no content type."""
    raw = b"HTTP/1.1 207 Odd Words\r\nset-cookie: a\r\nset-cookie: b\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\0\1\2"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with running_pod({"engine": f"http://127.0.0.1:{port}"}) as its_pod:
        got = await its_pod.answer(b"GET / HTTP/1.1\r\n" + HEAD + b"\r\n")
    server.close()
    head, _, body = got.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if line != b"Connection: close"]
    assert (lines, body) == (raw.partition(b"\r\n\r\n")[0].split(b"\r\n"), b"\0\1\2")


async def test_the_front_forwards_each_part_of_a_stream_at_once(pod: Pod, client: aiohttp.ClientSession) -> None:
    pod.api.parts = [b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"]
    parts = list(pod.api.parts)
    async with client.get(f"{pod.url}/stream") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        for part in parts:  # the engine sends the next part only now
            pod.api.step.release()
            assert await answer.content.readany() == part
        assert await answer.content.read() == b""
    await eventually(lambda: pod.stats.requests["passed"] == 1, "counted")


async def test_a_client_sees_that_the_engine_breaks_off_an_answer(pod: Pod, client: aiohttp.ClientSession) -> None:
    pod.api.parts = [b"data: 1\n\n", b""]
    async with client.get(f"{pod.url}/stream") as answer:
        pod.api.step.release()
        assert await answer.content.readany() == b"data: 1\n\n"
        pod.api.step.release()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.read()
    await eventually(lambda: pod.stats.requests["engine_broke_off"] == 1, "counted")


@pytest.mark.parametrize("path", ["/think", "/stream"])
async def test_the_front_ends_the_engines_request_if_its_client_disconnects(pod: Pod, path: str) -> None:
    pod.api.parts = [b"data: 1\n\n", b"data: 2\n\n"]
    pod.api.step.release()
    reader, writer = await pod.say(b"GET " + path.encode() + b" HTTP/1.1\r\nHost: e\r\n\r\n")
    if path == "/stream":
        await reader.readuntil(b"data: 1\n\n")
    else:
        await asyncio.wait_for(pod.api.asked.wait(), 60)
    writer.close()
    await asyncio.wait_for(pod.api.gone.wait(), 60)
    await eventually(lambda: pod.stats.requests["client_gone"] == 1, "counted")


async def test_the_front_reads_a_body_only_as_fast_as_the_engine(pod: Pod, client: aiohttp.ClientSession) -> None:
    size, sent = 64 * 1024 * 1024, 0

    async def body():
        nonlocal sent
        for _ in range(size // 65_536):
            sent += 65_536
            yield bytes(65_536)

    sending = asyncio.ensure_future(client.post(f"{pod.url}/upload", data=body()))
    before = -1
    while before != sent or sent == 0:  # the engine stops sending when the buffers are full
        before = sent
        await asyncio.sleep(0.3)
    assert sent < size // 2
    pod.api.take.set()
    async with await sending as answer:
        assert await answer.json() == size
    assert pod.api.taken == sent == size


async def test_the_front_reads_an_answer_only_as_fast_as_the_client(pod: Pod) -> None:
    part = bytes(65_536)
    pod.api.parts = [part] * 1024
    for _ in pod.api.parts:
        pod.api.step.release()
    with socket.create_connection(("127.0.0.1", pod.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.sendall(b"GET /stream HTTP/1.0\r\n\r\n")
        left = -1
        while left != len(pod.api.parts) or left == 1024:
            left = len(pod.api.parts)
            await asyncio.sleep(0.3)
        assert left > 512
        loop, got = asyncio.get_running_loop(), 0
        client.setblocking(False)
        while data := await loop.sock_recv(client, 1 << 20):
            got += len(data)
    assert got > 1024 * 65_536


async def test_the_front_answers_expect_with_100_continue(pod: Pod) -> None:
    ask = b"POST /x HTTP/1.1\r\n" + HEAD + b"Content-Length: 4\r\nExpect: 100-continue\r\n\r\n"
    reader, writer = await pod.say(ask)
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"body")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()
    assert pod.api.seen[0][3] == b"body"
    assert "Expect" not in dict(pod.api.seen[0][2])


async def test_the_front_answers_with_502_if_the_engine_is_down(client: aiohttp.ClientSession) -> None:
    async with running_pod({"engine": "http://127.0.0.1:1"}) as pod:
        for path in ("/v1/models", "/kv_event_sources"):
            async with client.get(pod.url + path) as answer:
                assert answer.status == 502
                text = (await answer.json())["error"]
                assert text.startswith("the engine behind kvbus does not answer: http://127.0.0.1:1: ")
        assert pod.stats.requests == {"engine_down": 2}


async def test_the_front_refuses_a_websocket_with_a_message(pod: Pod, client: aiohttp.ClientSession) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await client.ws_connect(f"{pod.url}/v1/realtime")
    assert refused.value.status == 501
    answer = await pod.answer(b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 501 ")
    assert pod.stats.requests == {"upgrade": 2}
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"].startswith("kvbus forwards only HTTP")


async def test_the_front_forwards_refusals_of_the_engine(pod: Pod, client: aiohttp.ClientSession) -> None:
    """The front forwards the engine's refusals and errors unchanged, because the engine decides which clients may
    ask.
    """
    pod.api.answers = {
        "/kv_event_sources": lambda: web.Response(status=401, text="no", headers={"WWW-Authenticate": "Bearer"}),
        "/server_info": lambda: web.Response(status=404, text="none"),
    }
    for path, status, text in (("/kv_event_sources", 401, "no"), ("/server_info", 404, "none")):
        async with client.get(pod.url + path) as answer:
            assert (answer.status, await answer.text()) == (status, text)
    assert pod.stats.requests == {"passed": 2}


SPELLINGS = (
    "/kv_event_sources",
    "//kv_event_sources",
    "/kv_event_sources/",
    "/KV_Event_Sources",
    "/kv%5Fevent%5fsources",
    "/%6bv_event_sources?x=1",
    "/./kv_event_sources",
    "/v1/../kv_event_sources",
    "/api/kv_event_sources",
    "/api%2Fkv_event_sources",
    "/kv_event_sources;x=1",
    "/kv_event_sources/x/..",
    "/kv_event_sources%20",
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY", "PROPFIND")


@pytest.mark.parametrize("method", METHODS)
async def test_no_spelling_and_no_method_shows_the_engines_own_endpoints(pod: Pod, method: str) -> None:
    """The engine answers each spelling of the path under each method with its endpoints. The front gives them to no
    client.
    """
    shown = web.json_response([{"data_parallel_rank": 0, "endpoint": "tcp://*:60123", "topic": ""}]).text or ""
    pod.api.every = lambda: web.Response(text=shown, content_type="application/json")
    for path in SPELLINGS:
        more = "" if method in {"GET", "HEAD"} else "Content-Length: 1\r\n"
        ask = f"{method} {path} HTTP/1.1\r\nHost: e\r\nRange: bytes=0-200\r\nConnection: close\r\n{more}\r\n"
        answer = await pod.answer(ask.encode() + (b"x" if more else b""))
        status = answer.split()[1]
        assert b"60123" not in answer, path
        assert status == (b"405" if more else b"200"), (path, answer)
        if method == "GET":
            assert pod.bus.daemon.config.outputs[0].endpoint.encode() in answer, path


async def test_a_part_of_an_answer_shows_no_endpoint_of_the_engine(pod: Pod, client: aiohttp.ClientSession) -> None:
    pod.api.every = lambda: web.Response(status=206, text='[{"endpoint": "tcp://*:60123"')
    async with client.get(f"{pod.url}/kv_event_sources") as answer:
        assert answer.status == 503
        assert "60123" not in await answer.text()


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (b"{", "is not JSON"),
        (b"[" * 60_000, "is not JSON"),
        (b"3", "is not a list of publishers"),
        (b'[{"data_parallel_rank": 7}]', "rank 7, and kvbus has only these of its ranks: 0"),
        (b" " * (server.MAX_ANSWER + 1), "more than 4194304 bytes"),
    ],
)
async def test_the_front_answers_with_an_error_if_it_cannot_name_kvbus(
    pod: Pod, client: aiohttp.ClientSession, answer: bytes, wrong: str
) -> None:
    """The front answers with an error if it cannot name kvbus's endpoints in an engine's answer.

    If it forwarded the engine's own endpoints, routers would bypass kvbus.
    """
    pod.api.answers = {"/kv_event_sources": lambda: web.Response(body=answer)}
    async with client.get(f"{pod.url}/kv_event_sources") as got:
        assert got.status == 503
        assert wrong in (await got.json())["error"]
    assert pod.stats.requests == {"unanswered": 1}


@pytest.mark.parametrize(("method", "times"), [("GET", 2), ("PUT", 2), ("POST", 1), ("PATCH", 1)])
async def test_the_front_repeats_only_requests_that_http_allows_to_repeat(method: str, times: int) -> None:
    """An engine closes the kept connection after it has read the second request. The front repeats no POST."""
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                seen.append(await reader.readuntil(b"\r\n\r\n"))
                if len(seen) == 2:
                    break
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                await writer.drain()
        writer.close()

    engine = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = engine.sockets[0].getsockname()
    ask = f"{method} /v1/x HTTP/1.1\r\nHost: e\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    async with running_pod({"engine": f"http://{host}:{port}"}) as pod:
        first, second = await pod.answer(ask), await pod.answer(ask)
    engine.close()
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 200 " if times == 2 else b"HTTP/1.1 502 ")
    assert len(seen) == 1 + times


async def test_a_used_port_of_the_front_prevents_the_start(pod: Pod) -> None:
    with pytest.raises(BindError, match=f"front 127.0.0.1:{pod.port}"):
        async with running_pod({"listen": f"127.0.0.1:{pod.port}"}):
            pass


async def test_the_end_of_kvbus_ends_open_requests_of_the_front(client: aiohttp.ClientSession) -> None:
    async with running_pod() as pod:
        reader, writer = await pod.say(b"GET /think HTTP/1.1\r\nHost: e\r\n\r\n")
        await asyncio.wait_for(pod.api.asked.wait(), 60)
    assert await reader.read() == b""
    writer.close()
    await asyncio.wait_for(pod.api.gone.wait(), 60)
