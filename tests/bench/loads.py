"""Engine traffic, encoded beforehand, so that whoever sends it does nothing but send.

Every load is a stream of msgpack batches ``[ts, events, rank]`` as an engine publishes them: maps, integer hashes, blocks
of 16 tokens. Sequences are 256 blocks long; parents are always known, hashes never come twice, and the same load is the
same bytes in every process. ``ts`` is left open (:func:`stamp`): it carries a message's number or the time it was sent.
"""

from __future__ import annotations

import random
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from kvbus.tools.sim.dialects import DIALECTS
from kvbus.tools.sim.engine import EngineOptions, SimEngine
from kvbus.tools.sim.workload import Job, read_trace, synthetic
from tests.doubles.router import events_of
from tests.wire.captures import CAPTURES

from .recorded import FAMILIES, LIVE, Looped, single

BLOCK_SIZE: Final = 16
SEQUENCE: Final = 256
"""Blocks in one sequence: a conversation of 4,096 tokens."""

LANES: Final = 8
"""Requests that run side by side; each event goes on with the next one's sequence."""

PROBE: Final = -1.0
"""``ts`` of what is sent until every router is known to listen."""

END: Final = -2.0
"""``ts`` of the last message of a run."""

NUMBERED: Final = 1e9
"""A ``ts`` from here on is a message's number; below it is the monotonic clock."""

_NO_ZERO: Final = bytes([1, *range(1, 256)])
"""Leading bytes are never zero, so that each number has the one msgpack form an encoder gives it."""


def stamp(payload: bytes, ts: float) -> bytes:
    """The same batch with another ``ts``."""
    return payload[:2] + struct.pack(">d", ts) + payload[10:]


def stamped(payload: bytes) -> float:
    """The ``ts`` of a batch whose first element is a float64, as every engine's and kvbus's is."""
    return struct.unpack_from(">d", payload, 2)[0]


def is_empty(payload: bytes) -> bool:
    """Whether a batch has no events (a heartbeat)."""
    return payload[10] == 0x90


def _text(word: str) -> bytes:
    return msgspec.msgpack.encode(word)


def _array(length: int) -> bytes:
    return bytes([0x90 | length]) if length < 16 else b"\xdc" + length.to_bytes(2, "big")


_STORED: Final = b"\x88" + _text("type") + _text("BlockStored") + _text("block_hashes")
_PARENT: Final = _text("parent_block_hash")
_TOKENS: Final = _text("token_ids")
_STORED_TAIL: Final = (
    _text("block_size")
    + bytes([BLOCK_SIZE])
    + _text("lora_id")
    + b"\xc0"
    + _text("medium")
    + _text("GPU")
    + _text("lora_name")
    + b"\xc0"
)
_STORED_0_33: Final = b"\xde\x00\x0b" + _STORED[1:]
_TAIL_0_33: Final = _text("group_idx") + b"\x00" + _text("kv_cache_spec_kind") + _text("full_attention")
"""The eleven fields of vLLM 0.33, whose map has a header of three bytes."""

_REMOVED: Final = b"\x83" + _text("type") + _text("BlockRemoved") + _text("block_hashes")
_REMOVED_TAIL: Final = _text("medium") + _text("GPU")
_HASH_BYTES: Final = 9


VOCABULARY: Final = 151_936
"""Qwen's."""

RARE: Final = 100
"""How flat the commonest ids are: id n is drawn in proportion to 1 / (n + RARE), Zipf's law as Mandelbrot has it.

So 11 % of the ids take one byte, 6 % two, 71 % three and 12 % five.
"""

Ids = Literal["narrow", "wide", "vocabulary"]
"""Token ids below 65,536 (3 bytes each on the wire), above (5 bytes), or those of a real vocabulary (1 to 5 bytes)."""


