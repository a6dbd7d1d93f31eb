"""Answers of the HTTP server that are there as a whole: JSON, long texts, problems and refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec
from aiohttp import web

from kvbus.admin.pace import Pace
from kvbus.core.stats import HttpRefusal, ProcessStats

PART: Final = 256 * 1024
"""Bytes that are handed to a connection in a turn of the loop: 0.2 ms."""


def as_json(data: object) -> web.Response:
    """Answer with data."""
    return web.Response(body=msgspec.json.encode(data), content_type="application/json")


def in_parts(texts: Sequence[bytes], content_type: str, pace: Pace) -> web.Response:
    """Answer with texts, one behind the other. What is longer than a part is handed over in turns."""
    headers = {"Content-Type": content_type, "Content-Length": str(sum(map(len, texts)))}
    return web.Response(body=_parts(texts, pace), headers=headers)


async def _parts(texts: Sequence[bytes], pace: Pace) -> AsyncIterator[bytes]:
    part: list[bytes] = []
    size = 0
    for text in texts:
        if size >= PART:
            yield b"".join(part)  # the connection takes it before the next one has its turn
            async with pace.piece():
                part, size = [], 0
        part.append(text)
        size += len(text)
    yield b"".join(part)


def problem(status: int, text: str) -> web.Response:
    """Say what is wrong with a request."""
    return web.json_response({"error": text}, status=status)


def refused(process: ProcessStats, status: int, refusal: HttpRefusal, text: str) -> web.Response:
    """Refuse a request, and count why."""
    process.http_refused[refusal] += 1
    return problem(status, text)
