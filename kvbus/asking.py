"""A running bus, asked over HTTP, and in words what comes in place of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from typing import Final

import aiohttp

from kvbus.errors import ExitCode, KvbusError

MAX_BYTES: Final = 64 * 1024 * 1024
"""Of one answer."""


class NoAnswerError(KvbusError):
    """There is no bus at the address, or it does not answer as one. ``listens``: something accepts connections."""

    exit_code = ExitCode.CANNOT_BIND

    def __init__(self, text: str, *, listens: bool = True) -> None:
        super().__init__(text)
        self.listens = listens


def base_url(address: str) -> str:
    """Return the URL that an address stands for: ``HOST:PORT`` or ``http://HOST:PORT/``.

    Raises:
        ValueError: it is neither.
    """
    url = (address if "://" in address else f"http://{address}").rstrip("/")
    if not url.startswith(("http://", "https://")) or not url.partition("://")[2]:
        raise ValueError(f"{address!r} is not HOST:PORT or http://HOST:PORT")
    return url


@contextlib.asynccontextmanager
async def asking(url: str, seconds: float) -> AsyncIterator[None]:
    """Ask the bus at a URL, and read its answers, within this time.

    Raises:
        NoAnswerError: it does not answer in time, or with something else.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise NoAnswerError(f"{url} does not answer within {seconds:g} s") from error
    except aiohttp.ClientConnectorError as error:
        code = error.os_error.errno
        why = os.strerror(code) if code and code > 0 else error.os_error.strerror or str(error)
        raise NoAnswerError(f"no bus answers at {url} ({why.lower()})", listens=False) from error
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
        why = " ".join(str(error).split())[:80] or type(error).__name__
        raise NoAnswerError(f"what answers at {url} is no kvbus ({why})") from error


async def get(session: aiohttp.ClientSession, url: str) -> tuple[bytes, Mapping[str, str]]:
    """Return what a URL answers, and its headers; for use in `asking`."""
    async with session.get(url, allow_redirects=False) as response:
        if response.status != 200:
            raise ValueError(f"GET {response.url.path}: {response.status}")
        body = bytearray()
        async for part in response.content.iter_chunked(65_536):
            body += part
            if len(body) > MAX_BYTES:
                raise ValueError(f"GET {response.url.path}: more than {MAX_BYTES} bytes")
        return bytes(body), response.headers
