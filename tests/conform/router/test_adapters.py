"""Tests for the adapters by which the conformance kit asks a router for its blocks.

They run a program, run a command, or request a URL.
"""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from kvbus.tools.conform.router import adapters
from kvbus.tools.conform.router.adapters import AdapterError, Driver, Stream, ViewUrl
from kvbus.tools.conform.router.views import HeldBlock, Source

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KNOWN = {1: Source(None, [1, 2]), 2: Source(1, [3, 4]), 3: Source(1, [5, 6]), 9: Source(8, [7, 7])}
STREAMS = [Stream("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "kv")]

ECHO = """
import json, sys
first = json.loads(input())
assert first == {"streams": [{"name": "w0", "live": "tcp://127.0.0.1:1", "replay": "tcp://127.0.0.1:2", "topic": "kv"}],
                 "block_size": 2}, first
for line in sys.stdin:
    known = json.loads(line)["known"]
    if not known:
        sys.exit(3)
    print(json.dumps({"held": [block for block, parent, tokens in known if parent is None], "by_prefix": True}), flush=True)
"""


async def test_the_kit_gives_streams_to_a_driver_and_asks_it_for_views():
    driver = Driver([sys.executable, "-c", ECHO])
    for _ in range(2):  # one run for each case
        await driver.start(STREAMS)
        view = await driver.view(KNOWN)
        assert (view.held, view.by_prefix) == ({HeldBlock(1)}, True)
        await driver.stop()


async def test_a_driver_that_ends_after_an_answer_counts_as_a_crashed_router():
    driver = Driver([sys.executable, "-c", ECHO])
    for crashed in (True, False):
        await driver.start(STREAMS)
        if crashed:
            await driver.view(KNOWN)
        with pytest.raises(AdapterError, match=r"exit code 3") as caught:
            await driver.view({})
        assert caught.value.crashed is crashed
        await driver.stop()


@pytest.mark.parametrize(("program", "said"), [("print('no')", "answer"), ("print('[]')", "answer")])
async def test_the_kit_refuses_an_answer_of_a_driver_that_is_not_a_view(program, said):
    driver = Driver([sys.executable, "-c", f"import sys\n{program}\nsys.stdin.read()"])
    await driver.start(STREAMS)
    with pytest.raises(AdapterError, match=said):
        await driver.view(KNOWN)
    await driver.stop()


async def test_the_kit_kills_a_driver_that_ignores_sigterm(monkeypatch):
    monkeypatch.setattr(adapters, "END_S", 0.1)
    ignores = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('{\"held\": []}', flush=True)\n"
    )
    driver = Driver([sys.executable, "-c", f"{ignores}time.sleep(900)"])
    await driver.start(STREAMS)
    await driver.view(KNOWN)
    await driver.stop()
    with pytest.raises(AdapterError, match="does not run"):
        await driver.view(KNOWN)


async def test_the_kit_reports_a_driver_program_that_does_not_exist():
    with pytest.raises(AdapterError, match="No such file"):
        await Driver(["/nowhere/router"]).start(STREAMS)


@asynccontextmanager
async def served(answer: Any) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield site.name
    finally:
        await runner.cleanup()


async def test_the_kit_reads_a_view_from_a_url():
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response([{"hash": 1, "rank": 2}])

    async with served(answer) as url:
        assert (await ViewUrl(url).view(KNOWN)).held == {HeldBlock(1, rank=2)}
    with pytest.raises(AdapterError):
        await ViewUrl(url).view(KNOWN)


async def test_the_kit_reports_the_error_answer_of_a_view_url():
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=500, text="broken")

    async with served(answer) as url:
        with pytest.raises(AdapterError, match="500 broken"):
            await ViewUrl(url).view(KNOWN)
