"""The credentials of the HTTP port: the tokens of callers and its own TLS, read from the files of a configuration."""

from __future__ import annotations

import hashlib
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from kvbus.common.errors import ConfigError, Problem
from kvbus.config import Config
from kvbus.config.problems import example_at
from kvbus.http.tokens import Token, read_tokens
from kvbus.transport.curve import KeyFileError
from kvbus.transport.tls_files import TlsFileError, read_text, show


@dataclass(frozen=True, slots=True)
class Tls:
    """The TLS of new connections.

    Attributes:
        context: for the server's side.
        content: hash of the files that it was made of.
    """

    context: ssl.SSLContext = field(compare=False, repr=False)
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Credentials:
    """All credentials at one moment."""

    tokens: tuple[Token, ...] = ()
    tls: Tls | None = None


def read_credentials(config: Config) -> Credentials:
    """Read all files.

    Raises:
        ConfigError: kvbus cannot use a file. It names all such files, and never quotes one.
    """
    credentials, problems = read_again(config, Credentials())
    if problems:
        raise ConfigError(problems)
    return credentials


def read_again(config: Config, before: Credentials) -> tuple[Credentials, list[Problem]]:
    """Read all files. A file that cannot be used leaves in force what held before.

    Tokens and TLS are apart: a bad certificate must not keep a token alive that somebody takes out.
    """
    problems: list[Problem] = []
    tokens, tls = before.tokens, before.tls
    if config.http_tokens_file is not None:
        try:
            tokens = read_tokens(config.http_tokens_file)
        except KeyFileError as error:
            problems.append(_problem("http_tokens_file", error, config))
    certificate, key = config.http_tls_certificate_file, config.http_tls_key_file
    if certificate is not None and key is not None:
        try:
            tls = read_tls(certificate, key, before.tls)
        except TlsFileError as error:
            problems.append(_problem(error.key, error, config))
    return Credentials(tokens, tls), problems


def read_tls(certificate: Path, key: Path, before: Tls | None = None) -> Tls:
    """Read a certificate and its key, and return ``before`` if the files are the same.

    kvbus never changes a context, so a bad file spoils none that is in use.

    Raises:
        TlsFileError: a file cannot be used; its ``key`` is that of the configuration.
    """
    texts = [read_text("http_tls_certificate_file", certificate), read_text("http_tls_key_file", key, secret=True)]
    content = hashlib.sha256("\0".join(texts).encode()).digest()
    if before is not None and before.content == content:
        return before
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    show(context, "http_tls_certificate_file", certificate, key)
    return Tls(context, content)


def _problem(key: str, error: KeyFileError, config: Config) -> Problem:
    return Problem(key, str(error), str(getattr(config, key)), example_at((key,)))
