"""Answers of the HTTP server: JSON, long texts, problems, refusals and the files of a page."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from importlib import resources
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from kvbus.config import Config
from kvbus.core.stats import HttpRefusal, ProcessStats
from kvbus.http import connections
from kvbus.telemetry.table import kvbus_version

PART: Final = 256 * 1024
"""Bytes written to a connection in one iteration of the event loop; this takes 0.2 ms."""

T = TypeVar("T")


def as_json(data: object) -> web.Response:
    """Return a JSON response."""
    return web.Response(body=msgspec.json.encode(data), content_type="application/json")


def plain(text: str, status: int = 200) -> web.Response:
    """Return a plain-text response."""
    return web.Response(text=text, status=status)


def problem(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a JSON response that says what is wrong with a request."""
    body = msgspec.json.encode({"error": text})
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def refused(process: ProcessStats, status: int, refusal: HttpRefusal, text: str) -> web.Response:
    """Return the response for a refused request, and count the reason."""
    process.http_refused[refusal] += 1
    return problem(status, text)


async def in_slices(work: Generator[None, None, T]) -> T:
    """Run a generator one step per iteration of the event loop, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


async def write(response: web.StreamResponse, part: bytes) -> None:
    """Write a part of an answer, and wait until the client has read most of the earlier parts.

    Raises:
        TimeoutError: the client reads too slowly.
    """
    async with asyncio.timeout(connections.TIMEOUT):
        await response.write(part)


async def send(request: web.Request, body: bytes, content_type: str) -> web.StreamResponse:
    """Send a long body in parts.

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


FILES: Final = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The page loads nothing external and nothing inline, and no other page may frame it."""


async def status_page(request: web.Request) -> web.Response:
    """Return one of the status page's files."""
    return page_file("kvbus.http", request.path)


def page_file(package: str, path: str) -> web.Response:
    """Return a file of a page, from the folder ``static`` of a package."""
    name, kind = FILES[path]
    text = (resources.files(package) / "static" / name).read_bytes()
    return web.Response(body=text, headers={"Content-Type": f"{kind}; charset=utf-8", **HEADERS})


def about(config: Config) -> dict[str, Any]:
    """Return the version and the configuration in force. It has the paths of key files, but no secret."""
    return {"version": kvbus_version(), "config": config.to_dict()}
