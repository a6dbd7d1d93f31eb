"""One rank of a simulated engine. It runs a workload, makes KV-cache events, and knows which blocks are really live.

`SimEngine` does no I/O. A step admits requests, computes tokens and returns a payload in the dialect of the engine
release. `run` publishes the payloads at a fixed rate until `stop` is set.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from kvbus.tools.sim.cache import Cleared, Event, PrefixCache, Request
from kvbus.tools.sim.dialects import DIALECTS, BatchEncoder, Dialect

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvbus.tools.sim.workload import Job
    from kvbus.transport.engine.publisher import EnginePublisher

_QUIET_STEPS: Final = 10_000  # number of successive steps without an event after which the workload counts as stuck


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The sizes and rates of a simulated engine.

    Attributes:
        blocks: size of the GPU pool in blocks, for each rank and group.
        block_size: tokens per block.
        tiers: capacity of each lower tier in blocks, by the tier's name (``CPU``, ``DISK``).
        kinds: kind of each KV-cache group, such as ``("full_attention", "sliding_window")``.
        max_running: maximum number of requests that run at the same time.
        prefill_tokens: number of prompt tokens that a step computes for each request (chunked prefill).
        decode_tokens: number of tokens that a step generates for each request.
        reset_every: number of steps between two resets of the cache; 0 for no resets.
        requests: number of requests after which the engine is idle; None for the complete workload.
    """

    blocks: int = 2000
    block_size: int = 16
    tiers: Mapping[str, int] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("full_attention",)
    max_running: int = 8
    prefill_tokens: int = 2048
    decode_tokens: int = 8
    reset_every: int = 0
    requests: int | None = None


