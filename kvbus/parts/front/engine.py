"""The engine behind the front: what a request becomes on the way to it, and its answer on the way back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
from aiohttp import ClientResponse, web
from aiohttp.typedefs import RawHeaders
from multidict import CIMultiDict
from yarl import URL

CONNECT: Final = 5.0
"""Seconds to reach the engine. How long it thinks is its own affair."""
IDLE: Final = 75.0
"""Seconds for the head of a request, between two parts of its body, and between two requests; longer than routers keep
idle connections."""
KEPT: Final = 2.0
"""Seconds for which an idle connection is used again. Engines close them after five, and a request that meets the end
of its connection would be lost."""
LINE: Final = 16_384
"""Bytes of a request line and of each header, in both directions."""
AUTOMATIC: Final = ("Accept", "Accept-Encoding", "Content-Type", "Date", "Server", "User-Agent")
"""Headers that aiohttp would add by itself."""

_ODD: Final = "surrogateescape"
_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers of one connection, not of what is said on it."""
_NEVER_NAMED: Final = frozenset({"content-length", "host"})
"""Headers that no Connection header can take off, because the message would be another one."""


class Engine:
    """Connections to one engine.

    Args:
        base: its base URL.
    """

    def __init__(self, base: str) -> None:
        self.base = base
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=AUTOMATIC,
            max_line_size=LINE,
            max_field_size=LINE,
        )

    async def ask(self, request: web.Request, *, without: frozenset[str] = frozenset()) -> ClientResponse:
        """Hand a request on, and return what the engine begins to answer.

        Args:
            request: the request; its body is read as fast as the engine takes it.
            without: further headers to leave out, in lower case.

        Raises:
            aiohttp.ClientError: the engine cannot be asked.
            ValueError: the request cannot be written to it.
        """
        headers = end_to_end(request.raw_headers)
        for name in ("expect", *without):  # the body is on its way already
            headers.popall(name, None)
        return await self._session.request(
            request.method,
            URL(self.base + request.raw_path, encoded=True),
            headers=headers,
            data=_parts(request.content, IDLE) if request.body_exists else None,
            allow_redirects=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()


class BodyError(Exception):
    """A client's body goes wrong in the middle. The text is for people."""


async def _parts(content: aiohttp.StreamReader, seconds: float) -> AsyncIterator[bytes]:
    """Yield a body as it comes.

    Raises:
        BodyError: nothing comes any more, which is also how a part shows that is none; or its client has gone.
    """
    while True:
        try:
            async with asyncio.timeout(seconds):
                part = await content.readany()
        except TimeoutError as error:
            raise BodyError(f"nothing of its rest has come for {seconds:g} s, or it is none") from error
        except aiohttp.ClientError as error:
            raise BodyError(str(error)) from error
        if not part:
            return
        yield part


def end_to_end(raw: RawHeaders) -> CIMultiDict[str]:
    """Return the headers, spelled as they came, without those of the connection they came on."""
    headers = [(name.decode("utf-8", _ODD), value.decode("utf-8", _ODD)) for name, value in raw]
    of_connection = ",".join(value for name, value in headers if name.lower() == "connection")
    off = _HOP | ({each.strip().lower() for each in of_connection.split(",")} - _NEVER_NAMED)
    spelled: dict[str, str] = {}  # aiohttp takes two spellings of one name for a change of its value
    return CIMultiDict(
        (spelled.setdefault(name.lower(), name), value) for name, value in headers if name.lower() not in off
    )


class Answer(web.StreamResponse):
    """An answer of the engine.

    Attributes:
        absent: headers that it has not, and that must not be added on the way.
    """

    def __init__(self, upstream: ClientResponse) -> None:
        headers = end_to_end(upstream.raw_headers)
        super().__init__(status=upstream.status, reason=upstream.reason, headers=headers)
        self.absent = [name for name in AUTOMATIC if name not in headers]


async def as_it_came(_request: web.Request, response: web.StreamResponse) -> None:
    """Take off what aiohttp has added to an answer of the engine, before it is sent."""
    if isinstance(response, Answer):
        for name in response.absent:
            response.headers.popall(name, None)
