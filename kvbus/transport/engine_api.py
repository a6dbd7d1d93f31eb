"""The engine's own HTTP API, as far as it resets the prefix cache, and says what its stream does not.

Which engine it is shows by which of the two paths is there; asking for that changes nothing.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Final

import aiohttp

TIMEOUT: Final = 10.0
"""Seconds for a request and its answer."""

MAX_ANSWER: Final = 64 * 1024
"""Bytes of an answer that are read."""


MAX_METRICS: Final = 16 * 1024 * 1024

_AWAKE: Final = re.compile(
    r'^vllm:engine_sleep_state\{[^}\n]*sleep_state="awake"[^}\n]*\} ([01](?:\.0)?)$', re.MULTILINE
)


class Kind(StrEnum):
    """An engine whose API is known, by the path of its reset."""

    VLLM = "/reset_prefix_cache"
    """There with ``VLLM_SERVER_DEV_MODE=1``. It resets the device's cache."""
    SGLANG = "/flush_cache"
    """It resets every tier."""


class RefusedError(Exception):
    """The engine has answered, and did not reset its cache."""


def session() -> aiohttp.ClientSession:
    """What requests are sent by; to be closed."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT))


async def kind_of(client: aiohttp.ClientSession, base: str) -> Kind:
    """Which engine is behind a base URL.

    Raises:
        RefusedError: none that can be asked.
        aiohttp.ClientError, TimeoutError: it does not answer.
    """
    for kind in Kind:
        async with client.options(base + kind, allow_redirects=False) as answer:
            if answer.status != 404:
                return kind
    raise RefusedError(f"neither {' nor '.join(Kind)} is there (vLLM needs VLLM_SERVER_DEV_MODE=1)")


async def reset(client: aiohttp.ClientSession, base: str, kind: Kind) -> None:
    """Ask an engine to reset its cache. One that has requests running may say yes and do nothing.

    Raises:
        RefusedError: it says no.
        aiohttp.ClientError, TimeoutError: it does not answer.
    """
    for method in ("POST", "GET"):  # the first versions of SGLang know GET alone
        async with client.request(method, base + kind, allow_redirects=False) as answer:
            if answer.status == 405 and method == "POST":
                continue
            text = (await answer.content.read(MAX_ANSWER)).decode(errors="replace")
            if not 200 <= answer.status < 300 or _says_no(text):
                raise RefusedError(f"{method} {kind}: {answer.status} {' '.join(text.split())[:200]}".rstrip())
            return


async def is_asleep(client: aiohttp.ClientSession, base: str) -> bool:
    """Whether all of an engine sleeps, by vLLM's metrics; False where they do not say.

    Raises:
        aiohttp.ClientError, TimeoutError: it does not answer.
    """
    text = await _get(client, base + "/metrics", MAX_METRICS)
    awake = [float(value) for value in _AWAKE.findall(text)]
    return bool(awake) and not any(awake)


async def version(client: aiohttp.ClientSession, base: str) -> str:
    """An engine's version as vLLM says it, empty where it does not.

    Raises:
        aiohttp.ClientError, TimeoutError: it does not answer.
    """
    try:
        answer = json.loads(await _get(client, base + "/version", MAX_ANSWER))
    except (ValueError, RecursionError):  # no JSON, or one that is nested without end
        return ""
    said = answer.get("version") if isinstance(answer, dict) else None
    return said if isinstance(said, str) else ""


async def _get(client: aiohttp.ClientSession, url: str, most: int) -> str:
    """The text of an answer; empty if it is refused or too long."""
    async with client.get(url, allow_redirects=False) as answer:
        body = bytearray()
        async for part in answer.content.iter_chunked(MAX_ANSWER):
            body += part
            if len(body) > most:
                return ""
        return body.decode(errors="replace") if answer.status == 200 else ""


def _says_no(text: str) -> bool:
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or one that is nested without end
        return False
    return isinstance(answer, dict) and answer.get("success") is False
