"""Tests for the page on which a user queries `kvbus index`, in a real browser: a query, its answer, and signing in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.browser.chromium import PROGRAM, Browser, chromium
from tests.browser.test_page import CHECKS, HOSTILE, focus_order, text_of
from tests.doubles.bus import wait_for
from tests.index.programs import Engine, Index, running, tokens_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium (.ci/run installs it)"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


async def asked(browser: Browser, kind: str, values: str) -> str:
    """Fill in and send the form of the page, and return the sentence that the page shows as the answer."""
    await browser.run(
        f"""document.querySelector('#ask-said').textContent = '';
        document.querySelector('#ask-kind').value = '{kind}';
        document.querySelector('#ask-values').value = '{values}';
        document.querySelector('#ask').requestSubmit()"""
    )
    said: str = await browser.until(text_of("#ask-said"), "an answer")
    return said


async def answered_by(browser: Browser, response: str) -> None:
    """Let the page receive this response instead of the index's answer, and record the headers of the page's
    request.
    """
    await browser.run(
        f"window.fetch = async (path, options) => {{ window.sent = options.headers; return {response}; }}"
    )


async def test_the_page_sends_a_query_and_shows_the_answer(tmp_path: Path) -> None:
    engine = Engine(tmp_path, "engine")
    index = Index(tmp_path, f"pod-a={engine.endpoint},{engine.replay}", "--copies")
    chain = max(engine.truth().chains(), key=len)
    tokens = " ".join(map(str, tokens_of(chain)))
    with running(engine, index):
        wait_for(index.ready, "the index is ready")
        wait_for(lambda: index.matches(tokens=tokens_of(chain)), "the prompt is known")
        async with chromium() as browser:
            await browser.call("Page.navigate", url=index.http)
            await browser.until("!!document.querySelector('#ask button')", "the page")
            assert [each for each in await focus_order(browser) if each.startswith("ask") or each == "Look up"] == [
                "ask-kind",
                "ask-values",
                "Look up",
            ]
            assert (await asked(browser, "tokens", tokens)).startswith("1 source holds the prefix, at least in part.")
            assert (await browser.run(text_of("#ask-found"))).startswith(f"pod-apod-a0{len(chain)}")
            assert "No source" in await asked(browser, "tokens", "1 2 3")
            assert "integers" in await asked(browser, "tokens", "x")
            assert "hashes[0] is neither" in await asked(browser, "hashes", "xyz")
            for scheme in ("light", "dark"):
                await browser.look(390, 844, scheme)
                assert await browser.run(CHECKS) == []

            match = {"source": HOSTILE, "rank": 0, "worker": "w", "blocks": 2, "tokens": 32, "tiers": {"GPU": 2}}
            found = {"results": [{"matches": [{**match, "state": "live", "partial": True}]}], "incomplete": [match]}
            await answered_by(browser, f"new Response({json.dumps(json.dumps(found))})")
            assert f"These may hold more than the index knows: {HOSTILE}." in await asked(browser, "hashes", "1")
            assert await browser.run(text_of("#ask-found")) == f"{HOSTILE}w0232GPU 2live, partial"
            assert not await browser.run("window.hacked")

            refusal = json.dumps(json.dumps({"error": "only loopback may"}))
            await answered_by(browser, f"new Response({refusal}, {{status: 403}})")
            assert "only loopback may" in await asked(browser, "hashes", "1")
            assert not await browser.run("document.querySelector('#sign-in').hidden")
            await answered_by(browser, f"new Response({json.dumps(json.dumps(found))})")
            await browser.run(
                "document.querySelector('#sign-in-token').value = 'kvbus_t', document.querySelector('#sign-in').requestSubmit()"
            )
            await browser.until("document.querySelector('#sign-in').hidden", "signed in")
            assert await browser.run("window.sent.Authorization") == "Bearer kvbus_t"
            assert "kvbus_t" not in await browser.run("document.cookie + JSON.stringify({...localStorage})")
