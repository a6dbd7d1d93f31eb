"""Questions to the index: the body of a ``POST /query`` request, its limits, and the parsing of its block hashes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from kvbus.core.types import MAX_HASH_BYTES, MAX_TOKEN_ID, Hash

MAX_BODY_BYTES: Final = 1024 * 1024
"""Maximum size in bytes of the body of a ``POST /query`` request."""

MAX_QUERIES: Final = 256
"""Maximum number of questions in a ``POST /query`` request."""

MAX_ITEMS: Final = 131_072
"""Maximum total number of token ids and hashes in the questions of a ``POST /query`` request."""

MAX_HASHES: Final = 16_384
"""Maximum number of block hashes in a question."""

MSGPACK: Final = "application/msgpack"
"""Content type of a ``POST /query`` request whose body is msgpack. Any other body is read as JSON."""

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]


class Query(msgspec.Struct, forbid_unknown_fields=True):
    """One question: which sources hold the blocks of a prompt?

    The prompt is given by its ``tokens``, or by the ``hashes`` of its blocks from the first block on. ``tokens`` are
    token ids, or bytes (base64 in JSON) that contain token ids as little-endian integers of 32 bits.
    """

    tokens: list[TokenId] | bytes | None = None
    hashes: list[int | str] | None = None
    lora: int | str | None = None
    salt: str | None = None

    @property
    def items(self) -> int:
        """Number of token ids or hashes in this question."""
        return len(self.tokens) // 4 if isinstance(self.tokens, bytes) else len(self.tokens or self.hashes or ())


class Request(Query, forbid_unknown_fields=True):
    """The body of a request: one question, or several questions in ``queries``.

    With ``queries``, no other field is allowed.
    """

    queries: list[Query] | None = None


class RefusedError(Exception):
    """An HTTP request to the index is refused.

    ``status`` is the HTTP status, and ``outcome`` the label for the metrics. The text gives the reason in a sentence.
    """

    def __init__(self, status: int, outcome: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.outcome = outcome


_of_json: Final = msgspec.json.Decoder(Request).decode
_of_msgpack: Final = msgspec.msgpack.Decoder(Request).decode


def read(body: bytes, *, msgpack: bool = False) -> Sequence[Query]:
    """Parse the body of a ``POST /query`` request. Return its questions.

    Raises:
        RefusedError: the body is malformed, or exceeds a limit.
    """
    try:
        request = _of_msgpack(body) if msgpack else _of_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid(f'{error}; for example {{"tokens": [1, 2, 3]}}') from error
    if request.queries is None:
        queries: Sequence[Query] = [request]
    elif request == Request(queries=request.queries):
        queries = request.queries
    else:
        raise _invalid("queries must be the only field: put tokens, hashes, lora and salt into its entries")
    if len(queries) > MAX_QUERIES:
        raise _too_large(f"{len(queries)} questions; {MAX_QUERIES} are allowed in a request")
    for number, query in enumerate(queries):
        _check(query, f"question {number}")
    items = sum(query.items for query in queries)
    if items > MAX_ITEMS:
        raise _too_large(f"{items} token ids and hashes; {MAX_ITEMS} are allowed in a request")
    return queries


def _check(query: Query, name: str) -> None:
    if (query.tokens is None) == (query.hashes is None):
        raise _invalid(f"{name}: either tokens or hashes")
    if query.hashes is not None and (query.lora, query.salt) != (None, None):
        raise _invalid(f"{name}: block hashes include the adapter and the salt; leave lora and salt out")
    if query.hashes is not None and len(query.hashes) > MAX_HASHES:
        raise _too_large(f"{name}: {len(query.hashes)} hashes; {MAX_HASHES} are allowed")
    if isinstance(query.tokens, bytes) and len(query.tokens) % 4:
        raise _invalid(f"{name}: packed tokens have four bytes each, and there are {len(query.tokens)} bytes")


def _invalid(text: str) -> RefusedError:
    return RefusedError(400, "invalid", text)


def _too_large(text: str) -> RefusedError:
    return RefusedError(413, "too_large", text)


# -- hashes

_is_number: Final = re.compile(r"-?[0-9]{1,20}|0[xX][0-9a-fA-F]{1,16}").fullmatch
_is_hex: Final = re.compile(rf"(?:[0-9a-fA-F]{{2}}){{1,{MAX_HASH_BYTES}}}").fullmatch


def readings(hashes: Sequence[int | str]) -> list[list[Hash]]:
    """Parse the block hashes of a question. Return each possible interpretation of them as a list of hashes.

    The hashes may be integers of 64 bits, or bytes in hexadecimal. If every text consists of decimal digits, both
    interpretations are possible.

    Raises:
        ValueError: an entry is neither an integer nor hexadecimal, or there is no interpretation that fits all entries.
    """
    if not hashes:
        return []
    ways: list[list[Hash | None]] = [[_number(each) for each in hashes], [_bytes(each) for each in hashes]]
    found = [[each for each in way if each is not None] for way in ways if None not in way]
    if not found:
        for position, pair in enumerate(zip(*ways, strict=True)):
            if pair == (None, None):
                raise ValueError(
                    f"hashes[{position}] is neither an integer of 64 bits nor a byte string in hexadecimal"
                )
        raise ValueError("hashes must be either all integers or all byte strings in hexadecimal")
    return found


def _number(given: int | str) -> int | None:
    if isinstance(given, str):
        if not _is_number(given):
            return None
        given = int(given, 16 if given[:2] in {"0x", "0X"} else 10)
    return given if -(2**63) <= given < 2**64 else None


def _bytes(given: int | str) -> bytes | None:
    return bytes.fromhex(given) if isinstance(given, str) and _is_hex(given) else None
