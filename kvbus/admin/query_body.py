"""The body of ``POST /query``: what may be asked, and how much of it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from kvbus.admin.query_hashes import Names
from kvbus.admin.query_text import PIECE, List, Texts
from kvbus.core.types import MAX_TOKEN_ID

MAX_BODY: Final = 1024 * 1024
"""Bytes of a request."""

MAX_QUERIES: Final = 256
"""Questions of one request."""

MAX_ITEMS: Final = 131_072
"""Token ids and hashes of one request."""

MAX_HASHES: Final = 16_384
"""Hashes of one question."""

TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]


class Query(msgspec.Struct, forbid_unknown_fields=True):
    """One question: ``tokens``, or ``hashes`` in the engine's own numbers or texts, from the prompt's beginning on.

    Tokens are ids, or bytes (base64 in JSON): little-endian integers of 32 bits, which are read faster.
    """

    tokens: list[TokenId] | bytes | None = None
    hashes: list[int | str] | None = None
    lora: int | str | None = None
    salt: str | None = None


class Request(Query, forbid_unknown_fields=True):
    """One question, or a list of them and none beside it.

    ``analytics`` asks for those of every source, beside questions or alone.
    """

    queries: list[Query] | None = None
    analytics: bool = False


class RefusedError(Exception):
    """A request gets no answer: its status, its outcome, and a sentence."""

    def __init__(self, status: int, outcome: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.outcome = outcome


MSGPACK: Final = "application/msgpack"
"""Content type of a body that is msgpack and not JSON: there packed tokens are bytes as they are."""

_of_json: Final = msgspec.json.Decoder(Request).decode
_of_msgpack: Final = msgspec.msgpack.Decoder(Request).decode


class Question(NamedTuple):
    """A query, and what its hashes stand for if that is known, in pieces."""

    query: Query
    names: list[Names] | None = None

    @property
    def items(self) -> int:
        """Its token ids or hashes."""
        if self.names is not None:
            return sum(each.size for each in self.names)
        query = self.query
        return len(query.tokens) // 4 if isinstance(query.tokens, bytes) else len(query.tokens or query.hashes or ())


def questions(body: bytes, texts: Texts, *, msgpack: bool) -> Generator[None, None, tuple[list[Question], bool]]:
    """What :func:`read` finds in a body, some pieces at a time."""
    lists: Sequence[List] = []
    if len(body) > PIECE and not msgpack:
        body, lists = yield from texts.in_pieces(body, MAX_QUERIES)
    return read(body, lists, msgpack=msgpack)


def read(body: bytes, lists: Sequence[List] = (), *, msgpack: bool = False) -> tuple[list[Question], bool]:
    """The questions of a body, from which :class:`Texts` may have taken the lists of token ids and hashes.

    Beside them whether it asks for analytics.

    Raises:
        RefusedError: it is none, or asks too much at once.
    """
    try:
        request = _of_msgpack(body) if msgpack else _of_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = str(error).partition(" (byte")[0] if lists else error  # the place is another one without the lists
        raise RefusedError(400, "invalid", f'{text}; for example {{"tokens": [1, 2, 3]}}') from error
    queries: Sequence[Query] = [request] if request.queries is None else request.queries
    if request == Request(analytics=True):
        queries = []
    if request.queries is not None and request != Request(queries=request.queries, analytics=request.analytics):
        raise RefusedError(400, "invalid", "queries stands alone: what else is asked belongs into its entries")
    if len(queries) > MAX_QUERIES:
        raise RefusedError(413, "too_large", f"{len(queries)} questions; {MAX_QUERIES} are allowed in a request")
    asked = [_whole(query, lists) for query in queries]
    for number, question in enumerate(asked):
        query = question.query
        if (query.tokens is None) == (query.hashes is None):
            raise RefusedError(400, "invalid", f"question {number}: either tokens or hashes")
        if query.hashes is not None and (query.lora, query.salt) != (None, None):
            text = f"question {number}: hashes are of one adapter and salt; leave lora and salt out"
            raise RefusedError(400, "invalid", text)
        if query.hashes is not None and question.items > MAX_HASHES:
            text = f"question {number}: {question.items} hashes; {MAX_HASHES} are allowed"
            raise RefusedError(413, "too_large", text)
        if isinstance(query.tokens, bytes) and len(query.tokens) % 4:
            text = f"question {number}: packed tokens are four bytes each, and there are {len(query.tokens)}"
            raise RefusedError(400, "invalid", text)
    items = sum(question.items for question in asked)
    if items > MAX_ITEMS:
        raise RefusedError(413, "too_large", f"{items} token ids and hashes; {MAX_ITEMS} are allowed in a request")
    return asked, request.analytics


def _whole(query: Query, lists: Sequence[List]) -> Question:
    """A query with the lists for which numbers stand in it."""
    names = None
    if lists and isinstance(query.tokens, list):
        ids = lists[query.tokens[0]]
        query.tokens = ids if isinstance(ids, bytes) else None
    if lists and query.hashes is not None:
        found = lists[int(query.hashes[0])]
        names = found if isinstance(found, list) else None
    return Question(query, names)
