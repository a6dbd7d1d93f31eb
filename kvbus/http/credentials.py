"""The credentials of the HTTP port, read from files: the clients' tokens, and the server's TLS certificate."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from kvbus.common.errors import ConfigError, Problem
from kvbus.config import Config
from kvbus.config.problems import example_at
from kvbus.transport.curve import KeyFileError, read_file
from kvbus.transport.tls_files import TlsFileError, read_text, show

PREFIX: Final = "kvbus_"
"""Prefix of every token, by which secret scanners recognise a leaked token."""

MAX_TOKENS: Final = 256
"""Maximum number of tokens in ``http_tokens_file``. The token of each request is compared with all of them."""

STATUS: Final = "status"

_is_name: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}").fullmatch
_is_hash: Final = re.compile(r"sha256:([0-9a-f]{64})").fullmatch
_FORM: Final = "NAME sha256:HASH, as `kvbus token` prints it"


class Token(NamedTuple):
    """A valid token: the name of its owner, its hash, and whether its owner may read blocks and batches."""

    name: str
    digest: bytes
    content: bool

    def __repr__(self) -> str:
        return f"Token({self.name!r})"


def new_token() -> str:
    """Generate a random token."""
    return PREFIX + secrets.token_urlsafe(32)


def is_name(text: str) -> bool:
    """Return whether a text is a valid name of a token's owner.

    Each line of ``http_tokens_file`` begins with such a name.
    """
    return _is_name(text) is not None


def line_of(name: str, token: str, *, content: bool) -> str:
    """Return the line of ``http_tokens_file`` that makes a token valid.

    Args:
        name: the name of the token's owner.
        token: the token, of which the line contains only the hash.
        content: whether the owner may read blocks and batches, besides the status.
    """
    return f"{name} sha256:{_digest(token).hex()}{'' if content else f' {STATUS}'}"


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Read a file of tokens. A name may have two lines, so that its owner can change to a new token.

    Raises:
        KeyFileError: the file cannot be used. The error contains no part of the file.
    """
    text, mode = read_file(path)
    if mode & stat.S_IWOTH:
        raise KeyFileError(f"other users may write to it (mode {mode:04o}), and so add their own token: chmod o-w")
    # An editor may leave the file empty for a moment, which must not revoke every token.
    if not text:
        raise KeyFileError("is empty; if no token is to be valid, put a comment line (#) into it")
    found: dict[bytes, Token] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        digest = _is_hash(words[1]) if len(words) > 1 else None
        if digest is None or not is_name(words[0]) or words[2:] not in ([], [STATUS]):
            raise KeyFileError(f"line {number} is not {_FORM}")
        token = Token(words[0], bytes.fromhex(digest[1]), content=not words[2:])
        if token.digest in found:
            raise KeyFileError(f"line {number} has the hash of a line above it")
        found[token.digest] = token
    if len(found) > MAX_TOKENS:
        raise KeyFileError(f"holds more than {MAX_TOKENS} tokens")
    return tuple(found.values())


def find(tokens: tuple[Token, ...], given: str) -> Token | None:
    """Return the valid token that equals the given text; None if there is none.

    The search takes the same time for every text and every result, so its duration reveals nothing about the tokens.
    """
    digest, found = _digest(given), None
    for token in tokens:
        if hmac.compare_digest(token.digest, digest):
            found = token
    return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class Tls:
    """The TLS settings of new connections.

    Attributes:
        context: the server's TLS context.
        content: hash of the certificate and key files. If it has changed, the context is made again.
    """

    context: ssl.SSLContext = field(compare=False, repr=False)
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The valid tokens and the TLS settings at one moment."""

    tokens: tuple[Token, ...] = ()
    tls: Tls | None = None


def read_credentials(config: Config) -> Credentials:
    """Read the tokens file and the certificate files of a configuration.

    Raises:
        ConfigError: kvbus cannot use a file. The error lists every such file, and contains no part of it.
    """
    credentials, problems = read_again(config, Credentials())
    if problems:
        raise ConfigError(problems)
    return credentials


def read_again(config: Config, before: Credentials) -> tuple[Credentials, list[Problem]]:
    """Read the tokens file and the certificate files again. If a file is not usable, its previous content stays valid.

    Tokens and TLS files are read independently. So a removed token becomes invalid even if the certificate is not
    usable.

    Returns:
        The new credentials, and the problems with the files.
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
    """Read a certificate and its private key. Return ``before`` if the files have not changed.

    kvbus never changes an existing TLS context, so an unusable file does not affect the current context.

    Raises:
        TlsFileError: a file cannot be used. The attribute ``key`` of the error is the configuration key of the file.
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
    return Problem(key, str(error), str(getattr(config, key)), example_at(Config, (key,)))
