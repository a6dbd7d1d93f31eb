"""Search for inputs that cost kvbus much for their size: ``python -m tests.cost.search --seed 1 --inputs 100000``.

Each input is a stream of valid and invalid batches of one engine, given to the real core. The cost is counted, not
timed. The search changes the most expensive inputs a little, again and again, and so finds still more expensive ones.
It compares inputs by the executed lines of code for each byte; every iteration of a loop counts its lines again. For
inputs near the maximum so far, it also counts bytecode instructions, which takes six times as long.
"""

from __future__ import annotations

import argparse
import random
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any, Final

from kvbus.core.commands import RequestReplay
from kvbus.core.events import BatchReceived, RelayEvent, ReplayAsked, ReplayReceived, SourceUp, Tick
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.profiles import PROFILES
from tests.doubles.payloads import payload

INSTRUCTIONS: Final = {"engine live": 200.0, "engine replay": 200.0, "router replay": 40.0}
"""Maximum number of bytecode instructions that kvbus may execute for each byte of an input.

The key is the endpoint that receives the input.
"""

BYTES: Final = {"engine live": 200.0, "engine replay": 200.0, "router replay": 1.0}
"""Maximum number of bytes that kvbus may keep in memory for each byte of an input.

The key is the endpoint that receives the input. A block of one token takes 2 bytes of a batch and about 130 bytes in
the index.
"""

SMALLEST: Final = 400
"""Minimum size in bytes that the search assumes for an input.

With it, the fixed cost of a batch does not make very small inputs look expensive.
"""

MEDIA: Final = ("GPU", "CPU", "DISK", "FS", "NVME", "OBJ", "SHARED", "gpu", None, "nowhere")
KINDS: Final = (None, None, None, "full_attention", "mamba")

NEAR: Final = 0.7
"""Share of the highest cost so far, counted in lines, above which the search also counts an input's instructions."""

LARGEST: Final = 8_000
"""Maximum size of an input in bytes. Many small inputs find more in the same time than large ones."""

Event = dict[str, Any]
Input = list[list[Event]]
"""An input of the search: the batches of a stream, each as a list of events."""


def make_event(rng: random.Random) -> Event:
    """Return a random event, valid or with a small error."""
    kind = rng.random()
    if kind < 0.08:
        return {"type": "AllBlocksCleared"}
    base = rng.choice((0, 1, 100, rng.randrange(2000)))
    hashes: list[Any] = [base + n for n in range(rng.choice((0, 1, 1, 2, 8, 40)))]
    event: Event = {"type": "BlockRemoved", "block_hashes": hashes, "medium": rng.choice(MEDIA)}
    if rng.random() < 0.4:
        event["group_idx"] = rng.choice((0, 1, rng.randrange(100)))
    if kind < 0.3:
        return event
    size = rng.choice((1, 1, 2, 4, 16))
    parent = rng.choice((None, None, base - 1, base, rng.randrange(2000)))
    tokens = [rng.choice((7, 70_000))] * (size * len(hashes) + (rng.random() < 0.02))
    event |= {"type": "BlockStored", "parent_block_hash": parent, "token_ids": tokens, "block_size": size}
    if (spec := rng.choice(KINDS)) is not None:
        event["kv_cache_spec_kind"] = spec
    if rng.random() < 0.1:
        event["extra_keys"] = rng.choice((None, [None] * len(hashes), [["key", 1]] * len(hashes), "odd"))
    if rng.random() < 0.05:
        event[rng.choice(("novelty", "lora_name", "session_id"))] = "x" * rng.choice((1, 300, 2000))
    return event


def make_input(rng: random.Random) -> Input:
    """Return a random input: some batches with random events."""
    return [[make_event(rng) for _ in range(rng.choice((1, 1, 4, 20)))] for _ in range(rng.choice((1, 2, 4, 8)))]


def changed(rng: random.Random, given: Input) -> Input:
    """Return a copy of the input with one random change."""
    batches = [list(batch) for batch in given]
    at = rng.randrange(len(batches))
    action = rng.random()
    if action < 0.25:
        batches[at].append(make_event(rng))
    elif action < 0.5 and batches[at]:
        batches[at] += batches[at][: 60 - min(60, len(batches[at]))]
    elif action < 0.7 and batches[at]:
        batches[at][rng.randrange(len(batches[at]))] = make_event(rng)
    elif action < 0.85 and len(batches) < 12:
        batches.insert(at, list(rng.choice(batches)))
    elif len(batches) > 1:
        del batches[at]
    return batches


def make_relay() -> Relay:
    """Return a relay with one source and one output, with the usual limits except for a small journal."""
    source = SourceSpec("engine", 0, replay=True, probe_interval=0.0)
    output = OutputSpec("out", PROFILES["vllm"], [None], heartbeat=0.0, journal_batches=100)
    return Relay([source], [output])


