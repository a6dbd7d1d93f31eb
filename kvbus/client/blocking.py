"""A subscriber for programs without an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, Self

from kvbus.client.subscriber import SubscriberClosedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from kvbus.client.subscriber import Subscriber
    from kvbus.client.updates import Update


class BlockingSubscriber:
    """An iterator over a subscriber's updates that needs no asyncio and no thread. Ctrl-C ends a wait immediately.

    ``for update in BlockingSubscriber(Subscriber(…))`` opens the sockets at the first step, and closes them when the
    loop ends. ``with BlockingSubscriber(…) as subscriber`` keeps them open for the block; call `receive` for each
    update. The sockets are read only while `receive` waits. The docstring of `Subscriber` describes the consequences
    for a slow caller.

    Args:
        subscriber: the subscriber to read.
    """

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber: Final = subscriber
        self._runner: Final = asyncio.Runner()
        self._taken: Final[deque[Update]] = deque()
        self._managed = False
        self._closed = False

    def receive(self, timeout: float | None = None) -> Update:
        """Wait for the next update, and return it.

        Args:
            timeout: maximum seconds to wait; None for no limit.

        Raises:
            TimeoutError: no update has arrived within ``timeout`` seconds. No update is lost.
            SubscriberClosedError: the subscriber is closed.
            BindError: the first call opens the sockets, and an endpoint cannot be bound.
        """
        if self._closed:
            raise SubscriberClosedError("the subscriber is closed")
        if not self._taken:
            try:
                self._runner.run(self._take(timeout))
            except asyncio.CancelledError:
                # If Ctrl-C comes just before Runner.run resets its interrupt count, asyncio cancels the task but raises
                # no KeyboardInterrupt. So raise it here.
                raise KeyboardInterrupt from None
        return self._taken.popleft()

    def close(self) -> None:
        """Close the sockets immediately."""
        if not self._closed:
            self._closed = True
            self._runner.run(self._subscriber.aclose())
            self._runner.close()

    def __iter__(self) -> Iterator[Update]:
        try:
            while True:
                yield self.receive()
        finally:
            if not self._managed:
                self.close()

    def __enter__(self) -> Self:
        self._managed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _take(self, seconds: float | None) -> None:
        """Wait for an update, and then move all updates that are ready from the subscriber to the queue of `receive`.

        They are moved in one run of the event loop, because starting a run for each update would take longer than the
        update itself.
        """
        async with asyncio.timeout(seconds):
            self._taken.append(await self._subscriber.receive())
        while self._subscriber.pending:
            self._taken.append(await self._subscriber.receive())
