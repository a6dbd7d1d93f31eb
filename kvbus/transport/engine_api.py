"""Requests to an engine's own HTTP API, for facts that the engine's event stream does not contain."""

from __future__ import annotations

import re
from typing import Final

import aiohttp

TIMEOUT: Final = 10.0
"""Maximum seconds from sending an HTTP request to an engine until its response is complete."""

MAX_ANSWER: Final = 64 * 1024
"""Maximum bytes of an HTTP response that one read returns."""


MAX_METRICS: Final = 16 * 1024 * 1024

_AWAKE: Final = re.compile(
    r'^vllm:engine_sleep_state\{[^}\n]*sleep_state="awake"[^}\n]*\} ([01](?:\.0)?)$', re.MULTILINE
)


def session() -> aiohttp.ClientSession:
    """Return an HTTP client for requests to engines, with the limit :data:`TIMEOUT`. The caller closes the client."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT))


async def is_asleep(client: aiohttp.ClientSession, base: str) -> bool | None:
    """Return whether all data-parallel ranks of a vLLM engine sleep; None if the engine has no metric for it.

    The function reads the metric ``vllm:engine_sleep_state`` of each rank.

    Args:
        client: the HTTP client.
        base: URL of the engine's HTTP API, without a path.

    Raises:
        aiohttp.ClientError, TimeoutError: the engine does not answer.
    """
    text = await _get(client, base + "/metrics", MAX_METRICS)
    awake = [float(value) for value in _AWAKE.findall(text)]
    return not any(awake) if awake else None


async def _get(client: aiohttp.ClientSession, url: str, most: int) -> str:
    """Return the text of an HTTP response.

    The text is empty if the status is not 200, or if the response has more than ``most`` bytes.
    """
    async with client.get(url, allow_redirects=False) as answer:
        body = bytearray()
        async for part in answer.content.iter_chunked(MAX_ANSWER):
            body += part
            if len(body) > most:
                return ""
        return body.decode(errors="replace") if answer.status == 200 else ""
