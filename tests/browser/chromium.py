"""Run a headless Chromium for tests, and control its page over the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.doubles.bus import PATIENCE, eventually

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-port=0",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
)


class Browser:
    """One page of a headless Chromium.

    Attributes:
        requests: every URL that the page has requested.
        complaints: console errors, exceptions, and violations of the page's content security policy.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def read(self) -> None:
        """Process the DevTools messages of the browser until its connection ends."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Network.requestWillBeSent":
                self.requests.append(said["params"]["request"]["url"])
            elif said["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.complaints.append(said["params"]["entry"]["text"])
            elif said["method"] == "Runtime.consoleAPICalled" and said["params"]["type"] in ("error", "assert"):
                self.complaints.append(str(said["params"]["args"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE):
            said = await answer
        assert "error" not in said, (method, said)
        return said["result"]

    async def run(self, script: str) -> Any:
        """Evaluate a JavaScript expression in the page and return its value."""
        said = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def until(self, script: str, what: str) -> Any:
        """Wait until a JavaScript expression is true, and return its value."""
        end = asyncio.get_running_loop().time() + PATIENCE
        while not (value := await self.run(script)):
            assert asyncio.get_running_loop().time() < end, f"not in time: {what}; complaints: {self.complaints}"
            await asyncio.sleep(0.05)
        return value

    async def look(self, width: int, height: int, scheme: str, *, motion: bool = True) -> None:
        """Set the window's size in pixels, the light or dark colour scheme, and whether the user accepts animations."""
        phone = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "no-preference" if motion else "reduce"}
        await self.call("Emulation.setEmulatedMedia", features=[{"name": n, "value": v} for n, v in features.items()])

    async def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        said = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(said["data"]))


async def _page(session: aiohttp.ClientSession, targets: str) -> str:
    """Return the WebSocket address of the browser's page.

    Wait for it, because the browser listens before it opens the page.
    """
    async with asyncio.timeout(PATIENCE):
        while True:
            async with session.get(targets) as answer:
                for each in await answer.json():
                    if each["type"] == "page":
                        return each["webSocketDebuggerUrl"]
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start a headless Chromium, and yield its empty page."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *_FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stderr=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            await eventually(lambda: port_file.exists() and "/devtools/" in port_file.read_text(), "the browser")
            base = f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}"
            async with aiohttp.ClientSession() as session:
                url = await _page(session, f"{base}/json/list")
                async with session.ws_connect(url, max_msg_size=64 * 2**20) as socket:
                    browser = Browser(socket)
                    reading = asyncio.create_task(browser.read())
                    for domain in ("Page", "Runtime", "Network", "Log"):
                        await browser.call(f"{domain}.enable")
                    yield browser
                    await browser.call("Browser.close")
                    reading.cancel()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
            await process.wait()
