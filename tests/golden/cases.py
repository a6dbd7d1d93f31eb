"""The golden cases: inputs for kvbus, and readable lines that describe its output for each.

A case is a function that yields lines. Published batches are shown with a digest of their bytes. Answers and states are
shown by their meaning, because their division into batches may change: the set of blocks that a router holds after
them, whether seqs are dense, and the number of blocks before each clear.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec

from kvbus.core.wire.profiles import PROFILES
from kvbus.tools.capture.format import Message
from tests.doubles.router import PlainSetRouter, events_of
from tests.golden.bus import GoldenBus, Stream
from tests.wire.captures import CAPTURES, load

Case = Callable[[], Iterator[str]]

SEEDS: Final = 60
"""Number of simulated worlds, each of which is a golden case."""

SECOND: Final = 60
"""Number of messages from the beginning of a capture that a second rank also sends."""

FORMS: Final[list[dict[str, Any]]] = [{"token_ids": "drop"}, {"layout": "merged"}, {"layout": "per_topic"}]
"""Configurations of outputs that the golden cases use in addition to one output for each profile."""


def cases() -> dict[str, Case]:
    """Return every golden case by its name."""
    found: dict[str, Case] = {}
    for name in CAPTURES:
        found[f"capture {name}"] = functools.partial(_capture, name)
    for seed in range(SEEDS):
        found[f"world {seed}"] = functools.partial(_world, seed)
    return found


# -- configurations ----------------------------------------------------------------------------------------------------


def _output(number: int, **keys: Any) -> dict[str, Any]:
    port = 20_000 + 100 * number
    ends: dict[str, str | None] = {
        "endpoint": f"tcp://127.0.0.1:{port}",
        "replay_endpoint": f"tcp://127.0.0.1:{port + 50}",
    }
    if keys.get("layout") == "per_topic":  # a replay request does not name a topic
        ends["replay_endpoint"] = None
    return {"name": f"out-{number}", **ends, "heartbeat": 0, **keys}


def _config(ranks: int, outputs: Iterable[dict[str, Any]], **keys: Any) -> dict[str, Any]:
    source = {"name": "engine", "endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5658"}
    made = [_output(number, **output) for number, output in enumerate(outputs)]
    rest = {"http": None, "state_dir": None, "model": "m", "worker": "w"}
    return {**rest, "sources": [{**source, "data_parallel_size": ranks}], "outputs": made, **keys}


def _profile(name: str) -> dict[str, Any]:
    return {"profile": name, **({"topic": "kv@{worker}@{model}"} if name.startswith("llm-d") else {})}


# -- captures ----------------------------------------------------------------------------------------------------------


def _capture(name: str) -> Iterator[str]:
    """Play a capture as rank 0 of an engine, and the capture's first messages as rank 1.

    The relay has an output of every profile.
    """
    outputs = [_profile(profile) for profile in PROFILES if profile != "dynamo-plane"]
    outputs += [
        {"topic": "kv@{source}@{rank}", **form} if form.get("layout") == "per_topic" else form for form in FORMS
    ]
    snapshots = {"snapshot_endpoint": f"tcp://127.0.0.1:{20_000 + 100 * len(outputs) + 70}"}
    bus = GoldenBus(_config(2, [*outputs, snapshots]))
    messages = load(name)
    for rank in (0, 1):
        bus.up(rank)
    answer(bus, {rank: [] for rank in (0, 1)})
    for at in range(len(messages) + 5):
        for rank, number in ((0, at), (1, at - 5)):
            if 0 <= number < (len(messages), SECOND)[rank]:
                bus.live(rank, frames(messages[number]))
                answer(bus, {0: messages[: at + 1], 1: messages[: min(max(0, at - 4), SECOND)]})
    bus.wait(2.0)
    yield from _published(bus)
    for stream in bus.streams:
        yield from _asked(bus, stream)
    yield from _sources(bus)


def frames(message: Message) -> list[bytes]:
    """Return the frames of a capture's message as an engine sends it live."""
    return [message.topic, message.seq.to_bytes(8, "big"), message.payload]


def answer(bus: GoldenBus, kept: dict[int, list[Message]]) -> None:
    """Answer every open replay request of the relay with the batches that the engine still has of its current epoch."""
    while bus.asked:
        source, request, start = bus.asked.pop(0)
        life: dict[int, bytes] = {}
        last = -1
        for message in kept[source]:
            if message.seq <= last:
                life.clear()
            last = message.seq
            life[message.seq] = message.payload
        found = [[seq.to_bytes(8, "big"), payload] for seq, payload in life.items() if seq >= start]
        bus.replayed(source, request, found)


# -- simulated worlds --------------------------------------------------------------------------------------------------


