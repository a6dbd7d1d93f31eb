"""The answers of the HTTP servers: JSON, long texts, errors, refusals, and the files of a page."""

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
"""Maximum number of bytes written to a connection in one iteration of the event loop; writing them takes 0.2 ms."""

T = TypeVar("T")


def as_json(data: object) -> web.Response:
    """Return a response with the data as JSON."""
    return web.Response(body=msgspec.json.encode(data), content_type="application/json")


def plain(text: str, status: int = 200) -> web.Response:
    """Return a response with a plain text."""
    return web.Response(text=text, status=status)


def problem(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return an error response: a JSON object with a sentence about what is wrong with the request."""
    body = msgspec.json.encode({"error": text})
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def refused(process: ProcessStats, status: int, refusal: HttpRefusal, text: str) -> web.Response:
    """Count a refused request by the reason, and return its error response, which contains the sentence ``text``."""
    process.http_refused[refusal] += 1
    return problem(status, text)


async def in_slices(work: Generator[None, None, T]) -> T:
    """Run a generator to its end, and return its result. The event loop runs other tasks after each step."""
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
    """Send a long body in parts, so that the event loop stays responsive.

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
"""Headers of a page.

They forbid the page to load anything from other servers and to run inline scripts. They also forbid other pages to show
it in a frame.
"""


async def status_page(request: web.Request) -> web.Response:
    """Return the file of the status page that the request's path names."""
    return page_file("kvbus.http", request.path)


def page_file(package: str, path: str) -> web.Response:
    """Return one file of a page.

    Args:
        package: the package whose folder ``static`` has the file.
        path: the requested path, which is a key of :data:`FILES`.
    """
    name, kind = FILES[path]
    text = (resources.files(package) / "static" / name).read_bytes()
    return web.Response(body=text, headers={"Content-Type": f"{kind}; charset=utf-8", **HEADERS})


def about(config: Config) -> dict[str, Any]:
    """Return kvbus's version and the current configuration. It contains the paths of key files, but no secret."""
    return {"version": kvbus_version(), "config": config.to_dict()}
