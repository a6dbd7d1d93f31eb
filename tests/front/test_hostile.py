"""Tests for bad input from clients of the front: the front refuses and counts the input.

One request of a client never becomes two requests to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from kvbus.parts.front import server
from tests.doubles.bus import eventually
from tests.front.pod import Pod, running_pod

GOOD = b"GET /after HTTP/1.1\r\nHost: e\r\nConnection: close\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: e\r\n\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: e\r\n"


@pytest.mark.parametrize(
    "said",
    [
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n" + HIDDEN,
        POST + b"Content-Length: 0\r\nContent-Length: 34\r\n\r\n" + HIDDEN,
        POST + b"Content-Length: 0, 34\r\n\r\n" + HIDDEN,
        POST + b"Content-Length: +0\r\n\r\n" + HIDDEN,
        POST + b"Content-Length: -1\r\n\r\n" + HIDDEN,
        POST + b"Content-Length : 0\r\n\r\n" + HIDDEN,
        POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        POST + b"Transfer-Encoding: chunked\r\n\r\n1;a=\nb\r\nz\r\n0\r\n\r\n" + HIDDEN,
        POST + b"Transfer-Encoding: chunked\r\n\r\n0x1\r\nz\r\n0\r\n\r\n" + HIDDEN,
        POST + b"X: a\n\nGET /hidden HTTP/1.1\r\nHost: e\r\n\r\n",
        POST + b" folded: x\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
        POST + b"X: a\rb\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
        POST + b"X: a\0b\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
        b"POST /x HTTP/1.1\r\nHost: e\r\nHost: f\r\nContent-Length: 0\r\n\r\n" + HIDDEN,
        b"GET /a b HTTP/1.1\r\nHost: e\r\n\r\n" + HIDDEN,
        b"GET http://other/hidden HTTP/1.1\r\nHost: e\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: e\r\n\r\n",
        b"FETCH /hidden HTTP/1.1\r\nHost: e\r\n\r\n",
        b"GET /hidden HTTP/9.1\r\nHost: e\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 what TLS says first",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: e\r\n\r\n",
        POST + b"X: " + b"x" * 20_000 + b"\r\n\r\n",
        POST + b"".join(b"X-%d: 1\r\n" % at for at in range(200)) + b"\r\n",
        POST + b"Connection: close\r\nExpect: something-else\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_the_front_refuses_and_counts_invalid_requests(
    pod: Pod, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await pod.answer(said)
    status = int(answer.split(b" ", 2)[1])
    assert status in {400, 417, 501}
    assert answer.partition(b"\r\n\r\n")[2].strip()
    assert not [path for _, path, _, _ in pod.api.seen if "hidden" in path]
    assert pod.stats.requests["bad_request"] == 1
    assert not [record for record in caplog.records if record.exc_info]
    assert (await pod.answer(GOOD)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("rest", [b"", b"zz\r\n" + HIDDEN])
async def test_an_incomplete_request_body_is_an_error_of_the_client(
    rest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the rest of a request's body is missing or invalid, the front reports an error of the client, not of the
    engine.
    """
    monkeypatch.setattr(server, "IDLE", 0.5)
    async with running_pod() as pod:
        pod.api.take.set()
        begin = POST.replace(b"/x", b"/upload") + b"Transfer-Encoding: chunked\r\n\r\n3\r\none\r\n"
        reader, writer = await pod.say(begin)
        await eventually(lambda: pod.api.taken == 3, "the engine has the first part")
        writer.write(rest)
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 400 ")
        writer.close()
        assert pod.stats.requests == {"bad_request": 1}
        assert pod.api.seen == []


async def test_the_front_answers_pipelined_requests_in_order(pod: Pod) -> None:
    first = POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\none\r\n0\r\n\r\n"
    answer = await pod.answer(first + POST + b"Content-Length: 3\r\n\r\ntwo" + GOOD)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert [(path, body) for _, path, _, body in pod.api.seen] == [("/x", b"one"), ("/x", b"two"), ("/after", b"")]


@pytest.mark.parametrize("said", [b"/\xff\xfe HTTP/1.1\r\nHost: e\r\n", b"/ HTTP/1.1\r\nHost: e\r\nX: \xff\xe9\r\n"])
async def test_the_front_forwards_or_refuses_bytes_that_are_not_text(pod: Pod, said: bytes) -> None:
    answer = await pod.answer(b"GET " + said + b"Connection: close\r\n\r\n")
    assert answer.split(b" ", 2)[1] in {b"200", b"400"}
    assert (await pod.answer(GOOD)).startswith(b"HTTP/1.1 200 ")


async def test_the_front_closes_connections_with_an_incomplete_request_head(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE", 0.2)
    async with running_pod() as hasty:
        for said in (b"", b"GET / HT", POST + b"Content-Length: 5\r\n\r\nab"):
            reader, writer = await hasty.say(said)
            if said.endswith(b"ab"):  # the request's head is complete: the engine waits for the body, as without kvbus
                await eventually(lambda: hasty.stats.http_connections == 1, "open")
            else:
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
        assert hasty.stats.http_closed == {"slow": 2}


async def test_the_front_closes_idle_connections_at_max_connections() -> None:
    """At the limit the front closes idle connections, but not those that wait for an answer."""
    async with running_pod({"max_connections": 3}) as pod:
        think = b"GET /think HTTP/1.1\r\nHost: e\r\n\r\n"
        waiting = [await pod.say(think) for _ in range(2)]
        await asyncio.wait_for(pod.api.asked.wait(), 60)
        idle, writer = await pod.say(b"")
        await eventually(lambda: pod.stats.http_connections == 3, "three")
        assert (await pod.answer(GOOD)).startswith(b"HTTP/1.1 200 ")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(idle.read(), 60) == b""
        waiting.append(await pod.say(think))
        await eventually(lambda: pod.stats.http_connections == 3, "three that wait")
        assert pod.stats.http_closed == {"too_many": 1}
        assert not any(reader.at_eof() for reader, _ in waiting)
        for _, each in [*waiting, (idle, writer)]:
            each.close()


async def test_a_bug_in_the_front_is_logged_and_answered_with_500(
    pod: Pod, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "PATHS", None)
    with caplog.at_level(logging.ERROR):
        assert (await pod.answer(GOOD)).startswith(b"HTTP/1.1 500 ")
    assert "AttributeError" in caplog.text
