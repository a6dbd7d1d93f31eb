"""What the HTTP port knows callers by and shows of itself: tokens and TLS, read from the files of a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from kvbus.admin.tls import Tls, read_tls
from kvbus.admin.tokens import Token, read_tokens
from kvbus.common.errors import ConfigError, Problem
from kvbus.config import Config
from kvbus.config.problems import example_at
from kvbus.transport.curve import KeyFileError
from kvbus.transport.tls_files import TlsFileError


@dataclass(frozen=True, slots=True)
class Credentials:
    """Everything at one moment."""

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
    """Read all files, and keep what held before in place of what cannot be used now.

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


def _problem(key: str, error: KeyFileError, config: Config) -> Problem:
    return Problem(key, str(error), str(getattr(config, key)), example_at((key,)))
