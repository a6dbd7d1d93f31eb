"""Tests for the answers of kvbus's HTTP server.

Between the parts of a long answer, the event loop does other work, and refused requests are counted.
"""

from __future__ import annotations

import asyncio
import threading

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from aiohttp.web import Application

from kvbus.core.stats import HttpRefusal, ProcessStats
from kvbus.http import answers
from kvbus.telemetry.metrics import Exposition
from tests.http.test_http import web


def names(text):
    """Return the metric name of each line of `/metrics`. Metrics of the process are left out, because they change."""
    return [line.partition(" ")[0] for line in text.splitlines() if not line.startswith("process_")]


@pytest.mark.parametrize("path", ["/metrics", "/sources"])
async def test_a_long_answer_is_complete_for_each_size_of_part(monkeypatch, path):
    async with web() as client:
        whole = await client.text(path)
    for size in (2**20, 100):
        monkeypatch.setattr(answers, "PART", size)
        async with web() as client:
            async with client.get(path) as answer:
                text = await answer.text()
                assert int(answer.headers["Content-Length"]) == len(text.encode())
            assert path != "/metrics" or names(text) == names(whole)
            assert path != "/sources" or [each["name"] for each in await client.json(path)] == ["engine"]
            assert await client.status(path, "HEAD") == (200, "")


async def test_the_event_loop_does_other_work_after_each_slice_of_an_answer():
    done: list[object] = []

    def work():
        for number in range(3):
            done.append(number)
            asyncio.get_running_loop().call_soon(done.append, "other work")
            yield
        return "result"

    assert await answers.in_slices(work()) == "result"
    assert done == [0, "other work", 1, "other work", 2, "other work"]


@pytest.mark.parametrize("body", [b"", b"abc", b"abcd", b"abcdefghijklm"])
async def test_a_long_body_is_sent_completely_and_in_order(monkeypatch, body):
    monkeypatch.setattr(answers, "PART", 4)

    async def answer(request):
        return await answers.send(request, body, "text/plain")

    app = Application()
    app.router.add_get("/", answer)
    async with TestServer(app) as server, ClientSession() as client, client.get(server.make_url("/")) as got:
        assert await got.read() == body
        assert got.headers["Content-Length"] == str(len(body))


def test_a_refusal_is_counted_and_has_its_reason_in_the_body():
    process = ProcessStats()
    answer = answers.refused(process, 503, HttpRefusal.BUSY, "try again")
    assert (answer.status, answer.body) == (503, b'{"error":"try again"}')
    assert process.http_refused == {HttpRefusal.BUSY: 1}
    assert answers.as_json([1, "é"]).body == '[1,"é"]'.encode()


async def test_metrics_are_written_in_a_thread(monkeypatch):
    threads = []
    real = Exposition.render

    def render(self, readings):
        threads.append(threading.get_ident())
        return real(self, readings)

    monkeypatch.setattr(Exposition, "render", render)
    async with web() as client:
        metrics = await client.metrics()
        assert metrics["process_open_fds",] > 3
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
