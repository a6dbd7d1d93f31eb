"""Requests to an engine's own HTTP API, for facts that are not in its event stream."""

from __future__ import annotations

import re
from typing import Final

import aiohttp

TIMEOUT: Final = 10.0
"""Maximum seconds for a request and its answer."""

MAX_ANSWER: Final = 64 * 1024
"""Bytes of an answer that are read per step."""


MAX_METRICS: Final = 16 * 1024 * 1024

_AWAKE: Final = re.compile(
    r'^vllm:engine_sleep_state\{[^}\n]*sleep_state="awake"[^}\n]*\} ([01](?:\.0)?)$', re.MULTILINE
)


def session() -> aiohttp.ClientSession:
    """Return an HTTP client with :data:`TIMEOUT`. The caller closes it."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT))


async def is_asleep(client: aiohttp.ClientSession, base: str) -> bool | None:
    """Return whether all ranks of an engine sleep, by vLLM's metrics; None if the engine has no such metric.

    Raises:
        aiohttp.ClientError, TimeoutError: the engine does not answer.
    """
    text = await _get(client, base + "/metrics", MAX_METRICS)
    awake = [float(value) for value in _AWAKE.findall(text)]
    return not any(awake) if awake else None


async def _get(client: aiohttp.ClientSession, url: str, most: int) -> str:
    """Return the text of an answer; empty if the status is not 200 or the answer has more than ``most`` bytes."""
    async with client.get(url, allow_redirects=False) as answer:
        body = bytearray()
        async for part in answer.content.iter_chunked(MAX_ANSWER):
            body += part
            if len(body) > most:
                return ""
        return body.decode(errors="replace") if answer.status == 200 else ""
