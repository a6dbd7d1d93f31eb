"""Questions by HTTP."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.doubles.bus import eventually

if TYPE_CHECKING:
    from tests.doubles.child import Child


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
        AssertionError: the process behind it has ended, or it takes too long.
    """

    async def answers() -> bool:
        assert process.running, f"{process.name} has ended: {process.log}"
        with contextlib.suppress(aiohttp.ClientError):
            await fetched(url)
            return True
        return False

    await eventually(answers, f"{url} to answer", patience)
