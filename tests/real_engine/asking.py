"""Functions that send HTTP requests to an engine or to kvbus."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.doubles.bus import eventually

if TYPE_CHECKING:
    from tests.doubles.child import Child


async def fetched(url: str, body: Any = None) -> str:
    """Return the answer to a GET, or to a POST if there is a body.

    Raises:
        aiohttp.ClientError: there is no answer, or its status is an error.
    """
    timeout = aiohttp.ClientTimeout(total=120)
    method = "GET" if body is None else "POST"
    async with (
        aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session,
        session.request(method, url, json=body) as answer,
    ):
        return await answer.text()


async def answering(url: str, patience: float, process: Child) -> None:
    """Wait until a URL answers.

    Raises:
        AssertionError: the process that serves the URL has ended, or the time is over.
    """

    async def answers() -> bool:
        assert process.running, f"{process.name} has ended: {process.log}"
        with contextlib.suppress(aiohttp.ClientError):
            await fetched(url)
            return True
        return False

    await eventually(answers, f"{url} to answer", patience)
