"""Tests that commands which read a kvbus over HTTP report an error if another server answers."""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp
import pytest
from aiohttp import web as server

from kvbus.tools import asking as module
from kvbus.tools.asking import NoAnswerError, asking, base_url, get
from tests.ports import free_port


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:9477", "http://127.0.0.1:9477"),
        ("http://bus:9477/", "http://bus:9477"),
        ("[::1]:9477", "http://[::1]:9477"),
        ("https://bus/kvbus", "https://bus/kvbus"),
    ],
)
def test_addresses(address, url):
    assert base_url(address) == url


@pytest.mark.parametrize(
    "address", ["", "tcp://127.0.0.1:5557", "http://", "http://:9477", "bus:80000", "bus:0", "bus:x", "[::1"]
)
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


async def trouble(url: str, seconds: float = 10.0) -> tuple[str, bool]:
    with pytest.raises(NoAnswerError) as error:
        async with asking(url, seconds), aiohttp.ClientSession() as session:
            json.loads((await get(session, f"{url}/sources"))[0])
    return str(error.value), error.value.listens


async def test_whatever_else_is_there_has_a_name(monkeypatch: pytest.MonkeyPatch):
    url = f"http://127.0.0.1:{free_port()}"
    assert await trouble(url) == (f"no bus answers at {url} (connection refused)", False)
    async with answering("<html>") as url:
        text, listens = await trouble(url)
        assert text.startswith(f"the server at {url} is not a kvbus (")
        assert listens
    async with answering("[]", status=404) as url:
        assert await trouble(url) == (f"the server at {url} is not a kvbus (GET /sources: 404)", True)
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    async with answering("[" + " " * 200 + "]") as url:
        assert "more than 100 bytes" in (await trouble(url))[0]
    async with answering("[]", after=2.0) as url:
        assert await trouble(url, 0.05) == (f"{url} does not answer within 0.05 s", True)
