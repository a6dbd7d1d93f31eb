"""A discoverer that asks one engine where it publishes: vLLM at ``/kv_event_sources``, SGLang at ``/server_info``.

So kvbus finds ports that the engine chooses itself (``tcp://*:0``), also after a restart. It asks again and again, and
at once when the connection to the engine is lost.
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
"""Timeout of a request with its answer, in seconds."""
MAX_ANSWER: Final = 4 * 1024 * 1024
"""Maximum bytes of an answer."""
PATHS: Final[dict[str, Callable[[Any, str], Answer]]] = {"/kv_event_sources": of_vllm, "/server_info": of_sglang}


class HttpSettings(Section):
    """The keys of ``discover: {http: …}``."""

    url: ApiUrl = key(
        ...,
        "Base URL of the engine's API. The engine becomes a source under this entry's name. Several engines need an "
        "entry each.",
        example="http://10.0.0.3:8000",
    )
    interval: Seconds = key(
        5.0, "Interval between questions. After a lost connection kvbus asks at once.", example=5.0, unit="s", gt=0
    )


class HttpDiscoverer:
    """A discoverer of one engine; see :class:`~kvbus.parts.discovery.contract.Discoverer`."""

    Settings = HttpSettings

    def __init__(self, settings: HttpSettings, services: Services) -> None:
        self._settings = settings
        self._services = services

    async def watch(self) -> AsyncGenerator[tuple[Engine, ...], None]:
        """Yield the engine after each query, or an empty set if the engine publishes nothing."""
        disconnected = self._services.disconnected
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT)) as session:
            while True:
                disconnected.clear()
                ranks, topic = await self._ask(session)
                engine = Engine(self._services.name, ranks, f"http {self._settings.url}", topic, self._settings.url)
                yield (engine,) if ranks else ()
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
