"""Answers of the HTTP server that are there as a whole: JSON, long texts, problems and refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

import msgspec

from kvbus.admin.pace import Pace
from kvbus.core.stats import HttpRefusal, ProcessStats
from kvbus.transport.http.messages import Response, problem

PART: Final = 256 * 1024
"""Bytes that are handed to a connection in a turn of the loop: 0.2 ms."""


def as_json(data: object) -> Response:
    """Answer with data."""
    return Response(msgspec.json.encode(data))


def plain(text: str, status: int = 200) -> Response:
    """Answer with a text."""
    return Response(text.encode(), "text/plain; charset=utf-8", status=status)


def in_parts(texts: Sequence[bytes], content_type: str, pace: Pace) -> Response:
    """Answer with texts, one behind the other. What is longer than a part is handed over in turns."""
    return Response(_parts(texts, pace), content_type, headers={"content-length": str(sum(map(len, texts)))})


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


def refused(process: ProcessStats, status: int, refusal: HttpRefusal, text: str) -> Response:
    """Refuse a request, and count why."""
    process.http_refused[refusal] += 1
    return problem(status, text)
