"""Follow the streams of engines, buses and logs, and find how much of a prompt each worker holds."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

import msgspec

from kvbus.client import (
    Curve,
    Lost,
    LostReason,
    Match,
    PrefixRouter,
    Status,
    Subscriber,
    Timing,
    Update,
    Worker,
)
from kvbus.common.tasks import end_tasks
from kvbus.core.types import DEVICE_MEDIUM
from kvbus.index.agreement import SAMPLE, Agreement
from kvbus.index.bus import Bus, Stream
from kvbus.index.questions import Query, readings
from kvbus.parts.log_router import LogRouter

log = logging.getLogger("kvbus.index")

_COMPARE_EVERY: Final = 10
"""The workers' block hashes are compared at every tenth check of the streams."""

_WATCH_SECONDS: Final = 1.0
"""Seconds between two checks of the streams. Each check looks for failed streams and for streams without token ids."""


class Standing(msgspec.Struct):
    """The condition of one source (one rank of a worker): whether the index knows all blocks that the source holds.

    Attributes:
        state: ``live``, or the reason why the source may hold other blocks than the index knows.
        partial: whether the source holds blocks that the index cannot learn about.
    """

    source: str
    rank: int
    worker: str
    state: str
    partial: bool

    @property
    def complete(self) -> bool:
        """Whether the index knows all blocks that the source holds."""
        return self.state == "live" and not self.partial


class HeldPrefix(msgspec.Struct):
    """The part of a prompt that one source holds.

    ``blocks`` is the number of the prompt's leading blocks that the source holds, up to the first block that it lacks.
    ``tiers`` is the number of these blocks on each medium.
    """

    source: str
    rank: int
    worker: str
    blocks: int
    tokens: int
    block_size: int
    tiers: dict[str, int]
    state: str
    partial: bool


class Result(msgspec.Struct):
    """The answer to one question: the sources that hold a part of the prompt, with the longest part first."""

    matches: list[HeldPrefix]


class Answer(msgspec.Struct):
    """The answer to a request, which may contain several questions about prompts.

    ``results`` has one result for each question. ``incomplete`` lists the sources that may hold blocks that the index
    does not know.
    """

    results: list[Result]
    incomplete: list[Standing]


