"""Answers: long ones handed over in parts, a turn of the loop each, and whole; refusals counted."""

from __future__ import annotations

import threading

import pytest

from kvbus.admin import http, responses
from kvbus.admin.pace import Pace
from kvbus.core.stats import HttpRefusal, ProcessStats
from kvbus.telemetry.metrics import Exposition
from tests.admin.test_http import web


def names(text):
    """Of an exposition, what each line is about; what a process has changes."""
    return [line.partition(" ")[0] for line in text.splitlines() if not line.startswith("process_")]


@pytest.mark.parametrize("path", ["/metrics", "/sources"])
async def test_a_long_answer_comes_in_parts_each_in_its_turn_and_is_whole(monkeypatch, path):
    async with web() as client:
        whole = await client.text(path)
    pieces = 0

    class Watched(Pace):
        async def _turn(self, asking):
            nonlocal pieces
            await super()._turn(asking)
            pieces += 1

    monkeypatch.setattr(http, "Pace", Watched)
    counted = []
    for size in (2**20, 100):
        monkeypatch.setattr(responses, "PART", size)
        async with web() as client:
            await client.text("/livez")  # what a first connection counts
            pieces = 0
            async with client.get(path) as answer:
                text = await answer.text()
                assert int(answer.headers["Content-Length"]) == len(text.encode())
            counted.append(pieces)
            assert path != "/metrics" or names(text) == names(whole)
            assert path != "/sources" or [each["name"] for each in await client.json(path)] == ["engine"]
            assert await client.status(path, "HEAD") == (200, "")
    assert counted[1] > counted[0] + len(whole) // 1000


async def test_parts_of_texts_are_all_of_them_in_order(monkeypatch):
    monkeypatch.setattr(responses, "PART", 4)
    for texts in ([], [b""], [b"abcdefg"], [b"ab", b"c", b"de", b"f", b"ghijkl", b"m"], [b"abcd"], [b"abcd", b"e"]):
        answer = responses.in_parts(texts, "text/plain", Pace())
        assert answer.headers["content-length"] == str(len(b"".join(texts)))
        assert not isinstance(answer.body, bytes)
        assert b"".join([part async for part in answer.body]) == b"".join(texts)


def test_a_refusal_is_counted_and_says_why():
    process = ProcessStats()
    answer = responses.refused(process, 503, HttpRefusal.BUSY, "try again")
    assert (answer.status, answer.body) == (503, b'{"error":"try again"}')
    assert process.http_refused == {HttpRefusal.BUSY: 1}
    assert responses.as_json([1, "é"]).body == '[1,"é"]'.encode()


async def test_descriptors_are_counted_in_a_thread(monkeypatch):
    threads = []
    real = Exposition.process

    def process(self):
        threads.append(threading.get_ident())
        return real(self)

    monkeypatch.setattr(Exposition, "process", process)
    async with web() as client:
        metrics = await client.metrics()
        assert metrics["process_open_fds",] > 3
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
