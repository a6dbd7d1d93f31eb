"""``GET /blocks``: the live blocks of sources, a line each, written in parts while the live stream goes on."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any, Final, Protocol

from aiohttp import web

from kvbus.core.relay import Relay
from kvbus.core.stats import HttpRefusal, ProcessStats
from kvbus.core.types import HASH_FORMS
from kvbus.http.answers import problem, refused, write
from kvbus.http.content_log import current
from kvbus.telemetry.readings import LiveBlocks

DUMP_SLICE: Final = 0.001
"""Seconds for which lines of ``/blocks`` are made before the loop's other work gets its turn."""

DUMP_REST: Final = 4
"""All dumps together then rest for so many times as long: the live stream hardly notices them."""

FEW_LINES: Final = 10
"""Lines between two looks at the clock."""

MAX_DUMPS: Final = 4
"""``/blocks`` answers at once. Further requests get 503."""


class Observed(Protocol):
    """The state that is dumped."""

    relay: Relay
    process: ProcessStats


class Blocks:
    """Answers with blocks.

    Args:
        observed: whose blocks they are.
    """

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._turn = asyncio.Lock()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer ``GET /blocks``."""
        name, hashes = request.query.get("source"), request.query.get("hashes", "number")
        if hashes not in HASH_FORMS:
            return problem(400, f"hashes={hashes!r} is none of {', '.join(HASH_FORMS)}; for example hashes=string")
        sources = [s for s in self._observed.relay.present if name in (None, s.spec.label)]
        if name is not None and not sources:
            known = ", ".join(s.spec.label for s in self._observed.relay.present)
            return problem(404, f"no source {name!r}; there are: {known}")
        process = self._observed.process
        if process.http_dumps >= MAX_DUMPS:
            return refused(process, 503, HttpRefusal.BUSY, f"{MAX_DUMPS} dumps are under way; try again")
        process.http_dumps += 1
        try:
            # copying each source's state at one moment is cheap; the text takes time, so write it in parts
            lines = itertools.chain.from_iterable([LiveBlocks(source).lines(hashes) for source in sources])
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            while request.method != "HEAD" and (part := await self._next_part(lines)):
                current.get().add(part.count(b"\n"), len(part))
                await write(response, part)
            return response
        finally:
            process.http_dumps -= 1

    async def _next_part(self, lines: Iterator[dict[str, Any]]) -> bytes:
        """The next lines of a dump, when it is its turn."""
        async with self._turn:
            begun = time.perf_counter()
            part = few = _text(lines)  # whatever the clock says: nothing means the end
            while few and time.perf_counter() - begun < DUMP_SLICE:
                few = _text(lines)
                part += few
            await asyncio.sleep(DUMP_REST * (time.perf_counter() - begun))
            return part.encode()


def _text(lines: Iterator[dict[str, Any]]) -> str:
    return "".join([json.dumps(line, separators=(",", ":")) + "\n" for line in itertools.islice(lines, FEW_LINES)])
