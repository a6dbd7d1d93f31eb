"""Trace kvbus's calls of Python functions in a running daemon: ``python -m tests.path.trace [1x1 | 8x8 | late]``.

A profile function (``sys.setprofile``) records each call of a function of kvbus in the thread of the daemon's event
loop. Engine and router are plain libzmq sockets, whose own threads are not traced. The daemon has a state on disk, one
source and one output, as usual.

The daemon also works without a batch. The calls of its tick, ten times a second, are not recorded. Each case is traced
several times, and the trace with the fewest calls counts, so it has only the calls that the batch or the router needs.
Their number is the same in every run. It depends neither on the speed of the machine nor on its load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from itertools import count, islice
from typing import Any, Final, NamedTuple, Self

import zmq

from tests.doubles.bus import PATIENCE, Bus, running_bus
from tests.doubles.payloads import payload, store, unpack

WARM: Final = 64
"""Number of batches before the first trace. Until then kvbus learns block sizes, and fills its caches."""

TRACED: Final = 40
"""Number of traces of a batch, of which the shortest counts."""

ROUTERS: Final = 10
"""Number of traces of a late router, of which the shortest counts."""

STATE: Final = 60
"""Number of blocks in the state of a late router."""

INLINED: Final = ("<listcomp>", "<dictcomp>", "<setcomp>")
"""Comprehensions, which are function calls up to Python 3.11 and no calls since 3.12. They are not counted."""


class Call(NamedTuple):
    """A call of a function of kvbus."""

    depth: int
    module: str
    function: str


class Trace:
    """The calls of functions of kvbus while a ``with`` block runs, in the thread of the block."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._depth = 0
        self._ticking = False

    def __enter__(self) -> Self:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: Any, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("kvbus.") or frame.f_code.co_name in INLINED:
            return
        function = frame.f_code.co_qualname
        if function == "Daemon._tick" and event in ("call", "return"):
            self._ticking = event == "call"
        elif self._ticking:
            return
        elif event == "call":
            self.calls.append(Call(self._depth, module, function))
            self._depth += 1
        elif event == "return":
            self._depth -= 1

    @property
    def figures(self) -> dict[str, int]:
        """The number of calls, of different functions and of different modules."""
        functions = {(call.module, call.function) for call in self.calls}
        return {
            "calls": len(self.calls),
            "functions": len(functions),
            "modules": len({module for module, _ in functions}),
        }

    def __str__(self) -> str:
        """The calls as an indented tree, one call in a line."""
        return "".join(f"{'  ' * call.depth}{call.function}  ({call.module})\n" for call in self.calls)


def batches(events: int, blocks: int) -> Iterator[bytes]:
    """Yield batches of an engine for ever. Each event of a batch appends ``blocks`` blocks to a prompt of its own."""
    for at in count():
        stored = []
        for prompt in range(events):
            first = (prompt << 32) + at * blocks + 1
            parent = first - 1 if at else None
            stored.append(store([*range(first, first + blocks)], parent, lora_id=None, lora_name=None))
        yield payload(*stored)


def shortest(traces: list[Trace]) -> Trace:
    """Return the trace with the fewest calls."""
    return min(traces, key=lambda trace: len(trace.calls))


async def _until(condition: Callable[[], bool], what: str) -> None:
    """Run the event loop until a condition holds, iteration by iteration."""
    loop = asyncio.get_running_loop()
    end = loop.time() + PATIENCE
    while not condition():
        if loop.time() > end:
            raise AssertionError(f"not within {PATIENCE:g} s: {what}")
        await asyncio.sleep(0)


