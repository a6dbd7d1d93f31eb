"""Ask an engine's own HTTP API what its stream does not say."""

from __future__ import annotations

import json
import re
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


def session() -> aiohttp.ClientSession:
    """Make the client for requests. The caller closes it."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT))


async def is_asleep(client: aiohttp.ClientSession, base: str) -> bool | None:
    """Return whether all ranks of an engine sleep, by vLLM's metrics; None if they do not say.

    Raises:
        aiohttp.ClientError, TimeoutError: it does not answer.
    """
    text = await _get(client, base + "/metrics", MAX_METRICS)
    awake = [float(value) for value in _AWAKE.findall(text)]
    return not any(awake) if awake else None


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
