"""Tests for the status page in a real browser: its content, its accessibility, and its warning when its data are
old.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvbus.http.credentials import line_of, new_token
from kvbus.state import writer
from kvbus.state.contract import StoreError
from kvbus.transport.engine.publisher import EnginePublisher
from tests.browser.chromium import PROGRAM, Browser, chromium
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.kvbus_process import Process
from tests.doubles.payloads import payload, removed, store
from tests.http.test_routers import Subscribers
from tests.typed import there

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium (.ci/run installs it)"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

CHECKS = Path(__file__).with_name("checks.js").read_text()
LOOKS = [(1280, 900, "light"), (1280, 900, "dark"), (390, 844, "light"), (390, 844, "dark")]
HOSTILE = "<img src=x onerror=window.hacked=1>"
NAMELESS = {"button", "link", "textbox", "combobox", "image", "dialog", "region"}


def text_of(where: str) -> str:
    return f"(document.querySelector({json.dumps(where)})?.textContent ?? '')"


async def show(browser: Browser, bus: Bus) -> str:
    host, port = there(bus.daemon.http_address)
    url = f"http://{host}:{port}"
    await browser.call("Page.navigate", url=url)
    await browser.until(f"/live|partial/.test({text_of('#sources')})", "the source on the page")
    return url


async def focus_order(browser: Browser) -> list[str]:
    """Return the names of the elements that the Tab key reaches, in order.

    Fail if an element does not show that it has the focus, or if it lies before the previous element in the page.
    """
    await browser.run("window.before = null, document.activeElement.blur(), scrollTo(0, 0)")
    reached: list[str] = []
    while True:
        await browser.press("Tab", 9)
        found = await browser.run(
            """(() => { const e = document.activeElement;
            if (e === document.body || !e) return null;
            const style = getComputedStyle(e), ordered = !before || before.compareDocumentPosition(e) & 4;
            window.before = e;
            return [ordered ? "" : "out of order", style.outlineStyle === "none" ? "no outline" : "",
              e.id || e.textContent.trim().slice(0, 30)]; })()"""
        )
        if found is None or found[2] in reached:
            return reached
        assert found[:2] == ["", ""], found
        reached.append(found[2])


async def test_the_status_page_is_readable_and_accessible_at_every_size_and_theme() -> None:
    async with (
        running_bus(source={"name": "engine"}) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
        chromium() as browser,
    ):
        with Subscribers(bus.out) as subscribers:
            router = subscribers.add(HOSTILE.encode(), b"")
            await use(browser, bus, engine)
            router.close(0)


async def use(browser: Browser, bus: Bus, engine: EnginePublisher) -> None:
    await engine.wait_for_subscriber(60)
    engine.publish(payload(store([1, 2]), store([3], 2, medium="CPU")))
    engine.publish(payload(store([4], tokens=[1] * 7), removed([99])))
    engine.publish(payload(store([5], medium=HOSTILE)))
    await eventually(lambda: bus.caught_up(2), "three batches")
    bus.daemon.admin.timeline.add("remark", HOSTILE, "over", HOSTILE)
    for width, height, scheme in LOOKS:
        await browser.look(width, height, scheme, motion=width > 600)
        url = await show(browser, bus)
        await browser.until(f"{text_of('#routers')}.includes('onerror')", "the router's topics")
        await browser.until("document.querySelector('#tile-blocks path')?.getAttribute('d')", "a chart")
        assert await browser.run(CHECKS) == [], (width, scheme)
        dark = await browser.run("getComputedStyle(document.body).backgroundColor")
        assert (int(dark.strip("rgb()").split(",")[0]) < 60) is (scheme == "dark")
        moving = await browser.run("document.getAnimations().filter(a => a.playState === 'running').length")
        assert (moving > 0) is (width > 600)

    # From here on, the test checks the content of the page.
    sources = await browser.run(text_of("#sources"))
    assert "partial" in sources
    assert "2 + CPU 1" in sources
    refused = await browser.until(f"{text_of('#refused')}.includes('token_count') && {text_of('#refused')}", "why")
    assert "batch 1 of epoch 0" in refused
    assert HOSTILE[:24] in refused
    assert HOSTILE in await browser.run(text_of("#timeline"))
    assert "connecting → " in await browser.run(text_of("#timeline"))
    assert "vllm" in sources
    wrong = await browser.run(text_of("#reasons"))
    assert "docs/RUNBOOK.md#" in wrong
    severities = await browser.run("[...document.querySelectorAll('#reasons li')].map(each => each.className)")
    assert severities == sorted(severities, reverse=True), "problems come first"
    fills = await browser.until(f"{text_of('#fills')}.includes('%') && {text_of('#fills')}", "the limits")
    assert "reorder buffer" in fills
    assert "state" in await browser.run(text_of("#facts"))
    assert "1 router follows" in await browser.run(text_of("#verdict"))
    assert "endpoint" in await browser.run(text_of("#config"))
    await browser.until(f"{text_of('#age-text')}.startsWith('as of ')", "the age")

    # The keyboard reaches every control, and every control has a name for screen readers.
    await browser.look(1280, 900, "light")
    order = await focus_order(browser)
    assert order[:2] == ["Skip to the sources", "engine"]
    tree = await browser.call("Accessibility.getFullAXTree")
    for node in tree["nodes"]:
        if not node["ignored"] and node["role"]["value"] in NAMELESS:
            assert node.get("name", {}).get("value"), node

    # From here on, the test checks the dialog that shows one source.
    await browser.run("document.querySelector('#sources button').focus()")
    await browser.press("Enter", 13)
    await browser.run("document.querySelector('#sources button').click()")
    assert await browser.until("document.querySelector('dialog').open", "the dialog")
    assert bus.engine in await browser.run(text_of("#source-body"))
    assert await browser.run(CHECKS) == []
    await browser.press("Escape", 27)
    await browser.until("!document.querySelector('dialog').open", "the dialog closed")
    # After the dialog is closed, the focus returns to the source's button.
    assert await browser.run("document.activeElement.textContent") == "engine"

    # The page loads nothing from other hosts, the browser reports no error, and text from peers is not read as HTML.
    assert {urlsplit(each).netloc for each in browser.requests} == {urlsplit(url).netloc}
    assert browser.complaints == []
    assert await browser.run("[window.hacked, document.images.length, document.querySelectorAll('td b').length]") == [
        None,
        0,
        0,
    ]


async def test_incidents_are_visible_and_a_spike_does_not_flatten_a_chart() -> None:
    async with running_bus(source={"name": "engine"}) as bus, chromium() as browser:
        timeline = bus.daemon.admin.timeline
        for n in range(40):
            timeline.add("router", "routers", "connected" if n % 2 else "left", f"router {n} came or went")
        timeline.add("router", "routers", "left", "router slow disconnected (too slow)")
        timeline.add("state", "engine", "lost", "live → lost")
        await browser.look(1280, 900, "light")
        await browser.call("Page.navigate", url="http://{}:{}".format(*there(bus.daemon.http_address)))
        await browser.until(f"{text_of('#timeline')}.includes('live → lost')", "the timeline")
        folded = await browser.run(text_of("#timeline"))
        assert "20 connected, 20 disconnected" in folded
        assert "too slow" in folded
        assert "came or went" not in folded

        async def show_only(wanted: str) -> str:
            change = f"const box = document.querySelector('#wanted'); box.value = '{wanted}';"
            found: str = await browser.run(
                f"(() => {{ {change} box.dispatchEvent(new Event('change')); return {text_of('#timeline')}; }})()"
            )
            return found

        assert "came or went" in await show_only("all")
        assert "came or went" not in await show_only("incidents")
        assert "live → lost" in await show_only("incidents")

        # 299 values are between 10 and 20, and one value is 5000. The 299 values must still use the height of the chart.
        drawn = """(() => { const svg = draw("svg", {}), times = [...Array(300).keys()],
            values = times.map(i => i === 150 ? 5000 : 10 + i % 11);
            document.body.append(svg); chart(svg, times, values, "it", "/s");
            const heights = svg.children[1].getAttribute("d").match(/ [\\d.-]+/g).map(Number);
            svg.style.cssText = "position: absolute; left: 0; top: 0; width: 300px; height: 60px";
            svg.dispatchEvent(new PointerEvent("pointermove", { clientX: 151, clientY: 1 }));
            return [Math.max(...heights) - Math.min(...heights.filter((_, i) => i !== 150)), svg.getAttribute("aria-label"),
              svg.querySelector("title").textContent]; })()"""
        spread, label, hovered = await browser.run(drawn)
        assert spread > 20
        assert label == "it, last five minutes: now 12/s, peak 5,000/s"
        assert hovered.startswith("5,000/s at ")


async def test_an_open_page_shows_a_finding_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "RETRY_SECONDS", 10.0)
    async with running_bus(source={"name": "engine"}, state_dir=str(tmp_path)) as bus, chromium() as browser:
        await browser.look(1280, 900, "light")
        await browser.call("Page.navigate", url="http://{}:{}".format(*there(bus.daemon.http_address)))
        await browser.until(f"{text_of('#age-text')}.startsWith('as of ')", "the page")
        state = there(bus.daemon.state)
        state.fail(StoreError("No space left on device"))
        found = "kvbus cannot write its state"
        await browser.until(f"{text_of('#reasons')}.includes('{found}')", "the finding")
        assert "state_dir: free disk space" in await browser.run(text_of("#reasons"))
        await browser.until(f"!{text_of('#reasons')}.includes('{found}')", "the end of it")


async def test_an_open_page_marks_a_stopped_bus_and_follows_the_restarted_bus(tmp_path: Path) -> None:
    process = Process(tmp_path, keeps_state=False)
    process.start()
    try:
        async with chromium() as browser:
            await browser.look(1280, 900, "dark")
            await eventually(lambda: answers(process), "the bus")
            await browser.call("Page.navigate", url=f"http://{process.http}/")
            await browser.until(
                f"{text_of('#age-text')}.startsWith('as of') && {text_of('#facts')}.includes('up')", "it"
            )
            process.pause()
            await browser.until("document.querySelector('#age').className === 'age stale'", "the age in red")
            assert (await browser.run(text_of("#age-text"))).startswith("no answer for ")
            assert "does not answer" in await browser.run(text_of("[role=alert]"))
            assert await browser.run(CHECKS) == []
            process.resume()
            await browser.until("document.querySelector('#age').className === 'age'", "the age as before")
            assert await browser.run(text_of("[role=alert]")) == ""

            first = await browser.run("bus.about.started")
            process.kill()
            await browser.until("document.querySelector('#age').className === 'age stale'", "the age in red")
            process.start()
            await browser.until("document.querySelector('#age').className === 'age'", "the new bus followed")
            await browser.until(f"bus.about.started > {first}", "what it says of itself")
            assert await browser.run("bus.times.length") < 20
    finally:
        process.kill()


def answers(process: Process) -> bool:
    with contextlib.suppress(OSError):
        return bool(process.sources())
    return False


async def test_a_remote_user_sees_the_bus_after_signing_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.http.access.is_loopback", lambda _host: False)
    token = new_token()
    (tmp_path / "tokens").write_text(line_of("operator", token, content=True))
    settings: dict[str, Any] = {"http_tokens_file": tmp_path / "tokens", "http_open": "probes"}
    async with (
        running_bus(source={"name": "engine"}, **settings) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
        chromium() as browser,
    ):
        await engine.wait_for_subscriber(60)
        engine.publish(payload(store([1, 2])))
        await eventually(lambda: bus.caught_up(0), "a batch")

        async def sign_in(shown: str) -> None:
            await browser.run(
                f"document.querySelector('#sign-in-token').value = {json.dumps(shown)}, "
                "document.querySelector('#sign-in').requestSubmit()"
            )

        await browser.look(1280, 900, "light")
        host, port = there(bus.daemon.http_address)
        await browser.call("Page.navigate", url=f"http://{host}:{port}")
        await browser.until(f"{text_of('#verdict')} === 'Sign in to see this bus.'", "what to do")
        assert "engine" not in await browser.run("document.body.textContent")
        await sign_in(new_token())
        await browser.until(f"{text_of('#content')}.includes('the bearer token is not valid')", "a refusal")
        await sign_in(token)
        await browser.until(f"/live|partial/.test({text_of('#sources')})", "the source on the page")
        await browser.until("document.querySelector('#tile-blocks path')?.getAttribute('d')", "what comes with /events")
        assert await browser.run("document.querySelector('#sign-in').hidden")
        assert await browser.run(CHECKS) == []
        kept = "JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}, document.body.outerHTML])"
        assert token not in await browser.run(kept)
        assert await browser.run("document.querySelector('#sign-in-token').value") == ""
