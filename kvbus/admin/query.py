"""``POST /query``: which sources hold the longest prefix of a prompt, by token ids or by block hashes.

Whoever learns which prompts are cached learns something of what users wrote, so that the rule for token ids holds here.
All questions together take at most half of the event loop's time; each limit has an answer and an outcome of
``kvbus_query_requests_total``.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from typing import Annotated, Final, Protocol, TypeVar

import msgspec
from aiohttp import web

from kvbus.admin.connection_limits import CONNECTION_TIMEOUT
from kvbus.admin.content_log import current
from kvbus.admin.query_index import QueryIndex
from kvbus.config import Config
from kvbus.core.blocks.prefix_index import Match, PrefixIndex
from kvbus.core.blocks.prefix_labels import packed
from kvbus.core.relay import Relay
from kvbus.core.sequencing.settings import State
from kvbus.core.source import Source
from kvbus.core.stats import ProcessStats
from kvbus.core.types import DEVICE_MEDIUM, MAX_HASH_BYTES, MAX_TOKEN_ID, Hash

MAX_BODY: Final = 1024 * 1024
"""Bytes of a request."""

MAX_QUERIES: Final = 256
"""Questions of one request."""

MAX_ITEMS: Final = 131_072
"""Token ids and hashes of one request."""

MAX_HASHES: Final = 16_384
"""Hashes of one question, and look-ups by hash in one go."""

MAX_WAITING: Final = 16
"""Requests that are read, wait for their turn, or are answered. One more gets 429."""

BURST: Final = 0.01
"""Seconds that work may be ahead of its share of the event loop's time."""

PIECE: Final = 32 * 1024
"""Bytes of a list of token ids that are read in one go: 0.15 ms. A shorter body is read whole."""

BUILD_TIMEOUT: Final = 2.0
"""Seconds that a request waits for the tree to be built."""


T = TypeVar("T")

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
    """One question, or a list of them and nothing else."""

    queries: list[Query] | None = None


class Held(msgspec.Struct):
    """What one source holds of a prompt.

    ``blocks`` are those from the beginning on without a hole, ``tiers`` how many of them are on which medium.
    ``partial`` and any ``state`` but ``live`` say that the source may hold more, or less by now.
    """

    source: str
    rank: int
    worker: str
    blocks: int
    tokens: int
    block_size: int
    tiers: dict[str, int]
    state: State
    partial: bool


class Result(msgspec.Struct):
    """The answer to one question: the sources that hold anything of it, the best first."""

    matches: list[Held]


class Unsure(msgspec.Struct):
    """A source whose blocks may not all be known."""

    source: str
    rank: int
    state: State
    partial: bool


class Answer(msgspec.Struct):
    """One result for each question, and the sources that may hold more than they are found with."""

    results: list[Result]
    incomplete: list[Unsure]


class Observed(Protocol):
    """The state that is asked for."""

    config: Config
    relay: Relay
    process: ProcessStats


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
_ids: Final = msgspec.json.Decoder(list[TokenId]).decode
_TOKENS: Final = b'"tokens"'
_list: Final = re.compile(_TOKENS + rb"[ \t\r\n]*:[ \t\r\n]*\[").match
_is_number: Final = re.compile(r"-?[0-9]{1,20}|0[xX][0-9a-fA-F]{1,16}").fullmatch
_is_hex: Final = re.compile(rf"(?:[0-9a-fA-F]{{2}}){{1,{MAX_HASH_BYTES}}}").fullmatch
_encode: Final = msgspec.json.Encoder().encode