class Sequence:
    """One sequence, ready to be cut into events.

    Args:
        number: which one; the same number is the same sequence.
        ids: which token ids there are. With those of a vocabulary events have the fields of vLLM 0.33 as well.
    """

    __slots__ = ("hashes", "ids", "number", "tokens")

    def __init__(self, number: int, ids: Ids = "narrow") -> None:
        self.number = number
        self.ids = ids
        # a text as seed: integers that differ by a multiple of 2**32 can give the same numbers
        rng = random.Random(f"kvbus/bench/{number}")
        raw = rng.randbytes(8 * SEQUENCE)
        hashes = bytearray(b"\xcf") * (_HASH_BYTES * SEQUENCE)
        hashes[1::_HASH_BYTES] = raw[0::8].translate(_NO_ZERO)
        for i in range(1, 8):
            hashes[1 + i :: _HASH_BYTES] = raw[i::8]
        self.hashes = bytes(hashes)
        self.tokens = _tokens(rng, ids)
        """Of each block, as msgpack."""

    def stored(self, a: int, b: int, behind: Sequence | None = None) -> bytes:
        """BlockStored of blocks ``[a, b)``; the first block is a root, or behind another sequence."""
        real = self.ids == "vocabulary"
        before = self.hashes[: a * _HASH_BYTES] if a else behind.hashes if behind is not None else b"\xc0"
        parent = before[-_HASH_BYTES:]
        return b"".join(
            (
                _STORED_0_33 if real else _STORED,
                _array(b - a),
                self.hashes[a * _HASH_BYTES : b * _HASH_BYTES],
                _PARENT,
                parent,
                _TOKENS,
                b"\xdc",
                ((b - a) * BLOCK_SIZE).to_bytes(2, "big"),
                *self.tokens[a:b],
                _STORED_TAIL,
                *((_text("extra_keys"), _array(b - a), b"\xc0" * (b - a), _TAIL_0_33) if real else ()),
            )
        )

    def removed(self, a: int, b: int) -> bytes:
        """BlockRemoved of blocks ``[a, b)``, the leaf first."""
        leaf_first = (self.hashes[i * _HASH_BYTES : (i + 1) * _HASH_BYTES] for i in range(b - 1, a - 1, -1))
        return b"".join((_REMOVED, _array(b - a), *leaf_first, _REMOVED_TAIL))


def _tokens(rng: random.Random, ids: Ids) -> list[bytes]:
    items = SEQUENCE * BLOCK_SIZE
    if ids == "vocabulary":
        flat = [int(RARE * (1 + VOCABULARY / RARE) ** rng.random()) - RARE for _ in range(items)]
        blocks = (flat[at : at + BLOCK_SIZE] for at in range(0, items, BLOCK_SIZE))
        return [msgspec.msgpack.encode(block)[len(_array(BLOCK_SIZE)) :] for block in blocks]
    raw = rng.randbytes(2 * items)
    if ids == "wide":
        tokens = bytearray(b"\xce\x00\x01\x00\x00") * items
        tokens[3::5], tokens[4::5] = raw[0::2], raw[1::2]
    else:
        tokens = bytearray(b"\xcd\x00\x00") * items
        tokens[1::3], tokens[2::3] = raw[0::2].translate(_NO_ZERO), raw[1::2]
    width = len(tokens) // SEQUENCE
    return [bytes(tokens[at : at + width]) for at in range(0, len(tokens), width)]


def batch(events: list[bytes], rank: int = 0) -> bytes:
    """Encoded events as one batch with an open ``ts``."""
    return b"\x93\xcb" + bytes(8) + _array(len(events)) + b"".join(events) + msgspec.msgpack.encode(rank)


_PROBES: Final = 1 << 60
"""Sequences from here on are those of probes; no load gets that far."""


def _single(number: int, rank: int, ids: Ids = "narrow") -> bytes:
    """A batch of one root block that belongs to no load."""
    return batch([Sequence(_PROBES + number, ids).stored(0, 1)], rank)


class _Lanes:
    """Sequences that grow side by side."""

    def __init__(self, first: int, ids: Ids = "narrow") -> None:
        self._numbers = count(first)
        self._ids: Ids = ids
        self._lanes: deque[tuple[Sequence, int]] = deque()
        self.finished: deque[int] = deque()

    def grow(self, blocks: int) -> bytes:
        """The next lane's next event."""
        if len(self._lanes) < LANES:
            sequence, at = Sequence(next(self._numbers), self._ids), 0
        else:
            sequence, at = self._lanes.popleft()
        event = sequence.stored(at, at + blocks)
        at += blocks
        if at == SEQUENCE:
            self.finished.append(sequence.number)
            sequence, at = Sequence(next(self._numbers), self._ids), 0
        self._lanes.append((sequence, at))
        return event


