"""A discoverer that asks one engine over HTTP for its publishers.

vLLM answers at ``/kv_event_sources``, and SGLang at ``/server_info``. This discovery also finds ports that the engine
chooses itself (``tcp://*:0``), and the new ports after a restart of the engine. The discoverer asks at a fixed
interval, and also as soon as the connection to the engine is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvbus.config.values import ApiUrl, Seconds, Section, key
from kvbus.parts.discovery.contract import DiscoveryError, Engine, Services
from kvbus.parts.discovery.engine_answers import Answer, of_sglang, of_vllm

TIMEOUT: Final = 5.0
"""Timeout of an HTTP request including its answer, in seconds."""
MAX_ANSWER: Final = 4 * 1024 * 1024
"""Maximum size of the engine's answer in bytes."""
PATHS: Final[dict[str, Callable[[Any, str], Answer]]] = {"/kv_event_sources": of_vllm, "/server_info": of_sglang}


class HttpSettings(Section):
    """The configuration keys of ``discover: {http: …}``."""

    url: ApiUrl = key(
        ...,
        "Base URL of the engine's API. kvbus adds the engine under this entry's name. Each engine needs its own entry.",
        example="http://10.0.0.3:8000",
    )
    interval: Seconds = key(
        5.0,
        "Interval between two requests. After the connection to an engine is lost, kvbus asks at once.",
        example=5.0,
        unit="s",
        gt=0,
    )


class HttpDiscoverer:
    """A discoverer that asks one engine over HTTP; see :class:`~kvbus.parts.discovery.contract.Discoverer`."""

    Settings = HttpSettings

    def __init__(self, settings: HttpSettings, services: Services) -> None:
        self._settings = settings
        self._services = services

    async def watch(self) -> AsyncGenerator[tuple[Engine, ...], None]:
        """Yield the set of engines after each answer of the engine.

        It contains this engine. It is empty if the engine publishes no events.
        """
        disconnected = self._services.disconnected
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT)) as session:
            while True:
                disconnected.clear()
                answer, url = await self._ask(session), self._settings.url
                yield answer.engines(self._services.name, f"http {url}", url)
                try:
                    async with asyncio.timeout(self._settings.interval):
                        await disconnected.wait()
                except TimeoutError:
                    pass

    async def _ask(self, session: aiohttp.ClientSession) -> Answer:
        base = self._settings.url
        host = urlsplit(base).hostname or ""
        for path, read in PATHS.items():
            try:
                async with session.get(base + path, allow_redirects=False) as response:
                    if response.status == 404:
                        continue
                    if response.status != 200:
                        raise DiscoveryError(f"GET {base}{path}: {response.status} {response.reason}")
                    text = await response.content.read(MAX_ANSWER + 1)
                    while not response.content.at_eof() and len(text) <= MAX_ANSWER:
                        text += await response.content.read(MAX_ANSWER + 1 - len(text))
            except (aiohttp.ClientError, TimeoutError) as error:
                raise DiscoveryError(f"GET {base}{path}: {str(error) or type(error).__name__}") from error
            if len(text) > MAX_ANSWER:
                raise DiscoveryError(f"GET {base}{path}: more than {MAX_ANSWER} bytes")
            try:
                return read(msgspec.json.decode(text), host)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise DiscoveryError(f"GET {base}{path}: {error}") from error
        raise DiscoveryError(f"{base} has neither {' nor '.join(PATHS)}")
