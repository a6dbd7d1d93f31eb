"""Connect to NATS servers, send requests to JetStream, and explain why a server refuses kvbus."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import ssl
from collections.abc import AsyncIterator
from typing import Any, Final

from nats import errors
from nats.aio.client import Client
from nats.js.errors import APIError

from kvbus.common.tasks import close_within
from kvbus.parts.log.contract import UNREACHABLE, UnavailableError
from kvbus.parts.log.location import NatsLocation, probed, reason_of
from kvbus.transport.tls_files import TlsFileError

ATTEMPT: Final = 2.0
"""Timeout in seconds of connecting to a server. It is also the timeout of one request to JetStream."""

STOP: Final = 2.0
"""Timeout in seconds of closing a connection."""

WRONG_SEQUENCE: Final = {10070, 10071}
"""JetStream's error codes for a message whose header does not name the newest message of its subject."""

NO_MESSAGE: Final = 10037
"""JetStream's error code if a stream does not have the requested message."""

CODES: Final = {
    10014: (UNREACHABLE, "kvbus's consumer no longer exists at the NATS server"),
    10023: ("stream_full", "the server has no room"),
    10039: ("denied", "the account has no JetStream"),
    10047: ("stream_full", "the server has no room"),
    10059: ("stream_missing", "there is no such stream"),
    10077: ("stream_full", "the stream is full, and refuses new messages"),
}
"""By JetStream's error code: the reason for kvbus's counters, and a sentence for the operator."""

SAYS: Final = {
    "authorization violation": ("authentication_failed", "authentication failed: no such user, or its password"),
    "user authentication": ("authentication_failed", "authentication failed: no such user, or its password"),
    "permissions violation": ("denied", "no permission allows this"),
    "secure connection not available": ("tls_failed", "no TLS: the server has none at this port"),
    "certificate required": ("client_certificate_refused", "the server requires a certificate from kvbus"),
}
"""Maps a phrase in the text of a server's error (in lower case) to the reason for kvbus's counters and to a sentence
for the operator.
"""


class Link:
    """The connection of one writer or one reader to a NATS server.

    If the connection is lost, the next request opens another one.

    Args:
        location: the servers. The TLS and password files are read for each connection.
    """

    def __init__(self, location: NatsLocation) -> None:
        self._location = location
        self._client: Client | None = None
        self._violation: Exception | None = None
        """The permission error that the server has reported since the last request began; None without such an error.

        The server reports it separately from the request, and never answers the request.
        """

    async def client(self) -> Client:
        """Return the client of the present connection. If there is no connection, connect to one of the servers first.

        Raises:
            UnavailableError: no server can be reached.
        """
        if self._client is not None and self._client.is_connected:
            return self._client
        await self.close()
        async with self.translated_errors(ATTEMPT):
            servers = self._location.servers.split(",")
            for server in random.sample(servers, len(servers)):
                try:
                    return await self._connected(server)
                except (OSError, errors.NoServersError) as error:
                    failed = error
            raise failed

    async def _connected(self, server: str) -> Client:
        tls, password = self._location.tls(), self._location.password()
        secured = tls is None

        class Handshake(ssl.SSLObject):
            """A TLS handshake that notes its success in ``secured``. kvbus sends its password only after that.

            The check is needed because nats-py continues without TLS if the server does not offer it.
            """

            def do_handshake(self) -> None:
                nonlocal secured
                super().do_handshake()
                secured = True

        def secret() -> str:
            if not secured:
                raise errors.SecureConnWantedError
            return password or ""

        if tls is not None:
            tls.sslobject_class = Handshake
        client = self._client = Client()
        try:
            await client.connect(
                f"nats://{server}",
                error_cb=self._heard,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=int(ATTEMPT),
                tls=tls,
                user=self._location.keys.username,
                password=secret if password is not None else None,
            )
        except BaseException:
            await self._end(client)
            raise
        if self._client is client and client.is_connected and secured:
            return client
        await self._end(client)  # `close` may have been called while connecting; nats-py ignores that
        raise errors.Error("the server ended the connection") if secured else errors.SecureConnWantedError

    async def _heard(self, error: Exception) -> None:
        if refused(error).reason != UNREACHABLE:
            self._violation = error

    @contextlib.asynccontextmanager
    async def translated_errors(self, seconds: float) -> AsyncIterator[None]:
        """Run the body of an ``async with`` statement for up to ``seconds``, and convert errors of nats-py.

        Each error becomes the UnavailableError of kvbus's logs.

        Raises:
            UnavailableError: the server refuses a request, has failed, or has not answered within ``seconds``; or a TLS
                or password file cannot be used.
        """
        self._violation = None
        try:
            async with asyncio.timeout(seconds):
                yield
            if self._violation is not None:
                raise self._violation
        except (errors.Error, TlsFileError, OSError, TimeoutError) as error:
            found = refused(self._violation or error)
            if found.reason == UNREACHABLE:
                found = await probed(self._location, "nats", greets=True) or found
            raise found from error

    async def ask(self, subject: str, data: bytes, seconds: float, headers: dict[str, str] | None = None) -> Any:
        """Send a request to a JetStream subject, and return the decoded answer.

        Raises:
            APIError: JetStream refuses the request.
            UnavailableError: JetStream does not answer.
        """
        client = await self.client()
        try:
            async with self.translated_errors(seconds):
                answer = await client.request(subject, data, timeout=seconds, headers=headers)
        except UnavailableError as error:
            if isinstance(error.__cause__, TimeoutError):
                # Close the connection, so that the next request connects to another server. This server may be cut off
                # from the servers that can answer.
                await self.close()
            raise
        content = json.loads(answer.data)
        if "error" in content:
            raise APIError.from_error(content["error"])
        return content

    async def api(self, subject: str, seconds: float = ATTEMPT, **request: Any) -> Any:
        """Send a request to JetStream's API, and return the decoded answer.

        Raises:
            UnavailableError: JetStream does not answer, or refuses the request.
        """
        try:
            return await self.ask(f"$JS.API.{subject}", json.dumps(request).encode(), seconds)
        except APIError as error:
            raise refused(error) from error

    async def close(self) -> None:
        """Close the connection. Errors are ignored, because the connection is not needed any more."""
        client, self._client = self._client, None
        if client is not None:
            await self._end(client)

    @staticmethod
    async def _end(client: Client) -> None:
        """Close a connection. If the server does not read for too long, closing continues in the background."""
        await close_within(client.close(), STOP)


def refused(error: BaseException) -> UnavailableError:
    """Return an UnavailableError for an error of JetStream or of nats-py, with the reason if kvbus knows the error."""
    return reason_of(error, "nats", _known) or UnavailableError(f"{type(error).__name__}: {error}")


def _known(error: BaseException) -> tuple[str, str] | None:
    if isinstance(error, APIError) and error.err_code in CODES:
        reason, sentence = CODES[error.err_code]
        return reason, f"{sentence} ({error.description})"
    return next((said for words, said in SAYS.items() if words in str(error).lower()), None)
