"""``POST /query``: which sources hold the longest prefix of a prompt, by token ids or by block hashes; and analytics.

Whoever learns which prompts are cached learns something of what users wrote, so that the rule for token ids holds here.
Its work is done in pieces (:mod:`~kvbus.admin.pace`); each limit has an answer and an outcome of
``kvbus_query_requests_total``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from kvbus.admin.content_log import current
from kvbus.admin.pace import Pace, next_turn
from kvbus.admin.query_body import MAX_BODY, MSGPACK, Query, Question, RefusedError, questions
from kvbus.admin.query_hashes import Names, names_of, readings
from kvbus.admin.query_index import SLICE, QueryIndex
from kvbus.admin.views import Analytics, analytics_entry
from kvbus.config import Config
from kvbus.core.blocks.prefix_index import Match, PrefixIndex
from kvbus.core.blocks.prefix_labels import Tokens, packed
from kvbus.core.relay import Relay
from kvbus.core.sequencing.settings import State
from kvbus.core.stats import ProcessStats
from kvbus.core.types import DEVICE_MEDIUM
from kvbus.telemetry.readings import read_analytics
from kvbus.transport.http.connection_limits import CONNECTION_TIMEOUT
from kvbus.transport.http.messages import Request, Response, problem

MAX_WAITING: Final = 16
"""Requests that had their first turn and are read, wait for a further one, or are answered. One more gets 429."""

BUILD_TIMEOUT: Final = 2.0
"""Seconds that a request waits for the tree to be built."""


class Held(msgspec.Struct, gc=False):
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


class Standing(msgspec.Struct, gc=False):
    """A source, and whether all of its blocks are known."""

    source: str
    rank: int
    state: State
    partial: bool


Unsure = dict[tuple[str, int], Standing]
"""By name and rank, the sources that may hold more than they are found with."""


class Cache(msgspec.Struct):
    """A source, and its blocks over time.

    ``partial`` and any ``state`` but ``live`` say that some of them are not known.
    """

    source: str
    rank: int
    worker: str
    state: State
    partial: bool
    blocks: Analytics


class Answer(msgspec.Struct, omit_defaults=True):
    """One result for each question, the sources that may hold more than they are found with, and analytics if asked."""

    results: list[Result]
    incomplete: list[Standing]
    analytics: list[Cache] | None = None


class Observed(Protocol):
    """The state that is asked for."""

    config: Config
    relay: Relay
    process: ProcessStats


_encode: Final = msgspec.json.Encoder().encode


class Queries:
    """Answers questions.

    Args:
        observed: what they are about.
        pace: when which piece of work has its turn.
    """

    def __init__(self, observed: Observed, pace: Pace) -> None:
        self._observed = observed
        self._pace = pace
        self._index = QueryIndex(observed.relay, observed.process, pace)
        self._waiting = 0

    async def close(self) -> None:
        """Drop the tree."""
        await self._index.close()

    async def handle(self, request: Request) -> Response:
        """Answer a request."""
        process = self._observed.process
        self._waiting += 1
        try:
            answer = await self._answer(request)
        except RefusedError as refused:
            process.queries[refused.outcome] += 1
            retry = {"Retry-After": "1"} if refused.outcome in {"busy", "building"} else None
            return problem(refused.status, str(refused), retry)
        except asyncio.CancelledError:
            process.queries["gone"] += 1
            raise
        finally:
            self._waiting -= 1
        process.queries["answered"] += 1
        current.get().add(sum(held.blocks for result in answer.results for held in result.matches), 0)
        return Response(_encode(answer))

    async def _answer(self, request: Request) -> Answer:
        if self._waiting > MAX_WAITING:
            raise RefusedError(429, "busy", f"{MAX_WAITING} requests are being answered; ask again")
        body, msgpack = await _body(request), request.content_type == MSGPACK
        queries, analytics = await self._pace.in_turns(questions(body, self._index.texts, msgpack=msgpack))
        if analytics and not self._observed.config.analytics:
            raise RefusedError(400, "invalid", "analytics are off; the configuration has to say analytics: true")
        unsure: Unsure = {}
        results = await self._results(queries, unsure) if queries else []
        caches = None
        if analytics or not queries:
            async with self._pace.piece():
                if not queries:
                    self._held_now({}, unsure)
                caches = self._analytics() if analytics else None
        await next_turn()
        return Answer(results, list(unsure.values()), caches)

    async def _results(self, queries: Sequence[Question], unsure: Unsure) -> list[Result]:
        index = await self._index.ask(BUILD_TIMEOUT)
        if index is None:
            text = f"the tree of prefixes is being built, {self._index.unread} sources are left; ask again"
            raise RefusedError(503, "building", text)
        results = []
        for number, question in enumerate(queries):
            try:
                held = await self._pace.in_turns(self._held(index, question, unsure))
            except ValueError as error:
                raise RefusedError(400, "invalid", f"question {number}: {error}") from error
            results.append(Result(sorted(held, key=_worth, reverse=True)))
        return results

    def _held(self, index: PrefixIndex[int], question: Question, unsure: Unsure) -> Generator[None, None, list[Held]]:
        """What each source holds, beside what was known of it in the turn in which its blocks were looked up."""
        query = question.query
        if query.tokens is not None:
            return (yield from self._held_by_tokens(index, query.tokens, query, unsure))
        names = (yield from names_of(query.hashes or [])) if question.names is None else question.names
        return (yield from self._held_by_name(index, names, unsure))

    def _held_by_tokens(
        self, index: PrefixIndex[int], tokens: Tokens, query: Query, unsure: Unsure
    ) -> Generator[None, None, list[Held]]:
        if not isinstance(tokens, bytes):
            tokens = packed(tokens)
        read = yield from index.read_ahead(tokens, lora=query.lora, salt=query.salt)
        return self._held_now(index.matches(tokens, lora=query.lora, salt=query.salt, read=read), unsure)

    def _held_by_name(
        self, index: PrefixIndex[int], names: Sequence[Names], unsure: Unsure
    ) -> Generator[None, None, list[Held]]:
        """The same by the engines' names: for sources that say the same ones together, for others some at a time."""
        held: list[Held] = []
        for prompt in readings(names):
            yield from index.read_ahead_named(prompt)
            matches, others = index.named(prompt)
            held += self._held_now(matches, unsure)
            begun = time.perf_counter()
            for slot in others:
                if time.perf_counter() - begun >= SLICE:
                    yield
                    begun = time.perf_counter()
                match = index.named_by(slot, prompt)
                held += self._held_of([slot], {} if match is None else {slot: match}, unsure)
        return held

    def _held_now(self, matches: dict[int, Match], unsure: Unsure) -> list[Held]:
        """What sources hold, in the turn in which it was looked up; those of all that may hold more are noted."""
        return self._held_of(range(len(self._observed.relay.sources)), matches, unsure)

    def _held_of(self, slots: Sequence[int], matches: dict[int, Match], unsure: Unsure) -> list[Held]:
        sources, worker = self._observed.relay.sources, self._observed.config.worker
        held = []
        for slot in slots:
            source = sources[slot]
            label, rank, partial, state = source.spec.label, source.rank, source.partial, source.state
            if (partial or state is not State.LIVE) and not source.gone:
                unsure[label, rank] = Standing(label, rank, state, partial)
            if slot in matches:
                blocks, size, tiers = matches[slot]
                held.append(Held(label, rank, worker, blocks, blocks * size, size, tiers, state, partial))
        return held

    def _analytics(self) -> list[Cache]:
        return [
            Cache(source.spec.label, source.rank, self._observed.config.worker, source.state, source.partial, blocks)
            for source, blocks in (
                (self._observed.relay.sources[slot], analytics_entry(reading))
                for slot, reading in read_analytics(self._observed.relay).items()
            )
        ]


def _worth(held: Held) -> tuple[int, int, int]:
    return held.tokens, held.blocks, held.tiers.get(DEVICE_MEDIUM, 0)


async def _body(request: Request) -> bytes:
    if "content-encoding" in request.headers:
        raise RefusedError(400, "invalid", "the body has a Content-Encoding; send it as it is")
    if request.is_whole:
        body, _ = await request.part()
        return _within(body)
    parts, more = bytearray(), True
    try:
        async with asyncio.timeout(CONNECTION_TIMEOUT):
            while more:
                part, more = await request.part()
                parts += part
                _within(parts)
    except TimeoutError as error:
        raise RefusedError(408, "slow", f"no whole body within {CONNECTION_TIMEOUT:g} s") from error
    return bytes(parts)


B = TypeVar("B", bytes, bytearray)


def _within(body: B) -> B:
    if len(body) > MAX_BODY:
        raise RefusedError(413, "too_large", f"more than {MAX_BODY} bytes; ask in several requests")
    return body