class SimEngine:
    """One rank of a simulated engine.

    Args:
        dialect: the dialect of the engine release to simulate, or its name in `DIALECTS`.
        jobs: the requests of the workload.
        rank: data-parallel rank.
        options: sizes and rates of the engine.

    Raises:
        ValueError: the options have a tier for which the dialect has no medium, or several groups although events of
            the dialect name no group.
    """

    def __init__(
        self,
        dialect: Dialect | str,
        jobs: Iterable[Job],
        *,
        rank: int = 0,
        options: EngineOptions | None = None,
    ) -> None:
        self.dialect: Final = DIALECTS[dialect] if isinstance(dialect, str) else dialect
        self.options: Final = options or EngineOptions()
        self.rank: Final = rank
        unsayable = sorted(set(self.options.tiers) - set(self.dialect.media))
        if unsayable:
            raise ValueError(f"{self.dialect.name} has no medium for tier {', '.join(unsayable)}")
        if len(self.options.kinds) > 1 and not self.dialect.groups:
            raise ValueError(f"{self.dialect.name} has no group_idx, so the engine can have only one group")
        self._jobs = iter(islice(jobs, self.options.requests))
        self._waiting: Job | None = None
        self.started = 0
        self.finished = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._begin()

    def step(self, now: float) -> bytes | None:
        """Run engine steps until there is a batch to publish, and return the payload of the batch.

        Args:
            now: timestamp for the batch, Unix time in seconds.

        Returns:
            The msgpack payload; None at the end of the workload.
        """
        quiet = 0
        while not self._outbox:
            if not self._advance():
                return None
            self._collect(now)
            quiet += 1
            if quiet > _QUIET_STEPS:
                raise RuntimeError(
                    "the workload causes no more events, because the cache holds every prompt completely"
                )
        return self._outbox.popleft()

    def flush(self, now: float) -> Iterator[bytes]:
        """Yield the payloads that were not published yet.

        Once the caller has published them, a reader of the stream has exactly the blocks that :meth:`truth` returns.

        `now` is the timestamp of the batches, Unix time in seconds.
        """
        self._collect(now)
        while self._outbox:
            yield self._outbox.popleft()

    def clear(self) -> None:
        """Reset the prefix cache, as a request to the engine's API does, and end the running requests."""
        for cache in self._caches:
            cache.clear()
            # Keep only the removals of the groups, and add a single clear below. An engine resets all groups together,
            # and sends one AllBlocksCleared event after the removals.
            self._events += [event for event in cache.take_events() if not isinstance(event, Cleared)]
        self._events.append(Cleared())
        self.finished += len(self._running)
        self._running.clear()

    def restart(self) -> None:
        """Begin a new epoch with an empty cache. The workload continues with the next request."""
        self._begin()

    def truth(self) -> list[dict[str, Any]]:
        """Return the live blocks that a correct reader of this rank's stream has.

        An entry has ``rank`` and the keys of `BatchEncoder.entries`.
        """
        live = {key: entry for cache in self._caches for key, entry in cache.live_blocks().items()}
        return [entry | {"rank": self.rank} for entry in self._encoder.entries(live)]

    def _begin(self) -> None:
        options = self.options
        self._caches = [
            PrefixCache(
                options.blocks,
                options.block_size,
                copies=self.dialect.copies,
                tiers=options.tiers,
                group_idx=group,
            )
            for group in range(len(options.kinds))
        ]
        self._encoder = BatchEncoder(self.dialect, rank=self.rank, kinds=options.kinds)
        self._running: list[list[Request]] = []
        self._steps = 0
        self._outbox: deque[bytes] = deque()
        self._events: list[Event] = [Cleared()] if self.dialect.clears_first else []

    def _advance(self) -> bool:
        """Run one engine step. Return False at the end of the workload."""
        self._steps += 1
        if self.options.reset_every and self._steps % self.options.reset_every == 0:
            self.clear()
        self._admit()
        if not self._running:
            return False
        for requests in list(self._running):
            first = requests[0]
            if first.computed < first.prompt:
                tokens = min(self.options.prefill_tokens, first.prompt - first.computed)
            else:
                tokens = self.options.decode_tokens
            for cache, request in zip(self._caches, requests, strict=True):
                cache.compute(request, tokens)
            if first.done:
                for cache, request in zip(self._caches, requests, strict=True):
                    cache.finish(request)
                self._running.remove(requests)
                self.finished += 1
        return True

    def _collect(self, now: float) -> None:
        for cache in self._caches:
            self._events += cache.take_events()
        self._outbox.extend(self._encoder.encode(self._events, now))
        self._events = []

    def _admit(self) -> None:
        while len(self._running) < self.options.max_running:
            job = self._waiting or next(self._jobs, None)
            if job is None:
                return
            # Truncate the prompt, because a request may use at most half of the pool. Traces have prompts of 100,000
            # tokens.
            tokens = job.tokens[: self.options.blocks * self.options.block_size // 2]
            if not all(cache.fits(len(tokens)) for cache in self._caches):
                self._waiting = job
                return
            self._waiting = None
            prompt = min(job.prompt, len(tokens))
            requests = [cache.start(tokens, prompt, job.tenant) for cache in self._caches]
            self._running.append(requests)
            self.started += 1
            self.prompt_tokens += prompt
            self.cached_tokens += requests[0].cached_prompt


async def run(
    engine: SimEngine,
    publisher: EnginePublisher,
    stop: asyncio.Event,
    *,
    rate: float,
    restart_every: float = 0.0,
) -> None:
    """Publish an engine's batches at `rate` per second until the workload ends or `stop` is set.

    At the end the remaining payloads of the last step are published, so that the stream matches `SimEngine.truth`.

    Args:
        engine: the engine.
        publisher: a started publisher.
        stop: an event that ends the publishing when it is set.
        rate: batches per second.
        restart_every: seconds between two restarts of the engine; 0 for no restarts.
    """
    loop = asyncio.get_running_loop()
    due = loop.time()
    restart_at = due + restart_every if restart_every else float("inf")
    while not stop.is_set():
        payload = engine.step(time.time())
        if payload is None:
            break
        publisher.publish(payload)
        due = max(due + 1 / rate, loop.time() - 1)
        if loop.time() >= restart_at:
            publisher.restart()
            engine.restart()
            restart_at = loop.time() + restart_every
        delay = due - loop.time()
        if delay <= 0:
            await asyncio.sleep(0)
            continue
        try:
            async with asyncio.timeout(delay):
                await stop.wait()
        except TimeoutError:
            pass
    for payload in engine.flush(time.time()):
        publisher.publish(payload)
