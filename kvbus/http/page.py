"""The status page: three files that a browser gets from kvbus alone, and what they show at once."""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

from aiohttp import web

from kvbus.config import Config
from kvbus.telemetry.process_rows import kvbus_version

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
"""Nothing from elsewhere, nothing inline, in nobody's frame."""


async def status_page(request: web.Request) -> web.Response:
    """Answer with one of the page's files."""
    name, kind = FILES[request.path]
    text = (resources.files(__package__) / "static" / name).read_bytes()
    return web.Response(body=text, headers={"Content-Type": f"{kind}; charset=utf-8", **HEADERS})


def about(config: Config) -> dict[str, Any]:
    """Return the version and the configuration in force. It names files with keys, and holds no secret."""
    return {"version": kvbus_version(), "config": config.to_dict()}
