"""The status page: three files that a browser gets from kvbus alone, and what they show at once."""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

from aiohttp import web

from kvbus.config import Config
from kvbus.telemetry.table import kvbus_version

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
    """Answer with one of the status page's files."""
    return page_file("kvbus.http", request.path)


def page_file(package: str, path: str) -> web.Response:
    """Return the file of a page, from the folder ``static`` of a package."""
    name, kind = FILES[path]
    text = (resources.files(package) / "static" / name).read_bytes()
    return web.Response(body=text, headers={"Content-Type": f"{kind}; charset=utf-8", **HEADERS})


def about(config: Config) -> dict[str, Any]:
    """Return the version and the configuration in force. It names files with keys, and holds no secret."""
    return {"version": kvbus_version(), "config": config.to_dict()}
