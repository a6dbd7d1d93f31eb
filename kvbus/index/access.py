"""Access rules for the HTTP port of an index.

Programs on the same machine have access, and so do clients with a bearer token. The files with the tokens and the TLS
certificate may change while the index runs.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Final

from aiohttp import web

from kvbus.common.errors import ConfigError, Problem
from kvbus.core.stats import HttpRefusal
from kvbus.http.access import Access, Caller
from kvbus.http.credentials import Credentials, read_tls, read_tokens
from kvbus.transport.curve import KeyFileError
from kvbus.transport.tls_files import TlsFileError

log = logging.getLogger("kvbus.index")

RELOAD_SECONDS: Final = 10.0
"""Seconds after which the index reads the files with the tokens and the certificate again."""

_HOW: Final = {
    HttpRefusal.PEER: "only programs on the index's own host may ask, or callers with a bearer token of --tokens-file",
    HttpRefusal.FORWARDED: "a proxy forwarded the request, so its sender is unknown: ask without the proxy",
    HttpRefusal.HOST: "the Host header has to be localhost, 127.0.0.1 or [::1]",
    HttpRefusal.CROSS_SITE: "a page of another site sent the request: enter the index's URL in the browser yourself",
    HttpRefusal.TOKEN: "the bearer token is unknown: add it to the file of --tokens-file",
    HttpRefusal.RIGHTS: "the bearer token has no right to ask",
}


class IndexAccess:
    """The rule that decides which HTTP requests may ask the index a question.

    A bus protects token ids by the same rule, because a question contains a user's prompt.

    Args:
        tokens_file: a file with one bearer token per line, as for a bus. None means that no token is accepted.
        certificate: the file with the TLS certificate of the HTTP port. None means that the port has no TLS.
        key: the file with the private key of the certificate.

    Raises:
        ConfigError: one of the files cannot be used.
    """

    def __init__(
        self, tokens_file: Path | None = None, certificate: Path | None = None, key: Path | None = None
    ) -> None:
        self._tokens_file: Final = tokens_file
        self._certificate: Final = certificate
        self._key: Final = key
        self._rule: Final = Access(())
        problems = self.read()
        if problems:
            raise ConfigError(problems)

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context for new connections; None if the port has no TLS."""
        tls = self._rule.credentials.tls
        return None if tls is None else tls.context

    def read(self) -> list[Problem]:
        """Read the files with tokens and certificate again. Return the problems of files that cannot be used.

        For such a file, the content that was read before stays in effect.
        """
        problems = []
        tokens, tls = self._rule.credentials.tokens, self._rule.credentials.tls
        if self._tokens_file is not None:
            try:
                tokens = read_tokens(self._tokens_file)
            except KeyFileError as error:
                problems.append(Problem("--tokens-file", str(error), str(self._tokens_file)))
        if self._certificate is not None and self._key is not None:
            try:
                tls = read_tls(self._certificate, self._key, tls)
            except TlsFileError as error:
                problems.append(Problem("--tls-certificate", str(error), str(self._certificate)))
        self._rule.credentials = Credentials(tokens, tls)
        return problems

    async def follow(self) -> None:
        """Read the files with tokens and certificate again every :data:`RELOAD_SECONDS`, for ever.

        A problem is logged when it is first found.
        """
        logged: list[str] = []
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            found = [str(problem) for problem in self.read()]
            for text in found:
                if text not in logged:
                    log.error("the index still uses the former content of a file: %s", text)
            logged = found

    def refusal(self, request: web.Request) -> str | None:
        """Return the reason why an HTTP request is refused; None if it is allowed."""
        caller = self._rule.caller(request, content=True)
        return None if isinstance(caller, Caller) else _HOW[caller]
