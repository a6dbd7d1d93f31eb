"""Waiting: for some time, or for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_LOOK_S: Final = 0.01


async def pause(seconds: float, stop: asyncio.Event) -> None:
    """Wait for ``seconds``, or until ``stop`` is set."""
    try:
        async with asyncio.timeout(None if seconds == float("inf") else max(0.0, seconds)):
            await stop.wait()
    except TimeoutError:
        pass


async def until(condition: Callable[[], bool], within: float) -> float | None:
    """Wait until a condition holds.

    Returns:
        Seconds waited, or None if the condition did not hold ``within`` that many seconds.
    """
    clock = asyncio.get_running_loop().time
    begin = clock()
    while not condition():
        if clock() - begin >= within:
            return None
        await asyncio.sleep(_LOOK_S)
    return clock() - begin
