"""Answers of the HTTP server: JSON, long texts, problems and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from kvbus.core.stats import HttpRefusal, ProcessStats
from kvbus.http import connections

PART: Final = 256 * 1024
"""Bytes that a connection gets before the event loop goes on with other work: 0.2 ms."""

T = TypeVar("T")


def as_json(data: object) -> web.Response:
    """Answer with data."""
    return web.Response(body=msgspec.json.encode(data), content_type="application/json")


def plain(text: str, status: int = 200) -> web.Response:
    """Answer with a text."""
    return web.Response(text=text, status=status)


def problem(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """Say what is wrong with a request."""
    body = msgspec.json.encode({"error": text})
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def refused(process: ProcessStats, status: int, refusal: HttpRefusal, text: str) -> web.Response:
    """Refuse a request, and count why."""
    process.http_refused[refusal] += 1
    return problem(status, text)


async def in_slices(work: Generator[None, None, T]) -> T:
    """Do work slice by slice, and let the event loop do other work after each slice."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


async def write(response: web.StreamResponse, part: bytes) -> None:
    """Write a part of an answer as soon as the client has read most of what was written before.

    Raises:
        TimeoutError: the client reads too slowly.
    """
    async with asyncio.timeout(connections.TIMEOUT):
        await response.write(part)


async def send(request: web.Request, body: bytes, content_type: str) -> web.StreamResponse:
    """Answer with a long body, in parts.

    Raises:
        TimeoutError: the client reads too slowly.
    """
    response = web.StreamResponse(headers={"Content-Type": content_type})
    response.content_length = len(body)
    await response.prepare(request)
    for start in range(0, len(body) if request.method != "HEAD" else 0, PART):
        await write(response, body[start : start + PART])
        await asyncio.sleep(0)
    return response