class Follower:
    """Follow the streams of an index (of engines, buses and logs), and find the sources that hold a prompt's prefix.

    Args:
        streams: streams of engines, or of single outputs of buses, by name.
        buses: buses whose outputs and sources are read over HTTP.
        logs: readers of logs.
        copies: whether to count copies of a block; True for streams of engines, False for streams of buses.
        curve: CURVE keys for the streams and for the outputs of the buses.
        timing: timeouts of the subscribers.
        once: whether to read only the replay of each stream, once, without the live stream.
    """

    def __init__(
        self,
        streams: Mapping[str, Stream],
        buses: Sequence[Bus] = (),
        logs: Sequence[LogRouter] = (),
        *,
        copies: bool = False,
        curve: Curve | None = None,
        timing: Timing | None = None,
        once: bool = False,
    ) -> None:
        self._curve: Final = curve
        self._timing: Final = timing
        self._once: Final = once
        self.silent: Final[set[str]] = set()
        """Names of the streams whose publishers did not answer a replay request."""
        self._buses: Final = buses
        self._logs: Final = logs
        self._streams: Final = PrefixRouter(
            {name: self._subscriber(stream) for name, stream in streams.items()},
            copies=copies,
            keep_unreachable=True,
            on_update=self._note,
        )
        self._outputs: Final = PrefixRouter(keep_unreachable=True, on_update=self._note)
        self._followed: Final[dict[str, Stream]] = {}
        """The streams of buses that the index currently follows, by name."""
        self._tokenless: Final[set[str]] = set()
        """Names of the streams for which the index has already logged that they have no token ids."""
        self.agreement: Final = Agreement()
        self._tasks: Final[list[asyncio.Task[None]]] = []
        self._stack: Final = AsyncExitStack()
        self._settling: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start to follow the streams, buses and logs.

        Raises:
            ValueError: an endpoint is malformed.
        """
        for router in self._routers:
            await self._stack.enter_async_context(router)
        self._tasks.extend(asyncio.create_task(bus.follow(self._look_at_buses)) for bus in self._buses)
        self._settling = asyncio.create_task(self._settled())

    async def close(self) -> None:
        """Stop following the streams, buses and logs."""
        await end_tasks([*self._tasks, self._settling])
        await self._stack.aclose()

    async def complete(self) -> None:
        """Wait until the index has asked every bus once and has read the state of every stream.

        Do not wait for a stream whose state is known to be unavailable.

        Raises:
            KvbusError: a bus has no output that the index can read.
            RouterError: the index can no longer follow a stream.
        """
        assert self._settling is not None  # noqa: S101 - it is open
        failing = asyncio.ensure_future(self.failed())
        try:
            await asyncio.wait([self._settling, failing], return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                failing.result()
            self._settling.result()
        finally:
            await end_tasks([failing])

    async def failed(self) -> None:
        """Wait until the index can no longer follow a stream, a bus or a log.

        Then raise the error that was the reason.
        """
        await asyncio.gather(*self._tasks, self._watch())

    @property
    def awaited(self) -> str:
        """The reason why the index is not ready yet, in words; empty if it is ready."""
        if self._settling is None or not self._settling.done():
            return "reading the streams"
        if self._buses and not any(bus.reached for bus in self._buses):
            return f"no answer so far from {', '.join(bus.url for bus in self._buses)}"
        return ""

    # -- answers

    def answer(self, queries: Sequence[Query]) -> Answer:
        """Answer the questions of one request.

        Raises:
            ValueError: the hashes of a question are malformed. The text names the question.
            RouterError: the index can no longer follow a stream.
        """
        standings = self._standings()
        results = []
        for number, query in enumerate(queries):
            try:
                found = self._matches(query)
            except ValueError as error:
                raise ValueError(f"question {number}: {error}") from error
            prefixes = [
                _held_prefix(standings.get(worker) or _unknown(worker), match) for worker, match in found.items()
            ]
            results.append(Result(sorted(prefixes, key=_worth, reverse=True)))
        return Answer(results, [each for each in standings.values() if not each.complete])

    def blocks(self) -> list[tuple[Worker, Standing, dict[str, int]]]:
        """Return, for each source, the worker, the source's condition, and its number of blocks on each medium."""
        standings = self._standings()
        counts = {worker: media for router in self._routers for worker, media in router.blocks().items()}
        known = [(worker, standing, counts.pop(worker, {})) for worker, standing in standings.items()]
        return known + [(worker, _unknown(worker), media) for worker, media in counts.items()]

    @property
    def _routers(self) -> list[PrefixRouter | LogRouter]:
        return [self._streams, self._outputs, *self._logs]

    def _matches(self, query: Query) -> dict[Worker, Match]:
        found: dict[Worker, Match] = {}
        for router in self._routers:
            if query.tokens is not None:
                found |= router.matches(query.tokens, lora=query.lora, salt=query.salt)
                continue
            for hashes in readings(query.hashes or []):
                for worker, match in router.matches_by_hash(hashes).items():
                    if worker not in found or found[worker].blocks < match.blocks:
                        found[worker] = match
        return found

    def _standings(self) -> dict[Worker, Standing]:
        """Return the condition of the source of each known worker.

        It combines what the worker's stream shows with what its bus says.
        """
        found: dict[Worker, Standing] = {}
        direct: list[PrefixRouter | LogRouter] = [self._streams, *self._logs]
        for router in direct:
            workers = list(router.blocks())
            for name, status in router.status().items():
                own = [each for each in workers if each.name == name or each.name.startswith(f"{name}/")]
                for worker in own or [Worker(name, None)]:
                    found[worker] = Standing(
                        worker.name, worker.rank or 0, worker.name, _state(status, known=bool(own)), status.partial
                    )
        statuses, heard = self._outputs.status(), self._outputs.blocks()
        for bus in self._buses:
            if not bus.sources and not bus.answers:
                found[Worker(bus.url, None)] = Standing(bus.url, 0, bus.url, "unknown", partial=False)
            for source in bus.sources:
                workers = [each for each in heard if bus.source_of(each) is source]
                if bus.curve and not workers:
                    continue  # the index's CURVE key may have no right to read this source
                status = statuses.get(bus.stream_of(source), Status())
                state = _state(status, known=bool(workers))
                if state == "live":
                    state = source.state if bus.answers else "unknown"
                partial = source.partial or status.partial
                for worker in workers or [Worker(f"{bus.url} {source.name}", source.rank)]:
                    found[worker] = Standing(source.name, source.rank, bus.worker, state, partial)
        return found

    def _model_of(self, worker: Worker) -> str:
        return next((bus.model for bus in self._buses if bus.source_of(worker) is not None), "")

    # -- streams

    def _subscriber(self, stream: Stream) -> Subscriber:
        """Return a new subscriber that reads a stream.

        Raises:
            ValueError: only the replay should be read (``once``), and the stream has no replay endpoint.
        """
        if not self._once:
            return Subscriber(
                stream.endpoint,
                stream.replay_endpoint,
                by_topic=stream.by_topic,
                timing=self._timing,
                curve=self._curve,
            )
        if stream.replay_endpoint is None:
            raise ValueError(f"{stream.endpoint} has no replay endpoint, but this command reads only replays")
        return Subscriber(None, stream.replay_endpoint, timing=self._timing, curve=self._curve)

    def _note(self, name: str, update: Update) -> None:
        if isinstance(update, Lost) and update.reason is LostReason.NO_ANSWER:
            self.silent.add(name)

    def _look_at_buses(self) -> None:
        """Follow the streams that the buses list now. Stop following streams that they do not list any more."""
        wanted = {name: stream for bus in self._buses for name, stream in bus.streams.items()}
        for name, stream in list(self._followed.items()):
            if wanted.get(name) != stream:
                del self._followed[name]
                self._outputs.discard(name)
        for name, stream in wanted.items():
            if name not in self._followed:
                self._outputs.add(name, self._subscriber(stream))
                self._followed[name] = stream

    async def _settled(self) -> None:
        for bus in self._buses:
            await bus.asked.wait()
        for router in self._routers:
            await router.settled()

    async def _watch(self) -> None:
        """Check the streams every :data:`_WATCH_SECONDS`, and raise the error of a stream that has failed.

        Write a log line for each stream without token ids, and for workers that have different hashes for the same
        prompts.
        """
        for look in itertools.count():
            await asyncio.sleep(_WATCH_SECONDS)
            if not look % _COMPARE_EVERY:
                named = {worker: names for router in self._routers for worker, names in router.names(SAMPLE).items()}
                self.agreement.compare(named, self._model_of)
            for router in self._routers:
                blocks = {worker.name for worker in router.blocks()}
                for name, status in router.status().items():
                    if status.tokenless and name not in blocks | self._tokenless:
                        self._tokenless.add(name)
                        log.error("%s sends no token ids, so the index finds its blocks only by their hashes", name)
                router.matches_by_hash([])  # raises an error if the router has failed


def _state(status: Status, *, known: bool) -> str:
    """Return the state of a stream as it is shown in the condition of the stream's workers.

    Args:
        status: the status of the stream.
        known: whether the index has blocks from the stream.
    """
    if status.unreachable:
        return "unreachable"
    return "no_tokens" if status.tokenless and not known else status.state


def _unknown(worker: Worker) -> Standing:
    """Return the condition of a worker whose source its bus does not list: the state is ``unknown``."""
    return Standing(worker.name, worker.rank or 0, worker.name, "unknown", partial=False)


def _held_prefix(standing: Standing, match: Match) -> HeldPrefix:
    return HeldPrefix(
        standing.source,
        standing.rank,
        standing.worker,
        match.blocks,
        match.tokens,
        match.block_size,
        match.tiers,
        standing.state,
        standing.partial,
    )


def _worth(prefix: HeldPrefix) -> tuple[int, int, int]:
    return prefix.tokens, prefix.blocks, prefix.tiers.get(DEVICE_MEDIUM, 0)
