"""HTTP requests of a command to a running bus, and error messages that say why a request failed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver

from kvbus.common.errors import ExitCode, KvbusError

MAX_BYTES: Final = 64 * 1024 * 1024
"""Maximum size in bytes of one HTTP answer of a bus."""


class NoAnswerError(KvbusError):
    """The program at an address does not answer as a bus does, or no program is there.

    ``listens`` is false if no program accepts connections at the address.
    """

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, text: str, *, listens: bool = True) -> None:
        super().__init__(text)
        self.listens = listens


@dataclass(frozen=True, slots=True)
class Login:
    """The credentials with which a command logs in to a bus, and the certificate authorities that it trusts.

    Attributes:
        token: bearer token; empty for no token.
        context: TLS context for https; None to trust the system's certificate authorities.
    """

    token: str = field(default="", repr=False)
    context: ssl.SSLContext | None = None

    def session(self, resolver: AbstractResolver | None = None) -> aiohttp.ClientSession:
        """Return an HTTP session that sends the token with every request. Use the session for one bus only."""
        connector = aiohttp.TCPConnector(resolver=resolver, ssl=self.context or True)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return aiohttp.ClientSession(connector=connector, headers=headers)


def base_url(address: str) -> str:
    """Return the base URL of a bus from an address, which is ``HOST:PORT`` or a URL such as ``http://HOST:PORT/``.

    Raises:
        ValueError: the address has neither form.
    """
    url = (address if "://" in address else f"http://{address}").rstrip("/")
    try:
        parts = urlsplit(url)
        known = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number or is out of range
        known = False
    if not known:
        raise ValueError(f"{address!r} is not HOST:PORT or http://HOST:PORT")
    return url


@contextlib.asynccontextmanager
async def asking(url: str, seconds: float) -> AsyncIterator[None]:
    """Limit the HTTP requests in the block to ``seconds`` seconds, and turn their errors into `NoAnswerError`.

    ``url`` is the base URL of the bus.

    Raises:
        NoAnswerError: the bus does not answer in time, or the answer is not from a bus.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise NoAnswerError(f"{url} does not answer within {seconds:g} s") from error
    except aiohttp.ClientConnectorCertificateError as error:
        why = getattr(error.certificate_error, "verify_message", "") or str(error.certificate_error)
        raise NoAnswerError(
            f"the certificate of {url} is not valid ({why}); name its authority with --http-ca"
        ) from error
    except aiohttp.ClientConnectorError as error:
        code = error.os_error.errno
        why = os.strerror(code) if code and code > 0 else error.os_error.strerror or str(error)
        raise NoAnswerError(f"no bus answers at {url} ({why.lower()})", listens=False) from error
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
        why = " ".join(str(error).split())[:80] or type(error).__name__
        raise NoAnswerError(f"the server at {url} is not a kvbus ({why})") from error


async def get(session: aiohttp.ClientSession, url: str) -> tuple[bytes, Mapping[str, str]]:
    """Request a URL of a bus, and return the body and the headers of the answer.

    Call this inside `asking`, which turns the errors into `NoAnswerError`.
    """
    async with session.get(url, allow_redirects=False) as response:
        if response.status == 403:
            raise NoAnswerError(f"{response.url.path}: {(await response.json())['error']}")
        if response.status != 200:
            raise ValueError(f"GET {response.url.path}: {response.status}")
        body = bytearray()
        async for part in response.content.iter_chunked(65_536):
            body += part
            if len(body) > MAX_BYTES:
                raise ValueError(f"GET {response.url.path}: more than {MAX_BYTES} bytes")
        return bytes(body), response.headers
