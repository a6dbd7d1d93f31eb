"""The engine's own HTTP API, as far as it resets the prefix cache.

Which engine it is shows by which of the two paths is there; asking for that changes nothing.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Final

import aiohttp

TIMEOUT: Final = 10.0
"""Seconds for a request and its answer."""

MAX_ANSWER: Final = 64 * 1024
"""Bytes of an answer that are read."""


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


def _says_no(text: str) -> bool:
    try:
        answer = json.loads(text)
    except ValueError:
        return False
    return isinstance(answer, dict) and answer.get("success") is False
