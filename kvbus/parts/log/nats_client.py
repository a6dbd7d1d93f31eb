"""NATS as the log finds it: a connection that is made again, why a server refuses, and the answers of JetStream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any, Final

from nats import errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.js.errors import APIError
from nats.protocol import parser

from kvbus.common.tasks import finish
from kvbus.parts.log.contract import UNREACHABLE, UnavailableError
from kvbus.parts.log.place import NatsPlace
from kvbus.parts.log.refusals import causes, probed, refusal
from kvbus.transport.tls_files import TlsFileError

ATTEMPT: Final = 2.0
"""Seconds that a server has to connect, or to answer once."""

STOP: Final = 2.0
"""Seconds that a connection has to close."""

WRONG_SEQUENCE: Final = {10070, 10071}
"""JetStream's code for a message before which something else came."""

CODES: Final = {
    10014: (UNREACHABLE, "the consumer has gone"),
    10023: ("stream_full", "the server has no room"),
    10039: ("denied", "the account has no JetStream"),
    10047: ("stream_full", "the server has no room"),
    10059: ("stream_missing", "there is no such stream"),
    10077: ("stream_full", "the stream is full, and discards what is new"),
}
"""By JetStream's code of the error: the reason, and the same as a sentence."""

SAYS: Final = {
    "authorization violation": ("authentication_failed", "authentication failed: no such user, or its password"),
    "user authentication": ("authentication_failed", "authentication failed: no such user, or its password"),
    "permissions violation": ("denied", "no permission allows this"),
    "secure connection not available": ("tls_failed", "no TLS: the server has none at this port"),
    "certificate required": ("client_certificate_refused", "the server wants a certificate of kvbus's own"),
}
"""By what an error says, in small letters."""


parser.MSG_RE = re.compile(rb"\AMSG +([^ \n]+) +([^ \n]+) +(([^ \n]+) +)?(\d+)\r\n")
parser.HMSG_RE = re.compile(rb"\AHMSG +([^ \n]+) +([^ \n]+) +(([^ \n]+) +)?(\d+) +(\d+)\r\n")
"""The library's own patterns take a form feed in a subject for its end, and then it closes the connection."""


class _Client(Client):
    """One that says nothing of kvbus to a server without TLS, where TLS is wanted."""

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        """Take a message whatever its publisher has put into its subject and headers.

        The library ends its reading where it cannot decode them. So one publisher would stop every reader.
        """
        try:
            await super()._process_msg(sid, subject, reply, data, headers)
        except (ValueError, IndexError):
            shown = subject.decode(errors="backslashreplace").encode()
            await super()._process_msg(sid, shown, reply, data, b"")

    def _connect_command(self) -> bytes:
        if self.options.get("tls") is not None and not self._server_info.get("tls_required"):
            raise errors.SecureConnWantedError
        return super()._connect_command()

    def drop(self) -> None:
        """End the connection at once.

        Its own close first sends what it has, and may wait for ever until it can. With TLS it waits for the server's
        farewell, and the socket below stays open as long.
        """
        if isinstance(self._transport, TcpTransport) and self._transport:
            self._transport._io_writer.transport.abort()  # type: ignore[union-attr] # noqa: SLF001 - it offers no more


class Link:
    """A connection for one turn, or one reader, which is made again when it was lost.

    Args:
        place: where the servers are; files are read for each connection.
    """

    def __init__(self, place: NatsPlace) -> None:
        self._place = place
        self._client: _Client | None = None
        self._violation: Exception | None = None
        """What was not allowed: the server says so by the way, and then does not answer."""

    async def client(self) -> _Client:
        """The connection.

        Raises:
            UnavailableError: there is none.
        """
        if self._client is not None and self._client.is_connected:
            return self._client
        await self.close()
        async with self.said(ATTEMPT):
            tls, password = self._place.tls(), self._place.password()
            client = self._client = _Client()
            try:
                await client.connect(
                    [f"nats://{server}" for server in self._place.servers.split(",")],
                    error_cb=self._heard,
                    allow_reconnect=False,
                    connect_timeout=int(ATTEMPT),
                    tls=tls,
                    user=self._place.keys.username,
                    password=password,
                )
            finally:
                if self._client is not client:  # closed meanwhile: before there is a socket, its own close ends nothing
                    await self._end(client)
            if not client.is_connected:
                raise errors.Error("the server ended the connection")
        return client

    async def _heard(self, error: Exception) -> None:
        if _named(error).reason != UNREACHABLE:
            self._violation = error

    @contextlib.asynccontextmanager
    async def said(self, seconds: float) -> AsyncIterator[None]:
        """Give the server so long.

        Raises:
            UnavailableError: it has not done it.
        """
        self._violation = None
        try:
            async with asyncio.timeout(seconds):
                yield
            if self._violation is not None:
                raise self._violation
        except (errors.Error, TlsFileError, OSError, TimeoutError) as error:
            found = _named(self._violation or error)
            if found.reason == UNREACHABLE:
                found = await probed(self._place, "nats", greets=True) or found
            raise found from error

    async def ask(self, subject: str, data: bytes, seconds: float, headers: dict[str, str] | None = None) -> Any:
        """What JetStream answers.

        Raises:
            APIError: it does not do it.
            UnavailableError: it does not answer.
        """
        client = await self.client()
        try:
            async with self.said(seconds):
                answer = await client.request(subject, data, timeout=seconds, headers=headers)
        except UnavailableError as error:
            if isinstance(error.__cause__, TimeoutError):
                await self.close()  # the server may be cut off from those that would answer: another one is next
            raise
        said = json.loads(answer.data)
        if "error" in said:
            raise APIError.from_error(said["error"])
        return said

    async def api(self, subject: str, seconds: float = ATTEMPT, **request: Any) -> Any:
        """What JetStream's API answers to a request.

        Raises:
            UnavailableError: it does not answer, or not with what was asked for.
        """
        try:
            return await self.ask(f"$JS.API.{subject}", json.dumps(request).encode(), seconds)
        except APIError as error:
            raise _named(error) from error

    async def close(self) -> None:
        """Close the connection. Whatever goes wrong, nobody needs it any more."""
        client, self._client = self._client, None
        if client is not None:
            await self._end(client)

    @staticmethod
    async def _end(client: _Client) -> None:
        try:
            await finish(client.close(), STOP)
        finally:
            client.drop()


def refused(error: APIError) -> UnavailableError:
    """An answer of JetStream in the words of the contract."""
    return _named(error)


def _named(error: BaseException) -> UnavailableError:
    for at in causes(error):
        found = refusal(at, "nats")
        if found is not None:
            return found
        if isinstance(at, APIError) and at.err_code in CODES:
            reason, sentence = CODES[at.err_code]
            return UnavailableError(f"{sentence} ({at.description})", reason)
        for words, (reason, sentence) in SAYS.items():
            if words in str(at).lower():
                return UnavailableError(sentence, reason)
    return UnavailableError(f"{type(error).__name__}: {error}")
