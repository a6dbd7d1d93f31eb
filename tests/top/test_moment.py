"""A bus is read over its HTTP port; whatever else answers there is called that."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import pytest
from aiohttp import web as server

from kvbus.top import moment as module
from kvbus.top.moment import NoAnswerError, base_url, moment, read
from tests.admin.test_http import relayed, web_and_engine
from tests.doubles.payloads import payload as batch
from tests.doubles.payloads import store
from tests.ports import free_port
from tests.top.moments import router


async def test_a_running_bus_is_read_whole():
    async with web_and_engine() as (client, engine), aiohttp.ClientSession() as session:
        first = await read(session, client.base)
        engine.publish(batch(store([1, 2])))
        engine.publish(b"no batch")
        await relayed(client, 2)
        seen = await read(session, client.base)
        assert [(s["name"], s["state"], s["blocks"]) for s in seen.sources] == [("engine", "live", {"GPU": 2})]
        (output,) = seen.outputs
        assert output.batches > first.outputs[0].batches
        assert seen.reasons["rejected: batch_shape (engine)"] == 1
        assert (seen.started, seen.version) == (first.started, first.version)
        assert seen.memory > 1e6
        assert -1 <= seen.age < 3600
        assert seen.at >= first.at


def test_routers_that_have_left_are_left_out():
    there, left = router("10.0.0.1:4711"), router("10.0.0.2:4711", left="left")
    seen = moment([], [there, left], 'kvbus_build_info{version="1"} 1.0\n', 1.0, 50.0)
    assert seen.routers == [there]
    assert (seen.outputs, seen.started, seen.age) == ([], 50.0, 0.0)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:9477", "http://127.0.0.1:9477"),
        ("http://bus:9477/", "http://bus:9477"),
        ("https://bus/kvbus", "https://bus/kvbus"),
    ],
)
def test_addresses(address, url):
    assert base_url(address) == url


@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1:5557", "http://"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        base_url(address)


@contextlib.asynccontextmanager
async def answering(text: str, *, status: int = 200, after: float = 0.0):
    async def handler(_request: server.Request) -> server.Response:
        await asyncio.sleep(after)
        return server.Response(text=text, status=status)

    app = server.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = server.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await server.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def trouble(url: str) -> str:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(NoAnswerError) as error:
            await read(session, url)
    return str(error.value)


async def test_whatever_else_is_there_has_a_name(monkeypatch: pytest.MonkeyPatch):
    assert "Connection refused" in await trouble(f"http://127.0.0.1:{free_port()}")
    async with answering("<html>") as url:
        assert "does not answer as kvbus does" in await trouble(url)
    async with answering("[]") as url:
        assert "does not answer as kvbus does" in await trouble(url)
    async with answering("[]", status=404) as url:
        assert "404" in await trouble(url)
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    async with answering("[" + " " * 200 + "]") as url:
        assert "more than 100 bytes" in await trouble(url)
    monkeypatch.setattr(module, "TIMEOUT_S", 0.05)
    async with answering("[]", after=2.0) as url:
        assert "does not answer within" in await trouble(url)