class _Engine:
    """A PUB socket without a replay buffer, which kvbus has connected to."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self._socket = context.socket(zmq.XPUB)
        self._socket.bind(endpoint)
        self._seq = count()

    async def connected(self) -> None:
        await _until(lambda: bool(self._socket.poll(0)), "kvbus subscribes to the engine")

    def publish(self, body: bytes) -> None:
        self._socket.send_multipart([b"", next(self._seq).to_bytes(8, "big"), body])


class _Router:
    """A SUB socket that is connected to kvbus. It reads all batches after :meth:`subscribe`."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._blocks: set[int] = set()

    def subscribe(self) -> None:
        self._socket.subscribe(b"")

    async def receives(self, blocks: int) -> None:
        """Wait until this many blocks have arrived so far."""
        await _until(lambda: self._has(blocks), f"the router has {blocks} blocks")

    def _has(self, blocks: int) -> bool:
        while self._socket.poll(0):
            for event in unpack(self._socket.recv_multipart()[2])[1]:
                self._blocks.update(event.get("block_hashes", ()))
        return len(self._blocks) >= blocks

    def close(self) -> None:
        self._socket.close()


@contextlib.asynccontextmanager
async def _running(
    state: str,
) -> AsyncIterator[tuple[_Engine, Bus, Callable[[], AbstractAsyncContextManager[_Router]]]]:
    """Run kvbus with an engine, until the block ends. Yield a function that connects a router, too."""

    @contextlib.asynccontextmanager
    async def connected() -> AsyncIterator[_Router]:
        router = _Router(context, bus.out)
        await _until(lambda: bus.daemon.output_stats[0].routers == 1, "the router is connected")
        yield router
        router.close()
        await _until(lambda: bus.daemon.output_stats[0].routers == 0, "the router is gone")

    async with running_bus(state_dir=state, source={"replay_endpoint": None}, http=None) as bus:
        context: zmq.Context[Any] = zmq.Context()
        try:
            engine = _Engine(context, bus.engine)
            await engine.connected()
            yield engine, bus, connected
        finally:
            context.destroy(0)


async def trace_batch(events: int, blocks: int, state: str) -> Trace:
    """Trace the way of one usual batch from the engine's socket to that of the only router.

    Args:
        events: number of events in the batch.
        blocks: number of blocks in each event.
        state: the daemon's ``state_dir``.
    """
    traces = []
    async with _running(state) as (engine, _, connected), connected() as router:
        router.subscribe()
        for at, body in enumerate(islice(batches(events, blocks), WARM + TRACED)):
            engine.publish(body)
            with Trace() as trace:
                await router.receives((at + 1) * events * blocks)
            traces.append(trace)
    return shortest(traces[WARM:])


async def trace_late(state: str) -> Trace:
    """Trace how a connected router that subscribes late gets its state of :data:`STATE` blocks.

    Args:
        state: the daemon's ``state_dir``.
    """
    traces = []

    async def has_state(router: _Router, number: int) -> None:
        await router.receives(STATE)
        await _until(lambda: entered["live"] == number, "kvbus has sent the complete state")

    async with _running(state) as (engine, bus, connected):
        for body in islice(batches(1, 1), STATE):
            engine.publish(body)
        await _until(lambda: len(bus.source.normalizer.index) == STATE, "kvbus has all blocks")
        entered = bus.daemon.output_stats[0].router_states
        for number in range(1, 2 + ROUTERS):
            async with connected() as router:
                router.subscribe()
                with Trace() as trace:
                    await has_state(router, number)
            traces.append(trace)
    return shortest(traces[1:])


async def trace_case(case: str, state: str) -> Trace:
    """Trace the case ``late``, or a batch with the events and blocks that the case names, such as ``8x8``."""
    if case == "late":
        return await trace_late(state)
    events, blocks = map(int, case.split("x"))
    return await trace_batch(events, blocks, state)


def main() -> None:
    """Print the calls of a case as a tree, and then their number."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("case", nargs="?", default="1x1", help="late, or EVENTSxBLOCKS of a batch, such as 8x8")
    case = parser.parse_args().case
    with tempfile.TemporaryDirectory() as state:
        trace = asyncio.run(trace_case(case, state))
    sys.stdout.write(f"{trace}{case}: {trace.figures}\n")


if __name__ == "__main__":
    main()
