"""Tests for the files of the status page and for the overview that the page shows.

They test the page's restrictions, and the configuration and access rights in the overview.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvbus.config import load
from kvbus.http.answers import FILES, about
from tests.http.test_access import asking
from tests.http.test_http import web


@pytest.mark.parametrize("path", FILES)
async def test_each_file_of_the_status_page_loads_nothing_external(path: str) -> None:
    async with web() as client, client.get(path) as answer:
        text = await answer.text()
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith(FILES[path][1])
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; ")
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        addresses = set(re.findall(r"https?://[^\s\"'`)]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}  # an XML namespace, which browsers do not load


async def test_the_status_page_has_no_inline_script_or_style() -> None:
    async with web() as client:
        page = await client.text("/")
        assert page.startswith("<!doctype html>")
        assert re.findall(r"<script[^>]*>", page) == ['<script src="/page.js" defer>']
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", page)
        script = await client.text("/page.js")
        # The page inserts the texts of peers as text, never as HTML.
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script)
        for path in ("/sources", "/routers", "/events", "/overview", "/blocks", "/metrics", "/livez", "/readyz"):
            assert f'href="{path}"' in page


async def test_the_overview_tells_a_client_why_it_may_not_read_content() -> None:
    async with asking() as here:
        own = json.loads((await here.get("/overview")).body)
        foreign = json.loads((await here.get("/overview", "evil.example")).body)
        assert own["content"] is None
        assert foreign["content"] == (await here.get("/blocks", "evil.example")).error
        # The overview says what the client may not read, which does not count as a refused request.
        assert sum((await here.refused()).values()) == 1
        assert own["now"] >= own["started"] > 0
        assert (await here.get("/", "evil.example")).status == 200


def test_the_overview_shows_the_configuration_without_secret_keys(tmp_path: Path) -> None:
    keys = tmp_path / "kvbus.key_secret"
    keys.write_text(secret := "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs")
    output = {"endpoint": "tcp://*:5657", "curve_secret_key_file": str(keys), "curve_client_keys": str(tmp_path)}
    config = load(None, env={}, overrides={"sources": [{"endpoint": "tcp://127.0.0.1:5557"}], "outputs": [output]})
    shown = about(config)
    assert shown["version"]
    assert shown["config"]["outputs"][0]["curve_secret_key_file"] == str(keys)
    assert shown["config"]["outputs"][0]["profile"] == "vllm"
    assert secret not in json.dumps(shown)
