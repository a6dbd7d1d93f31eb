"""``GET /blocks``: the live blocks of the sources, one on each line.

The answer is written in short parts. Between two parts, the event loop handles batches.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any, Final, Protocol

from aiohttp import web

from kvbus.core.relay import Relay
from kvbus.core.stats import HttpRefusal, ProcessStats
from kvbus.core.types import HASH_FORMS
from kvbus.http.answers import problem, refused, write
from kvbus.http.content_log import current
from kvbus.telemetry.readings import LiveBlocks

LINES: Final = 20
"""Number of lines of ``/blocks`` that kvbus encodes in one iteration of the event loop."""

MAX_DUMPS: Final = 4
"""Maximum number of unfinished ``/blocks`` answers. Further requests get the status 503."""


class BusState(Protocol):
    """The attributes of the daemon that an answer to ``/blocks`` needs."""

    relay: Relay
    process: ProcessStats


async def dump_blocks(observed: BusState, request: web.Request) -> web.StreamResponse:
    """Answer ``GET /blocks``, with the live blocks of one source or of all sources."""
    name, hashes = request.query.get("source"), request.query.get("hashes", "number")
    if hashes not in HASH_FORMS:
        return problem(400, f"hashes={hashes!r} is not one of {', '.join(HASH_FORMS)}; for example hashes=string")
    sources = [s for s in observed.relay.present if name in (None, s.spec.label)]
    if name is not None and not sources:
        known = ", ".join(s.spec.label for s in observed.relay.present)
        return problem(404, f"no source {name!r}; the sources are: {known}")
    process = observed.process
    if process.http_dumps >= MAX_DUMPS:
        return refused(process, 503, HttpRefusal.BUSY, f"{MAX_DUMPS} dumps are under way; try again")
    process.http_dumps += 1
    try:
        # Each LiveBlocks freezes the index of its source, which copies nothing. All of them are created in the same
        # iteration of the event loop, so that the answer shows all sources as of the same moment.
        lines = itertools.chain.from_iterable([LiveBlocks(source).lines(hashes) for source in sources])
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        for part in _parts(lines) if request.method != "HEAD" else ():
            current.get().add(part.count(b"\n"), len(part))
            await write(response, part)
            await asyncio.sleep(0)
        return response
    finally:
        process.http_dumps -= 1


def _parts(lines: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    while some := list(itertools.islice(lines, LINES)):
        yield "".join([json.dumps(line, separators=(",", ":")) + "\n" for line in some]).encode()
