"""`PrefixRouter`: many publishers' streams as one index of prefixes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self, TypeVar

from kvbus.client.feed import Feed, Status, Worker
from kvbus.client.subscriber import Subscriber, SubscriberClosedError
from kvbus.client.updates import Lost, Received, Restarted, Snapshot, Update
from kvbus.core.blocks.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType
    from typing import Any

    from kvbus.core.blocks.prefix_labels import Adapter
    from kvbus.core.wire.batch import Batch

T = TypeVar("T")


class RouterError(Exception):
    """The router is not open, or has failed."""


class PrefixRouter:
    """Follow many publishers, and ask which worker holds the longest prefix of a prompt.

    ``async with`` follows them in the running event loop. ``with`` follows them in a thread of its own, for programs
    without a loop. All methods may be called from any thread.

    A restart takes a stream's blocks out of the index, and so does a loss, because removals may be among what is lost.
    A stream without a connection keeps its blocks, and answers leave it out until the connection stands again.

    Args:
        subscribers: one for each stream, by a name of yours. A stream is an engine's, or an output's of kvbus. One with
            ``by_topic`` has many workers, called ``NAME/TOPIC``.
        copies: True counts copies, right for engines' own streams (see `BlockView`); False is right for kvbus.
        on_update: called with a stream's name and each update that was taken in, for metrics and logs; in the loop that
            follows the streams, so it must not block. What it raises ends the router.
    """

    def __init__(
        self,
        subscribers: Mapping[str, Subscriber] | None = None,
        *,
        copies: bool = False,
        on_update: Callable[[str, Update], None] = lambda _name, _update: None,
    ) -> None:
        self._first: Final = dict(subscribers or {})
        self._copies: Final = copies
        self._on_update: Final = on_update

        # What the loop writes and any thread reads, under the lock.
        self._lock: Final = threading.Lock()
        self._index: Final = PrefixIndex[Worker]()
        self._streams: Final[dict[str, tuple[Feed, Subscriber]]] = {}
        self._away: Final[set[str]] = set()
        self._failure: BaseException | None = None

        # The loop.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: Final[set[asyncio.Task[None]]] = set()
        self._settled: Final = asyncio.Event()

    def longest_prefix(
        self, tokens: Sequence[int], *, lora: Adapter = None, salt: str | None = None
    ) -> dict[Worker, int]:
        """How many blocks each worker holds of a prompt, from its beginning on, where it holds any; the most first.

        Raises:
            ValueError: a token id is none of 32 bits.
            RouterError: the router has failed.
        """
        self._check()
        with self._lock:
            found = self._index.longest_prefix(tokens, lora=lora, salt=salt)
            if self._away:
                return {worker: blocks for worker, blocks in found.items() if worker.name not in self._away}
        return found

    def status(self) -> dict[str, Status]:
        """How each stream stands, by its name."""
        with self._lock:
            return {
                name: replace(feed.status, refused=Counter(feed.status.refused))
                for name, (feed, _) in self._streams.items()
            }

    def __len__(self) -> int:
        """Blocks of all workers."""
        with self._lock:
            return len(self._index)

    async def settled(self) -> None:
        """Wait until the state of each stream is there, or cannot be had; `status` says which."""
        self._check()
        await self._settled.wait()
        self._check()

    def wait(self, timeout: float | None = None) -> bool:
        """`settled` for programs without an event loop; False if that takes more than so many seconds."""

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

        Raises:
            ValueError: there is one of this name, or an endpoint is malformed.
            BindError: an endpoint cannot be bound.
            RouterError: the router is not open.
        """
        self._call(lambda: self._add(name, subscriber))

    def discard(self, name: str) -> None:
        """Follow a stream no more, and forget what its workers hold.

        Raises:
            KeyError: there is none of this name.
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

    # -- in the loop

    def _add(self, name: str, subscriber: Subscriber) -> None:
        if name in self._streams:
            raise ValueError(f"there is a stream named {name!r} already")
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
                    await asyncio.sleep(0)  # it may be a million blocks
            with self._lock:
                if feed.discarded:
                    return
                if part is feed or not isinstance(update, Lost):  # the state of the topic follows
                    feed.status.note(update)
                (self._away.update if feed.status.unreachable else self._away.difference_update)(feed.names)
            self._settle()
            self._on_update(name, update)

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

    # -- from any thread

    def _check(self) -> None:
        if self._failure is not None:
            raise RouterError("following a stream has failed") from self._failure

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
        """Run something in the loop, from another thread."""
        if self._loop is not None and not self._inside():
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        work.close()
        if self._loop is None:
            raise RouterError("the router is not open: use it in a with or async with statement")
        raise RouterError("this would wait for its own event loop: await settled()")

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