def live(bus: Relay, messages: list[bytes]) -> list[RelayEvent]:
    """Return one relay event for each message, which an engine sends as a live batch."""
    del bus
    return [BatchReceived(0, [b"", seq.to_bytes(8, "big"), message]) for seq, message in enumerate(messages)]


def replay(bus: Relay, messages: list[bytes]) -> list[RelayEvent]:
    """Return the relay events in which these messages answer the relay's first replay request.

    The relay sends this request after a late live batch.
    """
    late = len(messages)
    commands = bus.handle(SourceUp(0), 1.0)
    commands += bus.handle(BatchReceived(0, [b"", late.to_bytes(8, "big"), payload()]), 1.0)
    request = next(command.request for command in commands if isinstance(command, RequestReplay))
    return [ReplayReceived(0, request, [b"", n.to_bytes(8, "big"), each]) for n, each in enumerate(messages)]


def asked(bus: Relay, messages: list[bytes]) -> list[RelayEvent]:
    """Return the relay events in which a router sends replay requests with these bytes as their content.

    Before that, give the relay the first two messages as live batches, so that the replay answers are not empty.
    """
    for seq, message in enumerate(messages[:2]):
        bus.handle(BatchReceived(0, [b"", seq.to_bytes(8, "big"), message]), 1.0)
    return [ReplayAsked(0, 0, [b"router", b"", message[:8]]) for message in messages for _ in range(4)]


ENDPOINTS: Final[dict[str, Callable[[Relay, list[bytes]], list[RelayEvent]]]] = {
    "engine live": live,
    "engine replay": replay,
    "router replay": asked,
}


def instructions_for(endpoint: str, given: Input) -> float:
    """Return the bytecode instructions that the core executes for each byte of an input."""
    return _counted(endpoint, given, "opcode")


def lines_for(endpoint: str, given: Input) -> float:
    """Return the lines of code that the core executes for each byte of an input."""
    return _counted(endpoint, given, "line")


def _counted(endpoint: str, given: Input, what: str) -> float:
    messages = [payload(*batch) for batch in given]
    bus = make_relay()
    events = ENDPOINTS[endpoint](bus, messages)
    counted = 0

    def trace(frame: Any, event: str, _argument: object) -> Any:
        nonlocal counted
        if event == what:
            counted += 1
        elif event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = what == "opcode", what == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        _handle(bus, events)
    finally:
        sys.settrace(before)
    return counted / size_of(events)


def bytes_for(endpoint: str, given: Input) -> float:
    """Return the bytes of memory that the core keeps for each byte of an input."""
    messages = [payload(*batch) for batch in given]
    bus = make_relay()
    events = ENDPOINTS[endpoint](bus, messages)
    tracemalloc.start()
    _handle(bus, events)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return kept / size_of(events)


def size_of(events: list[RelayEvent]) -> int:
    """Return the size of an input: the bytes of its received frames, or ``SMALLEST`` if they are fewer."""
    return max(SMALLEST, sum(len(frame) for event in events for frame in getattr(event, "frames", ())))


def _handle(bus: Relay, events: list[RelayEvent]) -> None:
    for event in events:
        bus.handle(event, 2.0)
    while bus.backlog:
        bus.handle(Tick(2.0), 2.0)


def search(endpoint: str, seed: int, inputs: int) -> tuple[float, Input]:
    """Try ``inputs`` random inputs, and return the most expensive one with its instructions for each byte."""
    rng = random.Random(f"{endpoint} {seed}")
    best: list[tuple[float, Input]] = []
    most, cost, dearest = 0.0, 0.0, make_input(rng)
    for n in range(inputs):
        tried = make_input(rng) if not best or n < 20 or rng.random() < 0.1 else changed(rng, rng.choice(best)[1])
        if sum(len(payload(*batch)) for batch in tried) > LARGEST:
            continue
        lines = lines_for(endpoint, tried)
        most = max(most, lines)
        if lines >= most * NEAR and (instructions := instructions_for(endpoint, tried)) > cost:
            cost, dearest = instructions, tried
        best.append((lines, tried))
        if len(best) > 20:
            best.sort(key=lambda each: each[0], reverse=True)
            del best[10:]
    return cost, dearest


def main() -> None:
    """Search for expensive inputs at each of the core's ``ENDPOINTS``, and print the highest cost.

    If this cost exceeds its budget, print the input, and fail.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=3000)
    options = parser.parse_args()
    for endpoint in ENDPOINTS:
        cost, dearest = search(endpoint, options.seed, options.inputs // len(ENDPOINTS))
        kept = bytes_for(endpoint, dearest)
        sys.stdout.write(
            f"{endpoint}: {cost:.1f} instructions a byte of {INSTRUCTIONS[endpoint]:g}, {kept:.1f} bytes kept\n"
        )
        sys.stdout.flush()
        if cost > INSTRUCTIONS[endpoint] or kept > BYTES[endpoint]:
            raise SystemExit(f"dearer than its budget: {dearest}")


if __name__ == "__main__":
    main()
