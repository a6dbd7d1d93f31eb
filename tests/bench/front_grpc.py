"""What the gRPC front costs: calls and messages of streams through kvbus and straight at the engine, in turns.

``python -m tests.bench.front_grpc``. The engine is a double that generates nothing; CPU is that of kvbus's process
alone, beside that of the double and the client together for the same thing without kvbus, in the same minute.
"""

from __future__ import annotations

import asyncio
import functools
import os
import statistics
import sys
import time

from grpc import aio

from tests.bench.front import cpu, program
from tests.front.grpc_pod import GrpcApi, serve
from tests.ports import free_ports

TOKEN = b"x" * 60
PROMPT = b"x" * 4000
STREAMS = ((1, 1000, 0.001), (32, 200, 0.02), (128, 100, 0.05))
"""How many at once, messages of each, seconds between two of them."""


class Engine(GrpcApi):
    """Answers at once, or streams as many messages as are asked for."""

    async def tokens(self, _: str, context: aio.ServicerContext) -> None:
        """What is asked for: messages, and seconds between two of them."""
        count, every = (await context.read()).split()
        for _each in range(int(count)):
            await context.write(TOKEN)
            await asyncio.sleep(float(every))


async def engine(port: int) -> None:
    """Be the engine."""
    await (await serve(Engine(), port)).wait_for_termination()


async def calls(channel: aio.Channel, count: int) -> float:
    """Seconds of a call, the median, one after the other."""
    ask, took = channel.unary_unary("/x/Echo"), []
    for _ in range(count):
        begin = time.perf_counter()
        await ask(PROMPT)
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


async def streams(channel: aio.Channel, count: int, messages: int, every: float) -> None:
    """Read some streams at once to their ends."""

    async def one() -> None:
        got = channel.unary_stream("/x/Tokens")(b"%d %g" % (messages, every))
        assert len([each async for each in got]) == messages

    await asyncio.gather(*(one() for _ in range(count)))


async def measure() -> None:
    """Print what it costs."""
    direct, front, source, output = free_ports(4)
    flags = ["--source", f"tcp://127.0.0.1:{source}", "--output", f"tcp://127.0.0.1:{output}"]
    for key in (
        f"front_grpc={{listen: '127.0.0.1:{front}', engine: '127.0.0.1:{direct}'}}",
        "http=null",
        "state_dir=null",
    ):
        flags += ["--set", key]
    async with (
        program("tests.bench.front_grpc", str(direct), port=direct) as behind,
        program("kvbus", "run", *flags, port=front) as pid,
        aio.insecure_channel(f"127.0.0.1:{direct}") as straight,
        aio.insecure_channel(f"127.0.0.1:{front}") as through,
    ):
        for channel in (straight, through):
            await calls(channel, 200)
        begin = cpu(pid)
        await asyncio.sleep(3.0)
        idle = (cpu(pid) - begin) / 3.0

        async def costs(work, times: int) -> tuple[float, float]:
            """CPU of kvbus, and of client and engine without it, each a unit of work, in seconds."""
            begin = cpu(behind) + cpu(os.getpid())
            await work(straight)
            ends = (cpu(behind) + cpu(os.getpid()) - begin) / times
            begin, began = cpu(pid), time.perf_counter()
            await work(through)
            return (cpu(pid) - begin - idle * (time.perf_counter() - began)) / times, ends

        rows = []
        for _ in range(5):
            spent = await costs(lambda channel: calls(channel, 1000), 1000)
            rows.append((await calls(straight, 300), await calls(through, 300), *spent))
        took, longer, ours, theirs = (statistics.median(column) * 1e6 for column in zip(*rows, strict=True))
        print(f"a call: {took:.0f} µs directly, {longer:.0f} µs through kvbus ({longer / took:.1f})")  # noqa: T201
        print(f"  {ours:.0f} µs CPU, {ours / theirs:.2f} of what client and engine spend ({theirs:.0f} µs)")  # noqa: T201
        for count, messages, every in STREAMS:
            work = functools.partial(streams, count=count, messages=messages, every=every)
            spent_on = [await costs(work, count * messages) for _ in range(3)]
            ours, theirs = (statistics.median(column) * 1e6 for column in zip(*spent_on, strict=True))
            said = f"{count} streams, at most {count / every:.0f} messages a second: {ours:.0f} µs CPU a message"
            print(f"{said}, {ours / theirs:.2f} of what client and engine spend ({theirs:.0f} µs)")  # noqa: T201


if __name__ == "__main__":
    asyncio.run(engine(int(sys.argv[1])) if len(sys.argv) > 1 else measure())