class Queries:
    """Answers questions."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._index = QueryIndex(observed.relay, observed.process)
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._share_used_until = 0.0

    async def close(self) -> None:
        """Drop the tree."""
        await self._index.close()

    async def handle(self, request: web.Request) -> web.Response:
        """Answer a request."""
        process = self._observed.process
        self._waiting += 1
        try:
            answer = await self._answer(request)
        except RefusedError as refused:
            process.queries[refused.outcome] += 1
            retry = {"Retry-After": "1"} if refused.outcome in {"busy", "building"} else None
            return web.json_response({"error": str(refused)}, status=refused.status, headers=retry)
        finally:
            self._waiting -= 1
        process.queries["answered"] += 1
        current.get().add(sum(held.blocks for result in answer.results for held in result.matches), 0)
        return web.Response(body=_encode(answer), content_type="application/json")

    async def _answer(self, request: web.Request) -> Answer:
        if self._waiting > MAX_WAITING:
            raise RefusedError(429, "busy", f"{MAX_WAITING} requests are being answered; ask again")
        body, msgpack = await _body(request), request.content_type == MSGPACK
        lists: list[bytes] = []
        if len(body) > PIECE and not msgpack:
            body, lists = await self._in_turns(in_pieces(body))
        async with self._paced():
            queries = read(body, lists, msgpack=msgpack)
        index = await self._index.ask(BUILD_TIMEOUT)
        if index is None:
            text = f"the tree of prefixes is being built, {self._index.unread} sources are left; ask again"
            raise RefusedError(503, "building", text)
        results = []
        for number, query in enumerate(queries):
            try:
                held = await self._held(index, query)
            except ValueError as error:
                raise RefusedError(400, "invalid", f"question {number}: {error}") from error
            results.append(Result(sorted(held, key=_worth, reverse=True)))
        await asyncio.sleep(0)  # the loop's other work first
        return Answer(results, self._incomplete())

    @contextlib.asynccontextmanager
    async def _paced(self) -> AsyncIterator[None]:
        """Wait for the turn of a piece of work, so that all of them leave the loop half of its time."""
        async with self._turn:
            await asyncio.sleep(max(0.0, self._share_used_until - BURST - time.perf_counter()))
            begun = time.perf_counter()
            try:
                yield
            finally:
                now = time.perf_counter()
                self._share_used_until = max(begun, self._share_used_until) + 2 * (now - begun)

    async def _in_turns(self, work: Generator[None, None, T]) -> T:
        """The result of work that is done in small pieces."""
        while True:
            async with self._paced():
                try:
                    next(work)
                except StopIteration as done:
                    return done.value  # type: ignore[no-any-return]

    async def _held(self, index: PrefixIndex[int], query: Query) -> list[Held]:
        """What each source holds."""
        if query.tokens is not None:
            async with self._paced():
                matches = index.matches(query.tokens, lora=query.lora, salt=query.salt)
                found = [(self._source(slot), match) for slot, match in matches.items()]
            async with self._paced():
                return [self._named(source, match) for source, match in found]
        held: list[Held] = []
        hashes = query.hashes or []
        for names in names_of(hashes):
            slots, at_once = index.workers, max(1, MAX_HASHES // max(1, len(hashes)))
            for first in range(0, len(slots), at_once):
                async with self._paced():
                    few = [(slot, index.named(slot, names)) for slot in slots[first : first + at_once]]
                    held += [self._named(self._source(slot), match) for slot, match in few if match is not None]
        return held

    def _source(self, slot: int) -> Source:
        """The source of a slot, which may be another one in the loop's next turn."""
        return self._observed.relay.sources[slot]

    def _named(self, source: Source, match: Match) -> Held:
        return Held(
            source.spec.label,
            source.rank,
            self._observed.config.worker,
            match.blocks,
            match.blocks * match.block_size,
            match.block_size,
            match.tiers,
            source.state,
            source.partial,
        )

    def _incomplete(self) -> list[Unsure]:
        return [
            Unsure(source.spec.label, source.rank, source.state, source.partial)
            for source in self._observed.relay.present
            if source.partial or source.state is not State.LIVE
        ]


def _worth(held: Held) -> tuple[int, int, int]:
    return held.tokens, held.blocks, held.tiers.get(DEVICE_MEDIUM, 0)


async def _body(request: web.Request) -> bytes:
    if "Content-Encoding" in request.headers:
        raise RefusedError(400, "invalid", "the body has a Content-Encoding; send it as it is")
    try:
        async with asyncio.timeout(CONNECTION_TIMEOUT):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        text = f"a body of more than {MAX_BODY} bytes; ask in several requests"
        raise RefusedError(413, "too_large", text) from error
    except TimeoutError as error:
        raise RefusedError(408, "slow", f"no whole body within {CONNECTION_TIMEOUT:g} s") from error
    except (web.RequestPayloadError, ConnectionError) as error:
        raise RefusedError(400, "invalid", "the body broke off") from error


