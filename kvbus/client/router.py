"""`PrefixRouter`: one index of prefixes for the streams of many publishers."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self, TypeVar

from kvbus.client.feed import Feed, Status, Worker
from kvbus.client.prefix_index import PrefixIndex
from kvbus.client.subscriber import Subscriber, SubscriberClosedError
from kvbus.client.updates import Lost, Received, Restarted, Snapshot, Update

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType
    from typing import Any

    from kvbus.client.prefix_index import Adapter, Match, Tokens
    from kvbus.core.types import Hash
    from kvbus.core.wire.schema import Batch

T = TypeVar("T")


class RouterError(Exception):
    """The router is not open, or it has failed."""


class PrefixRouter:
    """An index that follows many publishers, and finds the workers that hold the longest prefix of a prompt.

    ``async with`` follows the streams in the running event loop. ``with`` follows them in a separate thread, for
    programs without an event loop. All methods may be called from any thread.

    A restart of a publisher removes the blocks of its stream from the index. A loss of batches removes them too,
    because the lost batches may contain removals. A stream without a connection keeps its blocks, but its workers are
    left out of the answers until the connection is back.

    Args:
        subscribers: one subscriber for each stream, by a name of your choice. A stream comes from an engine or from an
            output of kvbus. A subscriber with ``by_topic`` has many workers, with the names ``NAME/TOPIC``.
        copies: whether to count the copies of a block (see `BlockView`). True is right for streams of engines, False
            for streams of kvbus.
        keep_unreachable: whether answers include the workers of a stream without a connection. `status` shows that the
            stream is unreachable.
        on_update: called with a stream's name and each update that was applied, for metrics and logs. It is called in
            the event loop that follows the streams, so it must not block. An exception in it ends the router.
    """

    def __init__(
        self,
        subscribers: Mapping[str, Subscriber] | None = None,
        *,
        copies: bool = False,
        keep_unreachable: bool = False,
        on_update: Callable[[str, Update], None] = lambda _name, _update: None,
    ) -> None:
        self._first: Final = dict(subscribers or {})
        self._copies: Final = copies
        self._keep_unreachable: Final = keep_unreachable
        self._on_update: Final = on_update

        # The event loop writes these attributes, and any thread may read them. Each writer and each reader holds the
        # lock.
        self._lock: Final = threading.Lock()
        self._index: Final = PrefixIndex[Worker]()
        self._streams: Final[dict[str, tuple[Feed, Subscriber]]] = {}
        self._away: Final[set[str]] = set()
        self._failure: BaseException | None = None

        # Only the event loop uses these attributes, so they need no lock.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: Final[set[asyncio.Task[None]]] = set()
        self._settled: Final = asyncio.Event()

    def longest_prefix(
        self, tokens: Sequence[int], *, lora: Adapter = None, salt: str | None = None
    ) -> dict[Worker, int]:
        """Return how many leading blocks of a prompt each worker holds.

        The worker with the most tokens is first. Workers that hold no block of the prompt are left out.

        Raises:
            ValueError: a token id does not fit into 32 bits.
            RouterError: the router has failed.
        """
        return {worker: match.blocks for worker, match in self.matches(tokens, lora=lora, salt=salt).items()}

    def matches(self, tokens: Tokens, *, lora: Adapter = None, salt: str | None = None) -> dict[Worker, Match]:
        """Return the part of a prompt that each worker holds: number of blocks, block size, and blocks on each medium.

        The worker with the most tokens is first. Workers that hold no block of the prompt are left out.

        Args:
            tokens: the token ids of the prompt, or the same ids packed as little-endian integers of 32 bits.
            lora: the name of the LoRA adapter, or its id if the engine announces no name; None for the base model.
            salt: the cache salt of the prompt; None without one.

        Raises:
            ValueError: a token id does not fit into 32 bits.
            RouterError: the router has failed.
        """
        self._check()
        with self._lock:
            return self._without_unreachable(self._index.matches(tokens, lora=lora, salt=salt))

    def matches_by_hash(self, hashes: Sequence[Hash]) -> dict[Worker, Match]:
        """Return the part of a prompt that each worker holds, found by the hashes of the prompt's blocks.

        Args:
            hashes: the hashes of the prompt's blocks from the first to the last, as the engines compute them.

        Raises:
            RouterError: the router has failed.
        """
        self._check()
        with self._lock:
            return self._without_unreachable(self._index.matches_by_hash(hashes))

    def blocks(self) -> dict[Worker, dict[str, int]]:
        """Return the number of blocks of each worker on each medium."""
        with self._lock:
            return {worker: self._index.on_media(worker) for worker in self._index.workers}

    def names(self, most: int) -> dict[Worker, dict[bytes, Hash]]:
        """Return the hashes of each worker's oldest blocks, by a digest of the prompt up to the block's end.

        Two workers that compute hashes in the same way have the same hash for the same digest. At most ``most`` blocks
        of each worker are read, and blocks without such a digest are left out.
        """
        with self._lock:
            return {worker: self._index.names(worker, most) for worker in self._index.workers}

    def status(self) -> dict[str, Status]:
        """Return the condition of each stream, by the stream's name."""
        with self._lock:
            return {
                name: replace(feed.status, refused=Counter(feed.status.refused))
                for name, (feed, _) in self._streams.items()
            }

    def __len__(self) -> int:
        """Return the number of blocks of all workers."""
        with self._lock:
            return len(self._index)

    async def settled(self) -> None:
        """Wait until the state of each stream is complete, or known to be unavailable.

        `status` shows for each stream which of the two is the case.
        """
        self._check()
        await self._settled.wait()
        self._check()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until each stream's state is complete or known to be unavailable.

        This is `settled` for a program without an event loop.

        Args:
            timeout: maximum seconds to wait; None for no limit.

        Returns:
            False if the time has run out.
        """

        async def within() -> bool:
            try:
                async with asyncio.timeout(timeout):
                    await self.settled()
            except TimeoutError:
                return False
            return True

        return self._run(within())

    def add(self, name: str, subscriber: Subscriber) -> None:
        """Follow one more stream.

        Args:
            name: the name of the stream.
            subscriber: the subscriber that reads the stream.

        Raises:
            ValueError: another stream already has this name, or an endpoint is malformed.
            BindError: an endpoint cannot be bound.
            RouterError: the router is not open.
        """
        self._call(lambda: self._add(name, subscriber))

    def discard(self, name: str) -> None:
        """Stop following a stream, and remove the blocks of its workers from the index.

        Raises:
            KeyError: no stream has this name.
            RouterError: the router is not open.
        """
        self._call(lambda: self._discard(name))

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        try:
            for name, subscriber in self._first.items():
                self._add(name, subscriber)
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        self._settle()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self._streams):
            self._discard(name)
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._loop = None
        if kind is None:
            self._check()

    def __enter__(self) -> Self:
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="kvbus-router", daemon=True)
        self._thread.start()
        try:
            return self._run(self.__aenter__())
        except BaseException:
            self._end(loop)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = self._loop
        try:
            self._run(self.__aexit__(kind, error, trace))
        finally:
            if loop is not None:
                self._end(loop)

    # -- methods that run in the event loop

    def _add(self, name: str, subscriber: Subscriber) -> None:
        if name in self._streams:
            raise ValueError(f"another stream already has the name {name!r}")
        subscriber.open()
        feed = Feed(name, self._index, copies=self._copies)
        with self._lock:
            self._streams[name] = feed, subscriber
        self._settle()
        self._begin(self._follow(name, feed, subscriber))

    def _discard(self, name: str) -> None:
        with self._lock:
            feed, subscriber = self._streams.pop(name)
            self._away.difference_update(feed.names)
            feed.clear()
            feed.discarded = True
        self._begin(subscriber.aclose())
        self._settle()

    async def _follow(self, name: str, feed: Feed, subscriber: Subscriber) -> None:
        while True:
            try:
                update = await subscriber.receive()
            except SubscriberClosedError:
                return
            with self._lock:
                part = feed.of(topic) if subscriber.by_topic and (topic := getattr(update, "topic", b"")) else feed
                if isinstance(update, Snapshot | Restarted | Lost):
                    part.clear()
            for batch in _batches(update):
                with self._lock:
                    if feed.discarded:
                        return
                    part.apply(batch)
                if isinstance(update, Snapshot):
                    # A snapshot may have a million blocks, so let other tasks run between its batches.
                    await asyncio.sleep(0)
            with self._lock:
                if feed.discarded:
                    return
                # If batches of one topic are lost, kvbus sends the state of this topic again. So the loss does not make
                # the whole stream partial.
                if part is feed or not isinstance(update, Lost):
                    feed.status.note(update)
                (self._away.update if feed.status.unreachable else self._away.difference_update)(feed.names)
            self._settle()
            self._on_update(name, update)

    def _without_unreachable(self, found: dict[Worker, Match]) -> dict[Worker, Match]:
        if self._keep_unreachable or not self._away:
            return found
        return {worker: match for worker, match in found.items() if worker.name not in self._away}

    def _settle(self) -> None:
        if all(feed.status.settled for feed, _ in self._streams.values()):
            self._settled.set()
        else:
            self._settled.clear()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = failure
            self._settled.set()

    # -- methods that any thread may call

    def _check(self) -> None:
        if self._failure is not None:
            raise RouterError(f"the router has stopped because of an error: {self._failure!r}") from self._failure

    def _inside(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _call(self, function: Callable[[], None]) -> None:
        async def call() -> None:
            function()

        if self._inside():
            function()
        else:
            self._run(call())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the router's event loop from another thread, and wait for its result.

        Raises:
            RouterError: the router is not open, or the caller runs in the router's event loop.
        """
        if self._loop is not None and not self._inside():
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        work.close()
        if self._loop is None:
            raise RouterError("the router is not open: use it in a with or async with statement")
        raise RouterError("this call would block the router's own event loop: use await settled()")

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(loop.stop)
        if self._thread is not None:
            self._thread.join()
        loop.close()
        self._loop = None


def _batches(update: Update) -> Sequence[Batch]:
    if isinstance(update, Snapshot):
        return update.batches
    return (update.batch,) if isinstance(update, Received) else ()