def stores(events: int, blocks: int, *, rank: int = 0, ids: Ids = "narrow", first: int = 0) -> Iterator[bytes]:
    """Endless batches of ``events`` stores of ``blocks`` blocks each (a divisor of 256), from sequence ``first`` on."""
    lanes = _Lanes((rank << 32) + first, ids)
    while True:
        yield batch([lanes.grow(blocks) for _ in range(events)], rank)


def mixed(events: int, blocks: int, live: int, *, rank: int = 0) -> Iterator[bytes]:
    """Endless batches of a full cache: half of the events store, half remove what is oldest.

    Until ``live`` blocks are there, the batches only store.
    """
    lanes = _Lanes(rank << 32)
    per_batch = events * blocks
    held = 0
    while held + per_batch <= live:
        yield batch([lanes.grow(blocks) for _ in range(events)], rank)
        held += per_batch
    half = max(events // 2, 1)
    oldest, left = None, 0
    while True:
        told = []
        for _ in range(half):
            if not left:
                while not lanes.finished:  # a cache smaller than the requests that run: let one of them end
                    yield batch([lanes.grow(blocks)], rank)
                oldest, left = Sequence(lanes.finished.popleft()), SEQUENCE
            told.append(lanes.grow(blocks))
            assert oldest is not None
            told.append(oldest.removed(left - blocks, left))
            left -= blocks
        yield batch(told, rank)


def simulated(trace: Path | None, *, rank: int = 0) -> Iterator[bytes]:
    """Batches of a simulated vLLM 0.33 engine with a cache of 20,000 blocks, by a request trace or a seeded load."""
    jobs: Iterator[Job] = synthetic(0, rank) if trace is None else read_trace(trace)
    engine = SimEngine(DIALECTS["vllm-0.33"], jobs, rank=rank, options=EngineOptions(blocks=20_000, max_running=32))
    while (payload := engine.step(0.0)) is not None:
        yield payload


@dataclass(frozen=True)
class Load:
    """A named load. ``blocks`` is how many blocks a batch stores; 0 where that differs from batch to batch."""

    name: str
    about: str
    blocks: int
    make: Callable[[int], Iterator[bytes]]
    """Rank to endless (or, with a trace, long) batches."""
    single: Callable[[int, int], bytes] = _single
    """A batch of one root block that belongs to no load, by number and rank, in the load's own dialect."""
    warm: int = 0
    """Batches until the cache is full, where the load says so."""
    loop: int = 0
    """Batches after which all comes again under other names; 0 where nothing does."""

    def take(self, batches: int, rank: int = 0) -> list[bytes]:
        """The first batches."""
        return list(islice(self.make(rank), batches))

    def probe(self, number: int, rank: int = 0) -> bytes:
        """What is sent until every router is known to listen; numbered from 1."""
        return stamp(self.single(number, rank), PROBE)

    def end(self, rank: int = 0) -> bytes:
        """The last message of a run: a block that belongs to no load, so no relay leaves it out as a copy."""
        return stamp(self.single(0, rank), END)


def _mixed(name: str, about: str, events: int, live: int) -> Load:
    blocks = 8
    return Load(
        name, about, 0, lambda rank: mixed(events, blocks, live, rank=rank), warm=live // (events * blocks) + 64
    )


LOADS: Final[dict[str, Load]] = {
    load.name: load
    for load in (
        Load("1x1", "1 event of 1 block", 1, lambda rank: stores(1, 1, rank=rank)),
        Load("8x8", "8 events of 8 blocks", 64, lambda rank: stores(8, 8, rank=rank)),
        Load(
            "8x8-0.33",
            "8x8 with a real vocabulary and all fields of vLLM 0.33",
            64,
            lambda rank: stores(8, 8, rank=rank, ids="vocabulary"),
            partial(_single, ids="vocabulary"),
        ),
        Load("1x8", "1 event of 8 blocks", 8, lambda rank: stores(1, 8, rank=rank)),
        Load("64x1", "64 events of 1 block", 64, lambda rank: stores(64, 1, rank=rank)),
        Load("1x64", "1 event of 64 blocks", 64, lambda rank: stores(1, 64, rank=rank)),
        _mixed("mix", "4 stores and 4 removals of 8 blocks, 65,536 live", 8, 65_536),
        _mixed("full", "1 store and 1 removal of 8 blocks, 4,096 live", 2, 4096),
        Load("sim", "a simulated vLLM 0.33 engine, seeded requests", 0, lambda rank: simulated(None, rank=rank)),
    )
}


def filled(batches: int) -> Load:
    """So many batches of ``8x8``, and then ``1x8`` without end: a cache that was filled, and an engine that goes on."""

    def make(rank: int) -> Iterator[bytes]:
        return chain(islice(stores(8, 8, rank=rank), batches), stores(1, 8, rank=rank, first=1 << 31))

    return Load(f"filled:{batches}", f"8x8, after {batches} batches 1x8", 0, make)


_PROMPTS: Final = 1 << 59
"""Sequences from here on are those of the prompt that is asked for."""


def _prompt(blocks: int) -> list[bytes]:
    """Stores of eight blocks each, one behind the other: a prompt."""
    sequences = [Sequence(_PROMPTS + at) for at in range(0, blocks, SEQUENCE)]
    return [
        each.stored(at, at + 8, before)
        for before, each in zip([None, *sequences], sequences, strict=False)
        for at in range(0, min(blocks, SEQUENCE), 8)
    ]


def asked(batches: int) -> Load:
    """``filled``, with a prompt of 2,048 blocks in the cache of rank 0, of which the others have the first 32.

    Caches differ in size, 64 blocks a batch on average: else their dictionaries would all grow in one tenth of a second.
    """

    def make(rank: int) -> Iterator[bytes]:
        events = _prompt(32 if rank else 2048)
        prompt = [batch(events[at : at + 8], rank) for at in range(0, len(events), 8)]
        left, size = batches - len(prompt), 5 + rank % 7
        less, more = stores(size - 1, 8, rank=rank, first=1 << 30), stores(size, 8, rank=rank)
        smaller = min(rank, left)
        filling = chain(islice(less, smaller), islice(more, left - smaller))
        return chain(prompt, filling, filled(0).make(rank))

    return Load(f"asked:{batches}", f"a prompt of 2,048 blocks, about filled:{batches}", 0, make)


def recorded(name: str, live: int = LIVE) -> Load:
    """The looped recording of a family, or of any capture, with so many live blocks at least after ``warm`` batches."""
    capture = FAMILIES.get(name, name)
    looped = Looped(capture, live=live)
    return Load(
        name,
        f"recorded: {capture}",
        0,
        lambda rank: iter(Looped(capture, rank, live=live)),
        partial(single, capture),
        looped.loops * looped.batches,
        looped.batches,
    )


def load_named(name: str) -> Load:
    """A load by its name, that of a family or capture, ``trace:FILE``, ``filled:BATCHES`` or ``asked:BATCHES``."""
    if name in FAMILIES or name in CAPTURES:
        return recorded(name)
    if name.startswith("filled:"):
        return filled(int(name.removeprefix("filled:")))
    if name.startswith("asked:"):
        return asked(int(name.removeprefix("asked:")))
    if name.startswith("trace:"):
        path = Path(name.removeprefix("trace:"))
        return Load(name, f"a simulated vLLM 0.33 engine, requests of {path.name}", 0, lambda rank: simulated(path))
    return LOADS[name]


def tally(payloads: list[bytes]) -> tuple[int, int, set[tuple[Any, ...]]]:
    """Blocks stored, blocks removed, and what is live in the end, copies counted; by decoding everything whole.

    A live block is its group, its medium and its hash.
    """
    stored = removed = 0
    copies: dict[tuple[Any, ...], int] = {}
    for payload in payloads:
        for event in events_of(payload):
            if event["type"] == "AllBlocksCleared":
                copies.clear()
                continue
            more = 1 if event["type"] == "BlockStored" else -1
            group, medium, hashes = event.get("group_idx"), event.get("medium"), event["block_hashes"]
            if more > 0:
                stored += len(hashes)
            else:
                removed += len(hashes)
            for block in hashes:
                copies[group, medium, block] = copies.get((group, medium, block), 0) + more
    return stored, removed, {block for block, count in copies.items() if count > 0}


def monotonic() -> float:
    """The clock of timestamps in payloads: one for all processes of a machine."""
    return time.monotonic()