def _world(seed: int) -> Iterator[str]:
    """Play a simulated world of one seed, with two ranks of an engine.

    Some batches are lost, sent twice or swapped. Connections break, and the engine restarts.
    """
    chance = random.Random(seed)
    profile = chance.choice([name for name in PROFILES if name != "dynamo-plane"])
    outputs = [_profile(profile), {"layout": "merged"}]
    keys = {
        "on_lost": chance.choice(["clear", "keep"]),
        "source_timeout": 5,
        "orphans": chance.choice(["pass", "drop"]),
        "groups": chance.choice(["prefix", "all"]),
        "reorder_batches": chance.choice([4, 64]),
    }
    bus = GoldenBus(_config(2, outputs, **keys))
    buffer = chance.choice([0, 5, 1000])
    captures = [load(chance.choice(CAPTURES))[:120] for _ in (0, 1)]
    sent: dict[int, list[Message]] = {0: [], 1: []}
    yield f"profile {profile}, {keys}, the engine's replay keeps {buffer} batches"
    for rank in (0, 1):
        bus.up(rank)
    while any(captures):
        rank = chance.choice([rank for rank in (0, 1) if captures[rank]])
        fate = chance.random()
        messages = [captures[rank].pop(0) for _ in range(2 if 0.90 <= fate < 0.95 else 1) if captures[rank]]
        sent[rank] += messages
        for message in reversed(messages):  # two messages are swapped
            if fate >= 0.05:
                bus.live(rank, frames(message))
            if fate >= 0.95:
                bus.live(rank, frames(message))
        if 0.88 <= fate < 0.90:
            bus.down(rank)
            bus.wait(chance.choice([0.5, 8.0]))
            bus.up(rank)
        if 0.87 <= fate < 0.88:
            captures[rank] = _again(sent[rank])
            sent[rank] = []
        if chance.random() < 0.3:
            bus.wait(0.1)
        if chance.random() < 0.7:
            answer(bus, {each: sent[each][-buffer:] if buffer else [] for each in sent})
    for _ in range(20):
        bus.wait(2.0)
        answer(bus, {each: sent[each][-buffer:] if buffer else [] for each in sent})
    yield from _published(bus)
    for stream in bus.streams:
        yield from _asked(bus, stream)
    yield from _sources(bus)


def _again(sent: list[Message]) -> list[Message]:
    """Return the first 40 of these messages as the batches of a new epoch of the engine, which begins at seq 0."""
    return [msgspec.structs.replace(message, seq=seq) for seq, message in enumerate(sent[:40])]


# -- results -------------------------------------------------------------------------------------------------------


def _published(bus: GoldenBus) -> Iterator[str]:
    for stream, topic, seq, payload, identity in bus.published:
        digest = hashlib.sha256(payload).hexdigest()[:12]
        yield f"out {stream} {topic!r} seq {seq} id {identity} {digest} {_events(payload)}"


def _events(payload: bytes) -> str:
    return "; ".join(_short(event) for event in events_of(payload)) or "empty"


def _short(event: dict[str, Any]) -> str:
    fields = {name: value for name, value in event.items() if value is not None}
    kind = fields.pop("type", "?")
    if "token_ids" in fields:
        fields["token_ids"] = f"{len(fields['token_ids'])} tokens"
    return f"{kind} {json.dumps(fields, sort_keys=True, default=_plain)}"


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)


def _asked(bus: GoldenBus, stream: Stream) -> Iterator[str]:
    """Yield lines that describe what a router gets from a stream by replay requests, a subscription and a snapshot."""
    newest = max((seq for out, _, seq, _, _ in bus.published if out == stream), default=0)
    for start in (0, newest // 2, newest, newest + 10):
        batches = bus.replay(stream, start)
        yield f"replay {stream} from {start}: {'no END' if batches is None else _meaning(batches)}"
    yield f"state {stream}: {_meaning(bus.subscribe(stream))}"
    if bus.offers_snapshots(stream):
        seq, _, *chunks = bus.snapshot(stream)
        batches = [(0, chunk) for chunk in chunks]
        yield f"snapshot {stream} as of {int.from_bytes(seq, 'big', signed=True)}: {_set(batches)}"


def _meaning(batches: list[tuple[int, bytes]]) -> str:
    if not batches:
        return "nothing"
    seqs = [seq for seq, _ in batches]
    dense = seqs == list(range(seqs[0], seqs[-1] + 1))
    return f"seqs {seqs[0]} to {seqs[-1]}, {'dense' if dense else 'NOT DENSE'}, {_set(batches)}"


def _set(batches: list[tuple[int, bytes]]) -> str:
    router = PlainSetRouter()
    clears, before = [], 0
    for seq, payload in batches:
        for event in events_of(payload):
            if event["type"] == "AllBlocksCleared":
                clears.append(before)
            before += len(event.get("block_hashes") or ())
        router.take(seq, payload)
    held = sorted(((group, medium, _plain(block)) for group, medium, block in router.blocks), key=repr)
    digest = hashlib.sha256(repr(held).encode()).hexdigest()[:12]
    return f"{len(held)} blocks {digest}, clears after {clears} blocks"


def _sources(bus: GoldenBus) -> Iterator[str]:
    for entry in bus.sources():
        kept = {key: value for key, value in entry.items() if value not in (None, [], {}, "") and key != "examples"}
        yield f"source {json.dumps(kept, sort_keys=True, default=_plain)}"
