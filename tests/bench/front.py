"""What the front costs: requests and parts of token streams through kvbus and straight at the engine, in turns.

``python -m tests.bench.front``. The engine is a double that generates nothing; CPU is that of kvbus's process alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from tests.ports import free_ports

PART = b'data: {"choices":[{"delta":{"content":" token"},"index":0}],"id":"cmpl-0123456789","object":"chat.completion"}\n\n'
BODY = b'{"prompt":"' + b"x" * 2000 + b'"}'
POST = b"POST /x HTTP/1.1\r\nHost: e\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)
STREAMS = ((1, 1000, 0.001), (32, 200, 0.02), (128, 100, 0.05))
"""How many at once, parts of each, seconds between two of them."""


async def engine(request: web.Request) -> web.StreamResponse:
    """Answer at once, or stream as many parts as are asked for."""
    if request.path != "/stream":
        await request.read()
        return web.json_response({"ok": 1})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(int(request.query["parts"])):
        await response.write(PART)
        await asyncio.sleep(float(request.query["every"]))
    return response


def serve(port: int) -> None:
    """Be the engine."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def cpu(pid: int) -> float:
    """CPU seconds of a process so far."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


async def requests(port: int, count: int) -> float:
    """Seconds of a request, the median, on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    took = []
    for _ in range(count):
        begin = time.perf_counter()
        writer.write(POST + BODY)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        took.append(time.perf_counter() - begin)
    writer.close()
    return statistics.median(took)


async def stream(port: int, parts: int, every: float) -> int:
    """How often a client reads something of a stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /stream?parts=%d&every=%r HTTP/1.1\r\nHost: e\r\nConnection: close\r\n\r\n" % (parts, every))
    reads = 0
    while await reader.read(65_536):
        reads += 1
    writer.close()
    return reads


@contextlib.asynccontextmanager
async def program(*arguments: str, port: int) -> AsyncIterator[int]:
    """Run a program until it listens, and end it."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", *arguments, stderr=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        await process.wait()


async def measure() -> None:
    """Print what it costs."""
    direct, front, source, output = free_ports(4)
    keys = f"front={{listen: '127.0.0.1:{front}', engine: 'http://127.0.0.1:{direct}'}}"
    flags = ["--source", f"tcp://127.0.0.1:{source}", "--output", f"tcp://127.0.0.1:{output}"]
    for key in (keys, "http=null", "state_dir=null"):
        flags += ["--set", key]
    async with (
        program("tests.bench.front", str(direct), port=direct),
        program("kvbus", "run", *flags, port=front) as pid,
    ):
        for port in (direct, front):
            await requests(port, 200)
        begin, idle = cpu(pid), 3.0
        await asyncio.sleep(idle)
        idle = (cpu(pid) - begin) / idle
        rows = []
        for _ in range(7):
            straight = await requests(direct, 400)
            began, begin = time.perf_counter(), cpu(pid)
            through = await requests(front, 1000)
            rows.append((straight, through, (cpu(pid) - begin - idle * (time.perf_counter() - began)) / 1000))
        medians = [statistics.median(column) * 1e6 for column in zip(*rows, strict=True)]
        print("a request: {:.0f} µs directly, {:.0f} µs through kvbus, {:.0f} µs CPU".format(*medians))  # noqa: T201
        for count, parts, every in STREAMS:
            costs, reads = [], []
            for _ in range(5):
                straight = sum(await asyncio.gather(*(stream(direct, parts, every) for _ in range(count))))
                began, begin = time.perf_counter(), cpu(pid)
                got = sum(await asyncio.gather(*(stream(front, parts, every) for _ in range(count))))
                took = time.perf_counter() - began
                costs.append((cpu(pid) - begin - idle * took) / (count * parts))
                reads.append(got / straight)
            cost, share = statistics.median(costs) * 1e6, statistics.median(reads)
            said = f"{count} streams, {count * parts / took:.0f} parts a second: {cost:.0f} µs CPU a part"
            print(f"{said}, {share:.2f} of the reads of direct clients")  # noqa: T201


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(int(sys.argv[1]))
    else:
        asyncio.run(measure())
