"""Both event loops kvbus may run on, and what tests of sockets share."""

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
    """Find what a test left open. What is alive now need not be looked at after the next test: it is most of the heap."""
    gc.collect()
    gc.freeze()


class CountsReads:
    """A loop that counts how often it calls a reader: one that is called in every turn spins."""

    reads = 0

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        def counted() -> None:
            self.reads += 1
            callback(*args)

        super().add_reader(fd, counted)  # type: ignore[misc]


def counting(loop: Any) -> Callable[[], asyncio.AbstractEventLoop]:
    """A loop's class that counts its reads."""
    made: Callable[[], asyncio.AbstractEventLoop] = type("Counting", (CountsReads, loop), {})
    return made


COUNTING = {"asyncio": counting(asyncio.SelectorEventLoop), "uvloop": counting(uvloop.Loop)}


def reads() -> int:
    """How often the running loop, one of :data:`COUNTING`, has called a reader."""
    loop: Any = asyncio.get_running_loop()
    count: int = loop.reads
    return count


def both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test once on plain asyncio and once on uvloop; what a callback raises fails it.

    Without ``TEST_LONG`` on uvloop alone, which the daemon runs on.
    A test that expects callbacks to raise takes them out of ``raised`` (a fixture: the loop's list of exceptions).
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
    """Let the loop go round a few times: sockets close one turn after their pumps."""
    for _ in range(count):
        await asyncio.sleep(0)


def u64(number: int) -> bytes:
    return number.to_bytes(8, "big")


def read_all(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Whatever a socket has at this moment."""
    while True:
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
