"""`LogRouter`: a prefix index for Python routers that read the streams of a log themselves.

Each kind of log needs the extra of its client library: ``kvbus[kafka]``, ``kvbus[nats]`` or ``kvbus[redis]``. The
streams have to contain token ids, so their writers need ``outputs[].token_ids: keep``.

>>> from kvbus.parts.log_router import LogRouter
>>> async def choose(prompt: list[int]) -> None:
...     async with LogRouter("kafka", {"endpoint": "tcp://kafka-0:9092", "model": "meta-llama/*"}) as router:
...         await router.settled()
...         print(router.longest_prefix(prompt))
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from kvbus.client import RouterError, Worker
from kvbus.client.feed import Feed, Status
from kvbus.client.prefix_index import PrefixIndex
from kvbus.common.tasks import end_tasks
from kvbus.config import parts
from kvbus.config.logs import TYPES
from kvbus.config.values import checked_discovery
from kvbus.core.events import RecordReceived, RelayEvent
from kvbus.core.types import Reason
from kvbus.core.wire.codec import decode
from kvbus.parts.discovery.contract import DiscoveryError, Engine, Services
from kvbus.parts.discovery.streams import LogStreams

if TYPE_CHECKING:
    from types import TracebackType

    from kvbus.client.prefix_index import Adapter, Match, Tokens
    from kvbus.core.types import Hash

PAUSE: Final = 1.0
"""Time in seconds after which kvbus tries again to read a log that it could not read."""


@dataclass(slots=True)
class _Stream:
    """One stream of the log: the object that applies its batches to the index, and the number of its source (slot)."""

    feed: Feed
    slot: int


class LogRouter:
    """An index of the streams in a log, which finds the worker that holds the longest prefix of a prompt.

    Use it with ``async with``. It follows the log in the event loop in which it was entered. A worker has the same name
    as an aggregator's source, ``WORKER.SOURCE.RANK``. A worker is removed when its writer ends the stream, or is silent
    for 30 s while the log can be read. While the log cannot be read, all blocks stay, and :attr:`lag` grows.

    Args:
        kind: the kind of log: ``kafka``, ``nats`` or ``redis``.
        keys: the keys of ``sources[].discover.KIND``: ``endpoint``, the patterns of the streams, and the settings of
            TLS and authentication.

    Raises:
        ValueError: the kind does not exist, its extra is not installed, or a key is not valid. The text names each
            problem.
    """

    def __init__(self, kind: str, keys: Mapping[str, Any]) -> None:
        if kind not in TYPES:
            raise ValueError(f"{kind!r} is not a kind of log; the kinds are {', '.join(TYPES)}")
        settings = checked_discovery({kind: {**keys, "token_ids": "keep"}})[kind]
        part = parts.load(parts.DISCOVERY, kind)
        self._make = partial(part, part.Settings.model_validate(settings))

        self._index: Final = PrefixIndex[Worker]()
        self._streams: Final[dict[str, _Stream]] = {}
        self._slots = 0
        self._settled: Final = asyncio.Event()

        self._carrier: LogStreams | None = None
        self._began_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self.unreachable = ""
        """The reason for which the log cannot be read now; empty if it can be read."""

    def longest_prefix(
        self, tokens: Sequence[int], *, lora: Adapter = None, salt: str | None = None
    ) -> dict[Worker, int]:
        """Return the number of a prompt's blocks that each worker holds, in descending order.

        A worker that holds no block of the prompt is left out.

        Args:
            tokens: the token ids of the prompt.
            lora: the LoRA adapter of the request; None for the base model.
            salt: the cache salt of the request; None if it has none.

        Raises:
            ValueError: a token id does not fit into 32 bits.
            RouterError: the router is not open, or has failed.
        """
        return {worker: match.blocks for worker, match in self.matches(tokens, lora=lora, salt=salt).items()}

    def matches(self, tokens: Tokens, *, lora: Adapter = None, salt: str | None = None) -> dict[Worker, Match]:
        """Return the part of a prompt that each worker holds, in descending order of the number of blocks.

        A :class:`~kvbus.client.prefix_index.Match` has the number of blocks, the block size, and the number of blocks
        by medium. A worker that holds no block of the prompt is left out.

        Args:
            tokens: the token ids of the prompt.
            lora: the LoRA adapter of the request; None for the base model.
            salt: the cache salt of the request; None if it has none.

        Raises:
            ValueError: a token id does not fit into 32 bits.
            RouterError: the router is not open, or has failed.
        """
        self._check()
        return self._index.matches(tokens, lora=lora, salt=salt)

    def matches_by_hash(self, hashes: Sequence[Hash]) -> dict[Worker, Match]:
        """Return the part of a prompt that each worker holds, found by the hashes of the prompt's blocks.

        Args:
            hashes: the hashes in the order of the prompt, as the engines compute them.

        Raises:
            RouterError: the router is not open, or has failed.
        """
        self._check()
        return self._index.matches_by_hash(hashes)

    def blocks(self) -> dict[Worker, dict[str, int]]:
        """Return the number of blocks that each worker holds, by medium."""
        return {worker: self._index.on_media(worker) for worker in self._index.workers}

    def names(self, most: int) -> dict[Worker, dict[bytes, Hash]]:
        """Return the hashes of each worker's oldest blocks, by a digest of the prompt up to the block's end.

        At most ``most`` blocks of each worker are read. `PrefixRouter.names` describes the use of the digests.
        """
        return {worker: self._index.names(worker, most) for worker in self._index.workers}

    def status(self) -> dict[str, Status]:
        """Return the status of each stream, by the name of its worker."""
        return {
            each.feed.names[0]: replace(each.feed.status, unreachable=self.unreachable)
            for each in self._streams.values()
        }

    def __len__(self) -> int:
        """Return the number of blocks that all workers hold together."""
        return len(self._index)

    @property
    def tokenless(self) -> int:
        """Number of stores without token ids.

        No prompt can find their blocks. Their writers need ``token_ids: keep``.
        """
        return sum(each.feed.status.tokenless for each in self._streams.values())

    @property
    def refused(self) -> dict[str, dict[Reason, int]]:
        """Number of events and batches that were not applied to the index, by worker and reason."""
        return {each.feed.names[0]: dict(each.feed.status.refused) for each in self._streams.values()}

    @property
    def lag(self) -> float:
        """Number of seconds by which the index may lag.

        It contains everything that the log had this many seconds ago.

        Raises:
            RouterError: the router is not open, or has failed.
        """
        return self._check().lag

    async def settled(self) -> None:
        """Wait until the index contains everything that the log had when reading began.

        Raises:
            RouterError: the router is not open, or has failed.
        """
        self._check()
        await self._settled.wait()
        self._check()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._carrier, self._began_at = self._make(Services("log", 1, asyncio.Event())), loop.time()
        self._task = loop.create_task(self._follow(self._carrier))
        self._task.add_done_callback(lambda _: self._settled.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._check()
        finally:
            await end_tasks([self._task])
            self._carrier = self._task = None
            for stream in self._streams.values():
                stream.feed.clear()
            self._streams.clear()
            self._settled.clear()

    # -- following the log in the event loop

    async def _follow(self, carrier: LogStreams) -> None:
        while True:
            try:
                async with contextlib.aclosing(carrier.watch()) as sets:
                    async for engines in sets:
                        self.unreachable = ""
                        self._take_over(carrier, engines)
            except DiscoveryError as error:
                self.unreachable = str(error)
                await asyncio.sleep(PAUSE)

    def _take_over(self, carrier: LogStreams, engines: Sequence[Engine]) -> None:
        engine_of = {publisher.endpoint: engine.name for engine in engines for publisher in engine.publishers}
        for endpoint in self._streams.keys() - engine_of:
            stream = self._streams.pop(endpoint)
            carrier.close(stream.slot)
            stream.feed.clear()
        for endpoint, name in engine_of.items():
            if endpoint not in self._streams:
                self._slots += 1
                stream = self._streams[endpoint] = _Stream(Feed(name, self._index, copies=False), self._slots)
                carrier.open(endpoint, stream.slot, partial(self._take, carrier, stream.feed), lambda: None)
        if not self._streams:
            # An empty set of engines is yielded only after the log was read to its end: there is no state to wait for.
            self._settled.set()

    def _take(self, carrier: LogStreams, feed: Feed, event: RelayEvent) -> None:
        if isinstance(event, RecordReceived):
            if not event.known:
                self._apply(feed, event)
            if not event.more:
                feed.status.state = "live"
        elif not self._settled.is_set():
            everyone = carrier.announced_at >= self._began_at
            if everyone and all(each.feed.status.state == "live" for each in self._streams.values()):
                self._settled.set()

    def _apply(self, feed: Feed, event: RecordReceived) -> None:
        if event.begins:
            feed.clear()
        batch = decode(event.payload) if event.payload else None
        if isinstance(batch, Reason):
            feed.status.refused[batch] += 1
        elif batch is not None:
            feed.apply(batch)

    def _check(self) -> LogStreams:
        if self._task is None or self._carrier is None:
            raise RouterError("the router is not open: use it in an async with statement")
        if self._task.done() and not self._task.cancelled():
            raise RouterError("following the log has failed") from self._task.exception()
        return self._carrier
