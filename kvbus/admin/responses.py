"""Answers of the HTTP server that are made at once: JSON, problems and refusals."""

from __future__ import annotations

import msgspec
from aiohttp import web

from kvbus.core.stats import HttpRefusal, ProcessStats


def as_json(data: object) -> web.Response:
    """Answer with data."""
    return web.Response(body=msgspec.json.encode(data), content_type="application/json")


def problem(status: int, text: str) -> web.Response:
    """Say what is wrong with a request."""
    return web.json_response({"error": text}, status=status)


def refused(process: ProcessStats, status: int, refusal: HttpRefusal, text: str) -> web.Response:
    """Refuse a request, and count why."""
    process.http_refused[refusal] += 1
    return problem(status, text)
