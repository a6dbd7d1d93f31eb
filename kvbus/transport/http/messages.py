"""Requests and answers of an HTTP server of ours, on top of ASGI (https://asgi.readthedocs.io, HTTP 2.3).

ASGI is a dictionary and two functions; what handlers ask of it is here. A framework would do it too, for as many calls
as a whole question takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cached_property
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl

import msgspec

Scope = Any
"""A dictionary."""

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

JSON: Final = "application/json"


class Incoming(Protocol):
    """How far a request has come."""

    more_body: bool


class Request:
    """A request.

    Args:
        scope: of ASGI.
        receive: of ASGI.
        send: of ASGI.
        transport: the connection.
        target: of the request line, as it came.
        incoming: whether there is more of its body.

    Attributes:
        method: as ``GET``.
        path: decoded, without the query.
        scheme: ``http``, or ``https`` with TLS.
        version: of HTTP, ``1.1`` or ``1.0``.
        remote: the client's address; empty if it is gone.
        headers: by name in lower case, the values of header fields.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        transport: asyncio.Transport,
        target: bytes,
        incoming: Incoming,
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.scheme: str = scope["scheme"]
        self.version: str = scope["http_version"]
        self.remote: str = (scope["client"] or ("",))[0]
        self.headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            self.headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        self.transport = transport
        self.target = target
        self.send: Final = send
        self._query_string: bytes = scope["query_string"]
        self._receive = receive
        self._incoming = incoming

    @cached_property
    def query(self) -> Mapping[str, str]:
        """The query; of several values of a name the first."""
        pairs = parse_qsl(self._query_string.decode("latin-1"), keep_blank_values=True)
        return dict(reversed(pairs))

    def header(self, name: str) -> str:
        """The first value of a header field, whose name is in lower case; empty if there is none."""
        return self.headers.get(name, ("",))[0]

    @property
    def content_type(self) -> str:
        """The media type of the body, in lower case, without parameters."""
        return self.header("content-type").partition(";")[0].strip().lower()

    @property
    def is_whole(self) -> bool:
        """Whether all of the body is here, so that its next part is the last one."""
        return not self._incoming.more_body

    async def part(self) -> tuple[bytes, bool]:
        """The next part of the body, and whether there is more of it."""
        message = await self._receive()
        return message["body"], message["more_body"]


class Response:
    """An answer that the server sends when its handler has returned.

    Args:
        body: all of it, or its parts, whose length ``headers`` have to say.
        content_type: of the body.
        status: 200 by default.
        headers: further ones.
    """

    def __init__(
        self,
        body: bytes | AsyncIterator[bytes] = b"",
        content_type: str = JSON,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.body = body
        self.headers = {"content-type": content_type, **(headers or {})}
        if isinstance(body, bytes):
            self.headers["content-length"] = str(len(body))

    async def send(self, request: Request) -> None:
        """Send it."""
        await request.send(self.head())
        if isinstance(self.body, bytes):
            await request.send({"type": "http.response.body", "body": self.body})
            return
        if request.method != "HEAD":
            async for part in self.body:
                await request.send({"type": "http.response.body", "body": part, "more_body": True})
        await request.send({"type": "http.response.body"})

    def head(self) -> dict[str, Any]:
        """The message with which it begins."""
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
        return {"type": "http.response.start", "status": self.status, "headers": headers}


class Stream(Response):
    """An answer that its handler sends by itself, part by part."""

    def __init__(self, request: Request, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(content_type=content_type, headers=headers)
        del self.headers["content-length"]
        self._request = request

    async def begin(self) -> None:
        """Send the head."""
        await self._request.send(self.head())

    async def write(self, part: bytes) -> None:
        """Send a part, as soon as the client has read most of those before it."""
        await self._request.send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self) -> None:
        """Send the end."""
        await self._request.send({"type": "http.response.body"})

    async def send(self, request: Request) -> None:
        """Nothing is left to be sent."""


def problem(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """Say what is wrong with a request."""
    return Response(msgspec.json.encode({"error": text}), status=status, headers=headers)
