"""What questions cost: ``python -m tests.bench.query [--questions N]``.

A million blocks of a hundred sources in one tree. First the tree alone. Then another process asks over HTTP for prompts
of 2,048 blocks, packed, as JSON, and as JSON that came before (a conversation's text does). It says how long it waited.
The rest is CPU time of the thread that works, so that other programs on the machine count little. How late batches are,
one a millisecond beside 50 questions a second, is computed from these times.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import msgspec
import uvloop

from kvbus.admin.content_log import Reading, current
from kvbus.admin.pace import Pace
from kvbus.admin.query import Queries
from kvbus.admin.query_body import MSGPACK
from kvbus.core.blocks.prefix_index import PrefixIndex
from kvbus.core.events import BatchReceived, SourceUp
from kvbus.core.normalizing.rules import Rules
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.sequencing.settings import Settings
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import ProcessStats
from kvbus.core.wire.encoding import encode_batch, encode_value
from kvbus.core.wire.profiles import PROFILES
from kvbus.core.wire.schema import BlockRemoved, BlockStored
from kvbus.daemon.collector import rest_collector
from kvbus.transport.http.connection_limits import CONNECTION_TIMEOUT
from kvbus.transport.http.messages import Request, Response
from kvbus.transport.http.server import HttpServer
from tests.bench.setups import percentile

SOURCES: Final = 100
BLOCKS: Final = 10_000
"""Of each source."""
SIZE: Final = 16
SHARED: Final = 32
"""Blocks of a system prompt; every source has several."""
LONG: Final = 2048
ASKED: Final = 50.0
"""Questions a second."""
BATCHES: Final = 1000.0
"""Batches a second."""
IDLE: Final = 1e-5
"""CPU seconds of a turn in which nothing happens."""


class Load:
    """A relay whose sources are full, and prompts that they hold."""

    def __init__(self) -> None:
        self.random = random.Random(7)
        self.names = itertools.count(1 << 60)
        self.relay = Relay(
            [SourceSpec(f"e{n}", 0, Settings(replay=False, probe_interval=0.0), Rules()) for n in range(SOURCES)],
            [OutputSpec("out", PROFILES["vllm"], [None] * SOURCES, heartbeat=0)],
        )
        self.seqs = [0] * SOURCES
        self.prompts: dict[int, list[list[int]]] = {128: [], LONG: []}
        system = [self.tokens(SHARED) for _ in range(8)]
        for source in range(SOURCES):
            self.relay.handle(SourceUp(source), 0.0)
            self._fill(source, system)

    def tokens(self, blocks: int) -> list[int]:
        return [self.random.randrange(150_000) for _ in range(blocks * SIZE)]

    def _fill(self, source: int, system: list[list[int]]) -> None:
        roots = [self.store(source, None, shared) for shared in system]
        held = SHARED * len(system)
        while held < BLOCKS:
            size = (LONG if held < LONG else 128) - SHARED
            which = self.random.randrange(len(system))
            tokens = self.tokens(min(size, BLOCKS - held))
            parent = roots[which]
            for first in range(0, len(tokens), 128 * SIZE):
                parent = self.store(source, parent, tokens[first : first + 128 * SIZE])
            held += len(tokens) // SIZE
            if len(tokens) == size * SIZE:
                self.prompts[size + SHARED].append(system[which] + tokens)

    def store(self, source: int, parent: int | None, tokens: list[int]) -> int:
        names = tuple(itertools.islice(self.names, len(tokens) // SIZE))
        self.say(source, BlockStored(names, parent, encode_value(tokens), SIZE, None, "GPU"))
        return names[-1]

    def say(self, source: int, event: BlockStored[Any] | BlockRemoved[Any]) -> None:
        payload = encode_batch([event], 1.0, 0)
        frames = [b"", self.seqs[source].to_bytes(8, "big"), payload]
        self.seqs[source] += 1
        self.relay.handle(BatchReceived(source, frames), 0.0)


def tree_alone(load: Load) -> None:
    """CPU time of one question to the tree."""
    index: PrefixIndex[int] = PrefixIndex()
    begun = time.process_time()
    for slot, source in enumerate(load.relay.sources):
        for event in source.normalizer.announce():
            index.apply(slot, event)
    spent = time.process_time() - begun
    say(f"tree: {len(index):,} blocks, {index.nodes:,} places, {spent / len(index) * 1e6:.2f} us a block to build")
    for blocks, prompts in load.prompts.items():
        chosen = load.random.sample(prompts, min(100, len(prompts)))
        times = []
        for prompt in chosen * 5:
            begun = time.thread_time()
            found = index.longest_prefix(prompt)
            times.append(time.thread_time() - begun)
            if max(found.values()) != blocks:
                raise RuntimeError(f"{found} for {blocks} blocks")
        say(f"tree: {blocks:5} blocks asked: {statistics.median(times) * 1e6:7.1f} us, least {min(times) * 1e6:.1f} us")


async def turns(load: Load, kind: str, questions: int, *, apart: bool) -> tuple[list[list[float]], list[float]]:
    """For each question the CPU seconds that it took, or those of each turn of the loop if ``apart``.

    Beside them the seconds that whoever asked waited for each answer.

    A callback comes round with every turn then, which costs something itself: a body comes in smaller pieces. The clock
    is the thread's own, so that other programs do not count.
    """
    observed: Any = SimpleNamespace(relay=load.relay, process=ProcessStats(), config=SimpleNamespace(worker="w"))
    queries = Queries(observed, Pace())

    async def handle(request: Request) -> Response:
        current.set(Reading("bench", "/query"))  # as the server does
        return await queries.handle(request)

    server = HttpServer(handle, observed.process, timeout=CONNECTION_TIMEOUT)
    host, port = await server.start("127.0.0.1", 0)
    url = f"http://{host}:{port}/query"
    command = (sys.executable, "-m", "tests.bench.query", "--ask", url, "--as", kind, "--questions", str(questions))
    pipe = asyncio.subprocess.PIPE
    asking = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    if asking.stdin is None or asking.stdout is None:
        raise RuntimeError("no pipes")
    asking.stdin.write(json.dumps(load.random.sample(load.prompts[LONG], 20)).encode() + b"\n")
    await asking.stdout.readline()  # the tree is built
    loop = asyncio.get_running_loop()
    found: list[list[float]] = [[]]
    waited = []
    last = time.thread_time()

    def look() -> None:
        nonlocal last
        now = time.thread_time()
        if now - last > IDLE:
            found[-1].append(now - last)
        last = time.thread_time()
        timer[0] = loop.call_soon(look)

    timer = [loop.call_soon(look)] if apart else []
    while line := await asking.stdout.readline():
        if not apart:
            now = time.thread_time()
            found[-1].append(now - last)
            last = now
        if line.startswith(b"next "):
            found.append([])
            waited.append(float(line.split()[1]))
    for each in timer:
        each.cancel()
    await asking.wait()
    await server.close()
    await queries.close()
    return [each for each in found if each][:questions], waited


def batch_times(load: Load, count: int) -> list[float]:
    """CPU seconds of one batch of four blocks each."""
    times = []
    for _ in range(count):
        tokens = load.tokens(4)
        begun = time.thread_time()
        load.store(load.random.randrange(SOURCES), None, tokens)
        times.append(time.thread_time() - begun)
    return times


def lateness(batches: Sequence[float], questions: Sequence[Sequence[float]]) -> float:
    """The 99th percentile of how late batches are done, if all of it runs on one processor of its own, in order.

    Batches and questions come on time; a batch that waits goes before the next turn of a question.
    """
    clock = 0.0
    late = []
    waiting: deque[float] = deque()
    due_question = 0.0
    asked = 0
    for number, spent in enumerate(batches):
        due = number / BATCHES
        while clock < due:  # the time until the batch comes
            if questions and clock >= due_question and not waiting:
                waiting.extend(questions[asked % len(questions)])
                asked += 1
                due_question += 1 / ASKED
            if waiting:
                clock += waiting.popleft()
            else:
                clock = min(due, due_question) if questions and due_question > clock else due
        clock += spent
        late.append(clock - due)
    return percentile(sorted(late), 0.99)


async def ask(url: str, questions: int, kind: str) -> None:
    """Ask one after the other, and say a line after each."""
    prompts = json.loads(sys.stdin.readline())
    bodies = [msgspec.json.encode({"tokens": prompt}) for prompt in prompts]
    if kind == "json":  # no piece of a text is another's
        bodies = [b'{"tokens":[' + b" " * at + bodies[at % len(bodies)][11:] for at in range(questions)]
    if kind == "packed":
        bodies = [msgspec.msgpack.encode({"tokens": array("I", prompt).tobytes()}) for prompt in prompts]
    headers = {"Content-Type": MSGPACK} if kind == "packed" else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        while (status := await _post(session, url, bodies[0])) != 200:
            if status != 503:
                raise RuntimeError(f"refused: {status}")
            await asyncio.sleep(0.2)
        if kind == "json-again":
            for body in bodies:
                await _post(session, url, body)
        say("built")
        for number in range(questions):
            begun = time.perf_counter()
            if await _post(session, url, bodies[number % len(bodies)]) != 200:
                raise RuntimeError("refused")
            say(f"next {time.perf_counter() - begun}")
            await asyncio.sleep(0.02)


async def _post(session: aiohttp.ClientSession, url: str, body: bytes) -> int:
    async with session.post(url, data=body) as answer:
        await answer.read()
        return answer.status


def _shares(times: Iterable[float]) -> str:
    ordered = sorted(times)
    return " p99 ".join(f"{percentile(ordered, share) * 1e3:.2f}" for share in (0.5, 0.99))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--ask", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--as", dest="kind", default="json", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        asyncio.run(ask(options.ask, options.questions, options.kind))
        return
    load = Load()
    rest_collector()  # as the daemon does
    tree_alone(load)
    batches = batch_times(load, 20_000)
    alone = lateness(batches, [])
    middle, most = statistics.median(batches) * 1e6, percentile(sorted(batches), 0.99) * 1e6
    say(f"batch: {middle:.0f} us, p99 {most:.0f} us; late at 1,000 a second: p99 {alone * 1e6:.0f} us")
    for kind in ("json", "json-again", "packed"):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the daemon does
            whole, waited = runner.run(turns(load, kind, options.questions, apart=False))
            found, _ = runner.run(turns(load, kind, options.questions, apart=True))
        longest = sorted(map(max, found))
        late = lateness(batches, found)
        say(
            f"{LONG} blocks asked by HTTP as {kind}: answered after {_shares(waited)} ms, CPU {_shares(map(sum, whole))} ms, "
            f"of it in one turn of the loop {percentile(longest, 0.5) * 1e3:.2f} ms; batches at 50 questions a second late: p99 {late * 1e6:.0f} us, x {late / alone:.2f}"
        )


if __name__ == "__main__":
    main()
