"""The share of the event loop's time that answers over HTTP may take, and their turns: the stream goes first.

A hundred clients that never wait would else have all their answers made in one turn of the loop, one turn after the
other, and batches would wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final

BURST: Final = 0.01
"""Seconds that work may be ahead of its share of the event loop's time."""


class Pace:
    """All pieces of work together get half of the loop's time, and each is in a turn of its own.

    Probes have a queue of their own, so they do not wait behind a crowd that asks for something else.
    """

    def __init__(self) -> None:
        self._others = asyncio.Lock()
        self._probes = asyncio.Lock()
        self._share_used_until = 0.0

    @contextlib.asynccontextmanager
    async def piece(self, *, probe: bool = False) -> AsyncIterator[None]:
        """Wait for the turn of a piece of work, which must not wait for anything itself."""
        async with self._probes if probe else self._others:
            await asyncio.sleep(max(0.0, self._share_used_until - BURST - time.perf_counter()))
            begun = time.perf_counter()
            try:
                yield
            finally:
                now = time.perf_counter()
                self._share_used_until = max(begun, self._share_used_until) + 2 * (now - begun)
