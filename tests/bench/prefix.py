"""What a question to `PrefixRouter` costs, and what a block costs in memory: figures of docs/CLIENT.md.

    python -m tests.bench.prefix                                    a million blocks, 100 workers, prompts of 128 blocks
    python -m tests.bench.prefix --blocks 100000 --workers 10

One publisher in a process of its own sends the blocks of as many ranks as there are workers; the router reads its stream
over a socket. A conversation begins alike on all of them, and each holds another length of it. Times are CPU time: the
least of all rounds, which other load on the machine does not touch, and the median.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

from msgspec import Raw
from msgspec.msgpack import encode

from kvbus.client import PrefixRouter, Subscriber
from kvbus.core.wire.encoding import encode_batch
from kvbus.core.wire.schema import BlockStored
from kvbus.transport.engine.publisher import EnginePublisher

SIZE = 16
"""Tokens of a block."""

CHAIN = 250
"""Blocks of one prompt that a worker holds."""


def prompt(seed: int, blocks: int) -> list[int]:
    """Token ids of a vocabulary of 128,000."""
    return Random(seed).choices(range(128_000), k=blocks * SIZE)


def stored(name: int, tokens: Sequence[int]) -> BlockStored[int]:
    """A prompt's blocks as one event; their names are unlike any other's."""
    names = Random(name)
    hashes = tuple(names.getrandbits(64) for _ in range(len(tokens) // SIZE))
    return BlockStored(hashes, None, Raw(encode(tokens)), SIZE, medium="GPU")


def publish(ends: Connection, blocks: int, workers: int, asked: int) -> None:
    """Send every worker's blocks; the rest of the process's life is the replay."""
    shared = prompt(0, asked)
    with_shared = [shared[: SIZE * (1 + rank * asked // workers)] for rank in range(workers)]
    publisher = EnginePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", bind=True, buffer_steps=10**6)
    publisher.start()
    for rank, known in enumerate(with_shared):
        publisher.publish(encode_batch([stored(rank, known)], 1.0, rank))
        own = blocks // workers - len(known) // SIZE
        for first in range(0, own, CHAIN):
            name = workers + rank * blocks + first
            event = stored(name, prompt(name, min(CHAIN, own - first)))
            publisher.publish(encode_batch([event], 1.0, rank))
    ends.send((publisher.endpoint, publisher.replay_endpoint))
    ends.recv()
    publisher.close()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def asked_often(router: PrefixRouter, tokens: Sequence[int], rounds: int = 2000) -> tuple[float, float]:
    """The least and the median CPU time of a question, in microseconds."""
    times = []
    for _ in range(rounds):
        began = time.thread_time_ns()
        router.longest_prefix(tokens)
        times.append(time.thread_time_ns() - began)
    return min(times) / 1000, statistics.median(times) / 1000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("blocks", 1_000_000), ("workers", 100), ("asked", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    say = partial(print, flush=True)
    ours, theirs = multiprocessing.Pipe()
    spawning = multiprocessing.get_context("spawn")
    engine = spawning.Process(target=publish, args=(theirs, options.blocks, options.workers, options.asked))
    engine.start()
    endpoints = ours.recv()
    gc.collect()
    before = resident()
    began = time.process_time()
    with PrefixRouter({"engine": Subscriber(*endpoints)}) as router:
        router.wait()
        took = time.process_time() - began
        gc.collect()
        held = len(router)
        say(f"{held:,} blocks of {len(router.longest_prefix(prompt(0, options.asked)))} workers:")
        say(f"  {(resident() - before) / held:.0f} bytes and {took / held * 1e6:.1f} us of CPU a block")
        cases = {"all workers hold, each another length": prompt(0, options.asked)}
        cases["one worker holds"] = prompt(options.workers, options.asked)
        cases["nobody holds"] = prompt(-1, options.asked)
        for case, tokens in cases.items():
            least, median = asked_often(router, tokens)
            say(f"  a prompt of {options.asked} blocks that {case}: {least:.1f} us (median {median:.1f})")
    ours.send(None)
    engine.join()


if __name__ == "__main__":
    main()
