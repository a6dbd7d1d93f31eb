"""Answers of the HTTP server: JSON, long texts, problems and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Sequence
from typing import Final, TypeVar

import msgspec

from kvbus.core.stats import HttpRefusal, ProcessStats
from kvbus.transport.http.messages import Response, problem

PART: Final = 256 * 1024
"""Bytes that a connection gets before the event loop goes on with other work: 0.2 ms."""

T = TypeVar("T")


def as_json(data: object) -> Response:
    """Answer with data."""
    return Response(msgspec.json.encode(data))


def plain(text: str, status: int = 200) -> Response:
    """Answer with a text."""
    return Response(text.encode(), "text/plain; charset=utf-8", status=status)


async def in_slices(work: Generator[None, None, T]) -> T:
    """Do work slice by slice, and let the event loop do other work after each slice."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


def in_parts(texts: Sequence[bytes], content_type: str) -> Response:
    """Answer with texts, joined. A long answer is handed to the connection in parts."""
    return Response(_parts(texts), content_type, headers={"content-length": str(sum(map(len, texts)))})


async def _parts(texts: Sequence[bytes]) -> AsyncIterator[bytes]:
    part: list[bytes] = []
    size = 0
    for text in texts:
        if size >= PART:
            yield b"".join(part)
            await asyncio.sleep(0)
            part, size = [], 0
        part.append(text)
        size += len(text)
    yield b"".join(part)


def refused(process: ProcessStats, status: int, refusal: HttpRefusal, text: str) -> Response:
    """Refuse a request, and count why."""
    process.http_refused[refusal] += 1
    return problem(status, text)
