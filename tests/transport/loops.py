"""The two event loops that kvbus can run on (asyncio and uvloop), and helpers that all tests of sockets share."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop
import zmq

from tests.doubles.bus import PATIENCE
from tests.long import LONG

FACTORIES: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}
END = b"\xff" * 8


def collect() -> None:
    """Collect garbage, so that unclosed sockets of the test cause warnings, and freeze the remaining objects.

    Later collections skip the frozen objects. These are most of the heap, so collections become faster.
    """
    gc.collect()
    gc.freeze()


class CountsReads:
    """Mixin of an event loop that counts how often the loop calls a reader. A busy loop has a high count."""

    reads = 0

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        def counted() -> None:
            self.reads += 1
            callback(*args)

        super().add_reader(fd, counted)  # type: ignore[misc]


def counting(loop: Any) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return a subclass of an event loop class that counts the calls of readers."""
    made: Callable[[], asyncio.AbstractEventLoop] = type("Counting", (CountsReads, loop), {})
    return made


COUNTING = {"asyncio": counting(asyncio.SelectorEventLoop), "uvloop": counting(uvloop.Loop)}


def reads() -> int:
    """Return how often the running loop has called a reader. The loop's class must be one of :data:`COUNTING`."""
    loop: Any = asyncio.get_running_loop()
    count: int = loop.reads
    return count


def both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test once on asyncio and once on uvloop. An exception in a callback of the loop fails the test.

    Without ``TEST_LONG``, run it only on uvloop, which the daemon uses. A test that expects exceptions in callbacks
    removes them from the fixture ``raised``, which is the loop's list of exceptions.
    """

    @functools.wraps(test)
    def run(*args: Any, loop_name: str, raised: list[BaseException], **given: Any) -> None:
        if "raised" in inspect.signature(test).parameters:
            given["raised"] = raised

        async def main() -> None:
            def handler(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
                raised.append(context.get("exception") or RuntimeError(context["message"]))

            asyncio.get_running_loop().set_exception_handler(handler)
            async with asyncio.timeout(2 * PATIENCE):
                await test(*args, **given)

        with asyncio.Runner(loop_factory=FACTORIES[loop_name]) as runner:
            runner.run(main())
        assert raised == []

    signature = inspect.signature(test)
    own = [p for p in signature.parameters.values() if p.name != "raised"]
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("loop_name", "raised")]
    run.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    return pytest.mark.parametrize("loop_name", list(FACTORIES) if LONG else ["uvloop"])(run)


async def turns(count: int = 3) -> None:
    """Run a few iterations of the event loop. A socket closes one iteration after its message pump."""
    for _ in range(count):
        await asyncio.sleep(0)


def u64(number: int) -> bytes:
    return number.to_bytes(8, "big")


def read_all(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Yield the messages that a socket has received, without waiting for more."""
    while True:
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