def in_pieces(body: bytes) -> Generator[None, None, tuple[bytes, list[bytes]]]:
    """Take the token ids out of a JSON body, a piece at a time: they are packed, and ``[n]`` stands for the n-th list.

    What looks like a list of token ids is one: ``"`` is escaped inside a JSON string. A list is its pieces with commas
    between them, each with an id at least. Any other body comes back as it is, and is read whole.
    """
    rest: list[bytes] = []
    lists: list[bytes] = []
    done, at = 0, body.find(_TOKENS)
    while at >= 0:
        found = _list(body, at)
        at += len(_TOKENS)
        if found is not None:
            at = found.end()
            rest.append(b"%b%d" % (body[done:at], len(lists)))
            end, to = body.find(b"]", at), -1
            if end < 0 or len(lists) == MAX_QUERIES:
                return body, []
            pieces: list[bytes] = []
            while to < end:
                to = body.find(b",", at + PIECE, end)
                to = end if to < 0 else to
                try:
                    ids = _ids(b"[%b]" % body[at:to])
                except (msgspec.DecodeError, UnicodeDecodeError):
                    return body, []
                if not ids and (pieces or to != end):
                    return body, []
                pieces.append(packed(ids))
                at = to + 1
                yield
            lists.append(b"".join(pieces))
            done = at = end
        at = body.find(_TOKENS, at)
    rest.append(body[done:])
    short = b"".join(rest)
    # an escape may hide a list's name
    return (body, []) if b"\\" in short else (short, lists)


def read(body: bytes, lists: Sequence[bytes] = (), *, msgpack: bool = False) -> list[Query]:
    """The questions of a body, from which :func:`in_pieces` may have taken the lists of token ids.

    Raises:
        RefusedError: it is none, or asks too much at once.
    """
    try:
        request = _of_msgpack(body) if msgpack else _of_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = str(error).partition(" (byte")[0] if lists else error  # the place is another one without the lists
        raise RefusedError(400, "invalid", f'{text}; for example {{"tokens": [1, 2, 3]}}') from error
    queries: Sequence[Query] = [request] if request.queries is None else request.queries
    if request.queries is not None and request != Request(queries=request.queries):
        raise RefusedError(400, "invalid", "queries stands alone: what else is asked belongs into its entries")
    if len(queries) > MAX_QUERIES:
        raise RefusedError(413, "too_large", f"{len(queries)} questions; {MAX_QUERIES} are allowed in a request")
    for number, query in enumerate(queries):
        if lists and isinstance(query.tokens, list):
            query.tokens = lists[query.tokens[0]]
        if (query.tokens is None) == (query.hashes is None):
            raise RefusedError(400, "invalid", f"question {number}: either tokens or hashes")
        if query.hashes is not None and (query.lora, query.salt) != (None, None):
            text = f"question {number}: hashes are of one adapter and salt; leave lora and salt out"
            raise RefusedError(400, "invalid", text)
        if query.hashes is not None and len(query.hashes) > MAX_HASHES:
            text = f"question {number}: {len(query.hashes)} hashes; {MAX_HASHES} are allowed"
            raise RefusedError(413, "too_large", text)
        if isinstance(query.tokens, bytes) and len(query.tokens) % 4:
            text = f"question {number}: packed tokens are four bytes each, and there are {len(query.tokens)}"
            raise RefusedError(400, "invalid", text)
    items = sum(_items(query) for query in queries)
    if items > MAX_ITEMS:
        raise RefusedError(413, "too_large", f"{items} token ids and hashes; {MAX_ITEMS} are allowed in a request")
    return list(queries)


def _items(query: Query) -> int:
    return len(query.tokens) // 4 if isinstance(query.tokens, bytes) else len(query.tokens or query.hashes or ())


def names_of(hashes: Sequence[int | str]) -> Iterator[list[Hash]]:
    """The names that hashes may stand for: all integers, or all byte strings in hexadecimal.

    Raises:
        ValueError: one of them is neither, or they are not of one kind.
    """
    numbers, texts = [_number(each) for each in hashes], [_bytes(each) for each in hashes]
    whole = [kind for kind in (numbers, texts) if None not in kind]
    if not whole:
        odd = next((at for at, pair in enumerate(zip(numbers, texts, strict=True)) if pair == (None, None)), None)
        if odd is None:
            raise ValueError("hashes are all integers, or all byte strings in hexadecimal")
        raise ValueError(f"hashes[{odd}] is neither an integer of 64 bits nor a byte string in hexadecimal")
    return iter(whole)  # type: ignore[arg-type]


def _number(text: int | str) -> int | None:
    if isinstance(text, str):
        if _is_number(text) is None:
            return None
        text = int(text, 0 if text[:2] in {"0x", "0X"} else 10)
    return text if -(2**63) <= text < 2**64 else None


def _bytes(text: int | str) -> bytes | None:
    return bytes.fromhex(text) if isinstance(text, str) and _is_hex(text) else None
