"""Bearer tokens: how one is made, the file with the names and hashes of those that hold, and the look-up in it.

A line is ``NAME sha256:HASH``, and ``status`` behind it keeps content from that token. A token has 256 random bits, so
nobody finds one that fits a hash: a slow hash, which passwords need because they can be guessed, would only give
strangers a way to keep the CPU busy.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import stat
from pathlib import Path
from typing import Final, NamedTuple

from kvbus.transport.curve import KeyFileError, read_file

PREFIX: Final = "kvbus_"
"""Begins every token, so that scanners for secrets find one that leaks."""

MAX_TOKENS: Final = 256
"""Lines of a file. Each request with a token is compared with all of them."""

STATUS: Final = "status"

_is_name: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}").fullmatch
_is_hash: Final = re.compile(r"sha256:([0-9a-f]{64})").fullmatch
_FORM: Final = "NAME sha256:HASH, as `kvbus token` prints it"


class Token(NamedTuple):
    """A token that holds: whose it is, its hash, and whether it may read content."""

    name: str
    digest: bytes
    content: bool

    def __repr__(self) -> str:
        return f"Token({self.name!r})"


def new_token() -> str:
    """Make a token."""
    return PREFIX + secrets.token_urlsafe(32)


def is_name(text: str) -> bool:
    """Whether a line may begin with it."""
    return _is_name(text) is not None


def line_of(name: str, token: str, *, content: bool) -> str:
    """Return a token's line of the file."""
    return f"{name} sha256:{_digest(token).hex()}{'' if content else f' {STATUS}'}"


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Read a file of tokens. A name may be there twice, while its token is replaced.

    Raises:
        KeyFileError: the file cannot be used; nothing of it is quoted.
    """
    text, mode = read_file(path)
    if mode & stat.S_IWOTH:
        raise KeyFileError(f"others may write to it (mode {mode:04o}), and so let themselves in: chmod o-w")
    if not text:  # what an editor leaves for a moment must not throw everybody out
        raise KeyFileError("is empty; a comment in it (#) says that nobody is meant to be let in")
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
    """Return the token that holds, None if there is none. The time it takes depends on neither."""
    digest, found = _digest(given), None
    for token in tokens:
        if hmac.compare_digest(token.digest, digest):
            found = token
    return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
