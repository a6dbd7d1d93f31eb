"""Who may ask an index: programs on this machine, and whoever shows a bearer token. The files may change meanwhile."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from kvbus.common.errors import ConfigError, Problem
from kvbus.config.endpoints import host_name, is_loopback
from kvbus.http.credentials import Tls, read_tls
from kvbus.http.tokens import Token, find, read_tokens
from kvbus.transport.curve import KeyFileError
from kvbus.transport.tls_files import TlsFileError

log = logging.getLogger("kvbus.index")

RELOAD_SECONDS: Final = 10.0
"""Time between two looks at the files."""

_FORWARDING: Final = frozenset({"forwarded", "via", "x-real-ip"})
_OWN_PAGE: Final = frozenset({"same-origin", "none"})


class Access:
    """The rule for questions, which tell what users wrote: the bus's rule for token ids.

    Args:
        tokens_file: the bearer tokens, one a line, as for the bus; None: no token is accepted.
        certificate: the port's certificate; None: no TLS.
        key: its private key.

    Raises:
        ConfigError: a file cannot be used.
    """

    def __init__(
        self, tokens_file: Path | None = None, certificate: Path | None = None, key: Path | None = None
    ) -> None:
        self._tokens_file: Final = tokens_file
        self._certificate: Final = certificate
        self._key: Final = key
        self._tokens: Sequence[Token] = ()
        self._tls: Tls | None = None
        problems = self.read()
        if problems:
            raise ConfigError(problems)
        self.context: Final[ssl.SSLContext | None] = None if self._tls is None else self._tls.context

    def read(self) -> list[Problem]:
        """Read the files again. What cannot be read keeps its former content, and is a problem."""
        problems = []
        if self._tokens_file is not None:
            try:
                self._tokens = read_tokens(self._tokens_file)
            except KeyFileError as error:
                problems.append(Problem("--tokens-file", str(error), str(self._tokens_file)))
        if self._certificate is not None and self._key is not None:
            try:
                before, self._tls = self._tls, read_tls(self._certificate, self._key, self._tls)
                if before is not None and before is not self._tls and self.context is not None:
                    self.context.load_cert_chain(self._certificate, self._key)  # for connections from now on
            except TlsFileError as error:
                problems.append(Problem("--tls-certificate", str(error), str(self._certificate)))
        return problems

    async def follow(self) -> None:
        """Read the files again and again. Log a problem once."""
        logged: list[str] = []
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            found = [str(problem) for problem in self.read()]
            for text in found:
                if text not in logged:
                    log.error("the former content stays in force: %s", text)
            logged = found

    def refusal(self, request: web.Request) -> str | None:
        """Return why a request may not ask; None if it may."""
        given = request.headers.getall("Authorization", [])
        if given and self._tokens:
            scheme, _, token = given[0].partition(" ")
            if len(given) == 1 and scheme.lower() == "bearer":
                found = find(tuple(self._tokens), token.strip())
                if found is not None and found.content:
                    return None
                if found is not None:
                    return "the token has no right to it"
            return "the bearer token is unknown: a line of --tokens-file lets a token in"
        return _not_local(request)


def _not_local(request: web.Request) -> str | None:
    """Return why a request is not one of this machine's own; None if it is."""
    transport = request.transport
    for name in ("peername", "sockname"):  # both ends: a service mesh's proxy sends everybody's requests from 127.0.0.6
        end = None if transport is None else transport.get_extra_info(name)
        if not end or not is_loopback(end[0]):
            return "only loopback may ask, or a bearer token of --tokens-file: ask on the index's own host"
    for name in (each.lower() for each in request.headers):
        if name in _FORWARDING or name.startswith("x-forwarded-"):
            return "a proxy passed the request on, so it is not known who asks: ask without the proxy"
    hosts = request.headers.getall("Host", [])
    absolute = urlsplit(request.raw_path).netloc
    if len(hosts) != 1 or not _is_local(hosts[0]) or (absolute and not _is_local(absolute)):
        return "the Host header has to be localhost, 127.0.0.1 or [::1]"
    origins = request.headers.getall("Origin", [])
    ours = f"{request.scheme}://{hosts[0]}".lower()
    sites = request.headers.getall("Sec-Fetch-Site", [])
    if any(origin.lower() != ours for origin in origins) or not _OWN_PAGE.issuperset(sites):
        return "a page of another site asks: enter the index's URL in the browser yourself"
    return None


def _is_local(authority: str) -> bool:
    name = host_name(authority)
    return name is not None and is_loopback(name)
