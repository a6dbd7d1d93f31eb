"""The HTTP server by its own: what uvicorn leaves open is closed, and what clients do on a connection has an answer."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import shutil
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from email.utils import parsedate_to_datetime

import pytest

from kvbus.common.errors import BindError
from kvbus.core.stats import ProcessStats
from kvbus.transport.http.messages import Request, Response, Stream
from kvbus.transport.http.server import MAX_AHEAD, MAX_HEAD, REQUEST_LINE, HttpServer
from tests.transport.loops import both_loops, eventually


class Server:
    """A server whose handler answers by the path, and what came to it."""

    def __init__(self) -> None:
        self.stats = ProcessStats()
        self.server = HttpServer(self.answer, self.stats, timeout=30)
        self.address = ("", 0)
        self.asked: list[str] = []
        self.ended: list[str] = []
        self.go_on = asyncio.Event()

    async def answer(self, request: Request) -> Response:
        self.asked.append(request.path)
        try:
            return await self._answer(request)
        finally:
            self.ended.append(request.path)

    async def _answer(self, request: Request) -> Response:
        if request.path == "/wait":
            await self.go_on.wait()
        if request.path == "/fail":
            raise RuntimeError("on purpose")
        if request.path == "/body":
            body, more = b"", True
            while more:
                part, more = await request.part()
                body += part
            return Response(f"{len(body)} {sum(body)}".encode(), "text/plain")
        if request.path == "/parts":
            return Response(_parts(), "text/plain", headers={"content-length": "6"})
        if request.path == "/stream":
            stream = Stream(request, "text/plain")
            await stream.begin()
            await stream.write(b"begun")
            await self.go_on.wait()
            await stream.end()
            return stream
        return Response(json.dumps([request.method, request.path, dict(request.query), request.headers]).encode())

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.address)

    async def say(self, text: bytes) -> bytes:
        """All that comes for a text, until the server closes the connection."""
        reader, writer = await self.connect()
        writer.write(text)
        try:
            return await asyncio.wait_for(reader.read(), 30)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def _parts() -> AsyncIterator[bytes]:
    for part in (b"ab", b"", b"cdef"):
        yield part


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    served = Server()
    served.address = await served.server.start("127.0.0.1", 0)
    try:
        yield served
    finally:
        await served.server.close()
    await eventually(lambda: not served.stats.http_connections, "all connections gone")


def request_of(path: str, *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: x", *headers, "", ""]).encode()


LAST = "Connection: close"


@both_loops
async def test_requests_behind_each_other_are_answered_in_their_order():
    """The second one while the first one waits; a client of HTTP/1.0 is answered once."""
    async with serving() as served:
        asking = asyncio.create_task(
            served.say(request_of("/wait") + request_of("/b?c=1&c=2&d") + request_of("/e", LAST))
        )
        await eventually(lambda: served.asked, "the first one")
        await served.say(request_of("/other", LAST))
        assert served.asked == ["/wait", "/other"]
        served.go_on.set()
        answers = (await asking).split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert [json.loads(each.partition(b"\r\n\r\n")[2])[:2] for each in answers] == [
            ["GET", path] for path in ("/wait", "/b", "/e")
        ]
        assert json.loads(answers[1].partition(b"\r\n\r\n")[2])[2] == {"c": "1", "d": ""}
        assert (await served.say(b"GET /old HTTP/1.0\r\n\r\n")).count(b"HTTP/1.1 200") == 1


def head_of(where: str, length: int) -> bytes:
    """A request that is so long before its body."""
    rest = length - REQUEST_LINE - len("/HostxConnectionclose") - 2 * len(": \r\n")
    field = {"target": 0, "field": len(": \r\nX"), "fields": 0}[where]
    if where == "target":
        return request_of("/" + "x" * rest, LAST)
    if where == "fields":
        return request_of("/", *["X1: abcdef"] * (rest // 12), LAST)
    return request_of("/", f"X: {'x' * (rest - field)}", LAST)


@pytest.mark.parametrize("part", [7, 1000, 10**6])
@pytest.mark.parametrize("where", ["target", "field", "fields"])
@both_loops
async def test_a_head_has_a_limit_in_however_many_parts_it_comes(where, part):
    async with serving() as served:
        for length, status in ((MAX_HEAD, 200), (MAX_HEAD + 12, 431)):
            text = head_of(where, length)
            reader, writer = await served.connect()
            for begin in range(0, len(text), part):
                if not writer.is_closing():  # as a refusal ends it
                    writer.write(text[begin : begin + part])
                await asyncio.sleep(0)
            try:
                line = await asyncio.wait_for(reader.readline(), 30)
            except ConnectionResetError:  # it was closed while there was more to come
                line = b"HTTP/1.1 431 "
            writer.close()
            assert int(line.split()[1]) == status
        assert len(served.asked) == 1


async def refused_for_its_length(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, more: bytes) -> None:
    """Say more and more until the server says that it is too much, or has closed."""
    with contextlib.suppress(ConnectionError):
        for _ in range(1000):
            if not reader.at_eof() and not writer.is_closing():
                writer.write(more)
                await asyncio.sleep(0)
        assert (await asyncio.wait_for(reader.readline(), 30)).startswith(b"HTTP/1.1 431 ")
    writer.close()


@pytest.mark.parametrize("said", [b"GET /", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\nX"])
@both_loops
async def test_a_head_without_end_is_refused_as_soon_as_it_is_too_long(said):
    async with serving() as served:
        reader, writer = await served.connect()
        writer.write(said)
        more = b"X: y\r\n" * 200 if said.endswith(b"\n") else b"x" * 1200
        await refused_for_its_length(reader, writer, more)
        assert not served.asked


@both_loops
async def test_fields_behind_a_body_have_the_limit_of_a_head():
    chunked = request_of("/body", "Transfer-Encoding: chunked", LAST, method="POST") + b"3\r\nabc\r\n"
    async with serving() as served:
        assert (await served.say(chunked + b"0\r\nX: y\r\n\r\n")).endswith(b"\r\n\r\n3 294")
        for more in (b"X: y\r\n" * 200, b"x" * 1200):
            reader, writer = await served.connect()
            writer.write(chunked + b"0\r\n")
            await refused_for_its_length(reader, writer, more)
        await eventually(lambda: served.ended == ["/body"] * 3, "the end of those")


@both_loops
async def test_a_client_may_ask_so_many_times_ahead_and_no_more():
    async with serving() as served:
        asked = [request_of(f"/{n}") for n in range(MAX_AHEAD - 1)]
        assert (await served.say(b"".join([*asked, request_of("/", LAST)]))).count(b"HTTP/1.1 200 OK\r\n") == MAX_AHEAD
        served.asked.clear()
        with contextlib.suppress(ConnectionError):
            assert await served.say(request_of("/") * 10_000) == b""
        assert len(served.asked) <= 1


@both_loops
async def test_what_is_none_is_said_to_be_none_and_never_within_an_answer():
    async with serving() as served:
        said = await served.say(b"nonsense\r\n\r\n")
        head, _, body = said.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert f"content-length: {len(body)}".encode() in head
        assert json.loads(body) == {"error": "this is no HTTP request"}
        said = await served.say(request_of("/body", "Transfer-Encoding: chunked", method="POST") + b"zz\r\n")
        assert said.startswith(b"HTTP/1.1 400 ")
        reader, writer = await served.connect()
        writer.write(request_of("/stream"))
        assert (await asyncio.wait_for(reader.readuntil(b"begun"), 30)).startswith(b"HTTP/1.1 200")
        writer.write(b"nonsense\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"400" not in await asyncio.wait_for(reader.read(), 30)
        await eventually(lambda: "/stream" in served.ended, "its end")
        writer.close()
        reader, writer = await served.connect()
        writer.write(request_of("/wait") + request_of("/next") + b"nonsense\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        await served.say(request_of("/then", LAST))
        assert "/next" not in served.asked


@both_loops
async def test_an_answer_ends_with_its_client(caplog):
    async with serving() as served:
        for path in ("/wait", "/stream", "/body"):
            reader, writer = await served.connect()
            writer.write(request_of(path, f"Content-Length: {10 * (path == '/body')}", method="POST"))
            await eventually(lambda path=path: path in served.asked, "the request")
            if path == "/stream":
                await asyncio.wait_for(reader.readuntil(b"begun"), 30)
            writer.transport.abort()
            await eventually(lambda path=path: path in served.ended, "its end")
        await eventually(lambda: not served.stats.http_connections, "all gone")
        assert not caplog.records


@both_loops
async def test_an_error_of_ours_is_logged_and_the_next_request_answered(caplog):
    async with serving() as served:
        with caplog.at_level(logging.ERROR):
            said = await served.say(request_of("/fail") + request_of("/then", LAST))
        assert said.startswith(b"HTTP/1.1 500 ")
        assert "RuntimeError: on purpose" in caplog.text
        assert [record.getMessage() for record in caplog.records] == ["GET /fail failed"]
        assert (await served.say(request_of("/then", LAST))).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("asked", ["h2c", "websocket"])
@both_loops
async def test_whoever_asks_for_another_protocol_gets_this_one(asked):
    async with serving() as served:
        said = await served.say(request_of("/up", "Connection: Upgrade", f"Upgrade: {asked}"))
        assert said.startswith(b"HTTP/1.1 200")
        assert b"connection: close\r\n" in said


@both_loops
async def test_bodies_of_any_length_and_manner():
    """Longer than what is read ahead, in chunks, and by a client that asks first whether it may."""
    async with serving() as served:
        body = bytes(range(256)) * 2000
        expected = f"{len(body)} {sum(body)}".encode()
        whole = request_of("/body", f"Content-Length: {len(body)}", method="POST") + body
        chunks = [b"%x\r\n%s\r\n" % (len(each), each) for each in (body[:1], body[1:70_000], body[70_000:])]
        chunked = (
            request_of("/body", "Transfer-Encoding: chunked", LAST, method="POST") + b"".join(chunks) + b"0\r\n\r\n"
        )
        assert (await served.say(whole + chunked)).count(expected) == 2
        reader, writer = await served.connect()
        writer.write(request_of("/body", "Content-Length: 3", "Expect: 100-continue", LAST, method="POST"))
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert (await asyncio.wait_for(reader.read(), 30)).endswith(b"\r\n\r\n3 294")
        writer.close()


@both_loops
async def test_two_lengths_of_a_body_are_no_request():
    """Or whoever stands between would see other requests than we do."""
    async with serving() as served:
        for fields in (
            ("Content-Length: 5", "Content-Length: 6"),
            ("Content-Length: 5", "Transfer-Encoding: chunked"),
            ("Transfer-Encoding: chunked, identity",),
            ("Content-Length: +5",),
            ("Content-Length : 5",),
            ("X: a\rb",),
            ("X: a\x00b",),
        ):
            assert (await served.say(request_of("/", *fields) + b"hello")).startswith(b"HTTP/1.1 400 "), fields
        assert not served.asked


@both_loops
async def test_a_head_alone_has_the_fields_of_the_answer():
    async with serving() as served:
        for path, length in (("/parts", 6), ("/x", 2)):
            head, _, body = (await served.say(request_of(path, LAST, method="HEAD"))).partition(b"\r\n\r\n")
            assert not body
            fields = dict(line.split(": ") for line in head.decode().split("\r\n")[1:])
            assert int(fields["content-length"]) >= length
            assert parsedate_to_datetime(fields["date"])
        assert (await served.say(request_of("/parts", LAST))).endswith(b"\r\n\r\nabcdef")


@both_loops
async def test_what_is_being_answered_may_end_when_the_server_does():
    served = Server()
    served.address = await served.server.start("127.0.0.1", 0)
    with pytest.raises(BindError):
        await HttpServer(served.answer, served.stats, timeout=1).start(*served.address)
    asking = [asyncio.create_task(served.say(request_of(path))) for path in ("/wait", "/stream")]
    idle = asyncio.create_task(served.say(request_of("/idle")))
    await eventually(lambda: len(served.asked) == 3, "all requests")
    closing = asyncio.create_task(served.server.close())
    assert (await idle).startswith(b"HTTP/1.1 200")
    served.go_on.set()
    assert [(await each)[:12] for each in asking] == [b"HTTP/1.1 200"] * 2
    await closing
    served = Server()
    served.address = await served.server.start("127.0.0.1", 0)
    never = asyncio.create_task(served.say(request_of("/wait")))
    await eventually(lambda: served.asked, "the request")
    await served.server.close()
    with contextlib.suppress(ConnectionError):
        assert await never == b""
    assert served.ended == ["/wait"]


@both_loops
async def test_clients_of_others_take_it_for_a_server():
    """The standard library's, one connection for all; and curl, which asks for HTTP/2 and waits for leave to go on."""
    async with serving() as served:

        def ask() -> list[bytes]:
            connection = http.client.HTTPConnection(*served.address, timeout=30)
            said = []
            for n in range(100):
                connection.request("POST", "/body", b"x" * n * 3000)
                said.append(connection.getresponse().read())
            connection.close()
            return said

        assert await asyncio.to_thread(ask) == [f"{3000 * n} {3000 * n * ord('x')}".encode() for n in range(100)]

        curl = shutil.which("curl")
        if curl is None:
            pytest.skip("curl is not installed")
        url = f"http://{served.address[0]}:{served.address[1]}"
        options = ["--silent", "--show-error", "--fail", "--max-time", "30"]
        for more, expected in (
            (["--http2", f"{url}/a", f"{url}/b"], '["GET", "/a", {}'),
            (["--data-binary", "@-", "--header", "Expect: 100-continue", f"{url}/body"], "2000000 "),
            (["--data-binary", "@-", "--header", "Transfer-Encoding: chunked", f"{url}/body"], "2000000 "),
            (["--head", f"{url}/parts"], "HTTP/1.1 200 OK"),
            (["--http1.0", f"{url}/stream"], "begun"),
        ):
            served.go_on.set()
            program = await asyncio.create_subprocess_exec(curl, *options, *more, stdin=PIPE, stdout=PIPE, stderr=PIPE)
            said, wrong = await program.communicate(b"x" * 2_000_000)
            assert (program.returncode, wrong.decode()) == (0, "")
            assert said.decode().startswith(expected)
