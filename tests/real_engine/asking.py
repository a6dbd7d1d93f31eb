"""Questions by HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from tests.chaos.processes import Child


async def fetched(url: str, body: Any = None) -> str:
    """The answer to GET, or with a body to POST.

    Raises:
        aiohttp.ClientError: there is none, or its status is no success.
    """
    timeout = aiohttp.ClientTimeout(total=120)
    method = "GET" if body is None else "POST"
    async with (
        aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session,
        session.request(method, url, json=body) as answer,
    ):
        return await answer.text()


async def answering(url: str, patience: float, process: Child) -> None:
    """Wait until an address answers.

    Raises:
        AssertionError: the process behind it has ended.
        TimeoutError: it takes too long.
    """
    async with asyncio.timeout(patience):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                await fetched(url)
                return
            assert process.running, f"{process.name} has ended: {process.log}"
            await asyncio.sleep(0.1)
