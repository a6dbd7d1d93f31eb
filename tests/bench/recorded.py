"""Loads made of recorded engine streams (``tests/wire/data``), looped without end, with a full cache.

A lap is a stretch of a recording that begins with an empty cache: all of it, or what is between two clears. Each lap has
hashes and token ids of its own, so nothing is a copy that was not one when it was recorded. What a lap leaves behind is
removed while later laps store, as its engine removes. So the number of live blocks stays the same, and nothing is ever
cleared but at the very beginning. Everything else is the recorded bytes: maps or arrays, the order of fields, how wide
each integer is. The first lap is the recording itself.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import count, islice
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from tests.doubles.router import REMOVED_NAMES, STORED_NAMES, events_of
from tests.wire.captures import load as read_capture

LIVE: Final = 4096
"""Blocks that a looped engine's cache holds at least."""

_decode: Final = msgspec.msgpack.decode
_encode: Final = msgspec.msgpack.encode
_NIL: Final = b"\xc0"
_WIDTHS: Final = (range(128), range(128, 256), range(256, 65_536))
"""Token ids by the bytes that msgpack takes for them; a new id takes as many as the old one."""

Table = tuple[bytes, bytes]
"""Where an event's blocks are: its medium and its group, as msgpack (empty if it does not say)."""


class Hash(NamedTuple):
    """A block's name, as msgpack."""

    encoded: bytes


class Tokens(NamedTuple):
    """Token ids, or EAGLE's pairs of them."""

    ids: list[Any]


Part = bytes | Hash | Tokens
"""A piece of an event: bytes that stay as they are, or what gets a new name in each lap."""


@dataclass
class Event:
    """One event. ``hashes`` are its blocks, and ``parts`` all of it."""

    kind: str
    table: Table
    hashes: list[Hash]
    parts: list[Part]


@dataclass
class Message:
    """One batch: what is before its events, the events, and what is behind them."""

    head: bytes
    events: list[Event]
    tail: bytes


class Names:
    """The names of one lap: the recorded ones changed, one to one, without any becoming longer or shorter."""

    def __init__(self, lap: int, rank: int) -> None:
        rng = random.Random(f"kvbus/recorded/{rank}/{lap}")
        first = lap == rank == 0
        # an integer keeps its type byte and its highest one: its sign and its width
        self._by_length = {9: 0 if first else rng.getrandbits(56), 34: 0 if first else rng.getrandbits(256)}
        self._ids: list[int] = []
        for width in _WIDTHS:
            at = 0 if first else rng.randrange(len(width))
            self._ids += [*width[at:], *width[:at]]
        self._known: dict[Hash, bytes] = {}

    def event(self, event: Event) -> bytes:
        """The event as this lap says it."""
        return b"".join(map(self._part, event.parts))

    def _part(self, part: Part) -> bytes:
        if isinstance(part, bytes):
            return part
        return self.hash(part) if isinstance(part, Hash) else _encode(self.tokens(part.ids))

    def hash(self, block: Hash) -> bytes:
        """A block's name, as msgpack."""
        known = self._known.get(block)
        if known is None:
            length = len(block.encoded)
            known = (int.from_bytes(block.encoded, "big") ^ self._by_length[length]).to_bytes(length, "big")
            self._known[block] = known
        return known

    def tokens(self, ids: list[Any]) -> list[Any]:
        """Token ids, or pairs."""
        new = self._ids
        return [new[t] if isinstance(t, int) else [new[a] for a in t] for t in ids]


class Left(NamedTuple):
    """Blocks that a lap has left behind, in the order in which one removal names them."""

    table: Table
    hashes: list[Hash]


@dataclass
class Lap:
    """Its batches (of one that is divided by a clear, its part), and what is live at its end, the leaves first."""

    messages: list[Message] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)


class Recording:
    """A capture, taken apart.

    Attributes:
        laps: in order.
        opening: the clear that the recording begins with, if it does.
        single: a store of one root block.
        several: removals name several blocks, as SGLang's do.
        removed_first: in a batch that removes and stores, removals come first.
    """

    def __init__(self, capture: str) -> None:
        messages = [_message(message.payload) for message in read_capture(capture)]
        events = [event for message in messages for event in message.events]
        self.opening = events[0] if events[0].kind == "AllBlocksCleared" else None
        self.single = _root(events)
        removals = [event for event in events if event.kind == "BlockRemoved"]
        self.several = any(len(event.hashes) > 1 for event in removals)
        self._templates = {event.table: event for event in reversed(removals)}
        firsts = Counter(
            message.events[0].kind for message in messages if {event.kind for event in message.events} >= _BOTH
        )
        self.removed_first = firsts["BlockRemoved"] > firsts["BlockStored"]
        self.laps = [Lap()]
        for message in messages:
            self._divide(message)
        for lap in self.laps:
            lap.left = _left(lap, several=self.several)

    def _divide(self, message: Message) -> None:
        """Put a batch into its lap; a clear ends a lap."""
        events: list[Event] = []
        for event in message.events:
            if event.kind != "AllBlocksCleared":
                events.append(event)
                continue
            if events:
                self.laps[-1].messages.append(Message(message.head, events, message.tail))
            events = []
            if self.laps[-1].messages:
                self.laps.append(Lap())
        if events:
            self.laps[-1].messages.append(Message(message.head, events, message.tail))

    def removal(self, table: Table, hashes: list[Hash]) -> Event:
        """A removal as this engine writes it."""
        like = self._templates[table]
        at = next(i for i, part in enumerate(like.parts) if isinstance(part, Hash))
        head = like.parts[at - 1]
        assert isinstance(head, bytes)
        old = len(_array(len(like.hashes)))
        rest = like.parts[at + len(like.hashes) :]
        before: list[Part] = [*like.parts[: at - 1], head[: len(head) - old] + _array(len(hashes))]
        return Event("BlockRemoved", table, hashes, [*before, *hashes, *rest])


_BOTH: Final = {"BlockStored", "BlockRemoved"}


@cache
def recording(capture: str) -> Recording:
    """A capture, read once."""
    return Recording(capture)


def _array(length: int) -> bytes:
    if length < 16:
        return bytes([0x90 | length])
    return b"\xdc" + length.to_bytes(2, "big")


def _message(payload: bytes) -> Message:
    ts, events, *rank = _decode(payload, type=list[Raw])
    items = _decode(events, type=list[Raw])
    tail = b"".join(map(bytes, rank))
    head = payload[: 1 + len(ts)]
    return Message(head, [_event(bytes(item)) for item in items], tail)


def _event(encoded: bytes) -> Event:
    names: tuple[str, ...]
    if isinstance(_decode(encoded), dict):
        fields = _decode(encoded, type=dict[str, Raw])
        names, values = tuple(fields), list(fields.values())
        keys = [_encode(name) for name in names]
        kind = _decode(fields["type"])
    else:
        values = _decode(encoded, type=list[Raw])
        kind = _decode(values[0])
        names = ("type", *(STORED_NAMES if kind == "BlockStored" else REMOVED_NAMES))[: len(values)]
        names += ("",) * (len(values) - len(names))
        keys = [b""] * len(values)
    known = dict(zip(names, map(bytes, values), strict=True))
    header = len(encoded) - sum(len(key) + len(value) for key, value in zip(keys, values, strict=True))
    parts: list[Part] = [encoded[:header]]
    hashes: list[Hash] = []
    for name, key, raw in zip(names, keys, values, strict=True):
        value = bytes(raw)
        if name == "block_hashes":
            blocks = [Hash(bytes(each)) for each in _decode(value, type=list[Raw])]
            hashes += blocks
            parts += [key + value[: len(value) - sum(len(block.encoded) for block in blocks)], *blocks]
        elif name == "parent_block_hash" and value != _NIL:
            parts += [key, Hash(value)]
        elif name == "token_ids":
            parts += [key, Tokens(_decode(value))]
        else:
            parts.append(key + value)
    return Event(kind, (known.get("medium", b""), known.get("group_idx", b"")), hashes, parts)


def _root(events: list[Event]) -> Event:
    """A store of one root block, in the table of the first store and of the smallest size there is in it."""
    stores = [event for event in events if event.kind == "BlockStored"]
    singles = [event for event in stores if len(event.hashes) == 1 and event.table == stores[0].table]
    single = min(singles, key=lambda event: len(_tokens(event)))
    parts: list[Part] = [
        _NIL if isinstance(part, Hash) and part is not single.hashes[0] else part for part in single.parts
    ]
    return Event(single.kind, single.table, single.hashes, parts)


def _tokens(event: Event) -> list[Any]:
    return next(part.ids for part in event.parts if isinstance(part, Tokens))


def _left(lap: Lap, *, several: bool) -> list[Left]:
    """What is live at a lap's end, copies too. By the first store, the newest first: so no parent leaves before a child."""
    copies: Counter[tuple[Table, Hash]] = Counter()
    first: dict[tuple[Table, Hash], int] = {}
    stores: list[tuple[Table, list[Hash]]] = []
    for message in lap.messages:
        for event in message.events:
            keys = [(event.table, block) for block in event.hashes]
            if event.kind == "BlockRemoved":
                copies.subtract(keys)
                continue
            copies.update(keys)
            stores.append((event.table, event.hashes))
            for key in keys:
                first.setdefault(key, len(stores))
    left: list[Left] = []
    for number, (table, hashes) in reversed(list(enumerate(stores, 1))):
        mine = [block for block in dict.fromkeys(hashes) if first[table, block] == number]
        if several:
            left += [
                Left(table, [block for block in mine if copies[table, block] > copy])
                for copy in range(max((copies[table, block] for block in mine), default=0))
            ]
        else:
            left += [Left(table, [block]) for block in reversed(mine) for _ in range(copies[table, block])]
    return left


class Looped:
    """A recording that goes on and on.

    Args:
        capture: its name.
        rank: another rank is another engine, with other names.
        live: blocks that are live at least; the laps that are kept are as many as that takes.
    """

    def __init__(self, capture: str, rank: int = 0, *, live: int = LIVE) -> None:
        self._recording = recording(capture)
        self._rank = rank
        last = Counter[Table]()
        for left in self._recording.laps[-1].left:
            last[left.table] += len(left.hashes)
        self.loops = max(-(-live // last.total()), 1)
        """So many times the recording is played until the cache is full."""
        self._room = {table: self.loops * blocks for table, blocks in last.items()}
        self._held = Counter[Table]()
        self._waiting: defaultdict[Table, deque[tuple[Names, Left]]] = defaultdict(deque)

    @property
    def batches(self) -> int:
        """Of one loop."""
        return sum(len(lap.messages) for lap in self._recording.laps)

    def __iter__(self) -> Iterator[bytes]:
        recording, rank = self._recording, self._rank
        opening = recording.opening
        for number in count():
            lap = recording.laps[number % len(recording.laps)]
            names = Names(number, rank)
            for message in lap.messages:
                tail = message.tail and _encode(rank)
                events = [names.event(event) for event in message.events]
                for event in message.events:
                    self._held[event.table] += len(event.hashes) * (1 if event.kind == "BlockStored" else -1)
                removed = [encoded for table in self._room for encoded in self._make_room(table)]
                events = [*removed, *events] if recording.removed_first else [*events, *removed]
                if opening is not None:
                    events.insert(0, names.event(opening))
                    opening = None
                yield message.head + _array(len(events)) + b"".join(events) + tail
            for left in lap.left:
                self._waiting[left.table].append((names, left))

    def _make_room(self, table: Table) -> Iterator[bytes]:
        """Removals of what is there from earlier laps, until the cache holds no more than it can."""
        waiting = self._waiting[table]
        hashes: list[Hash] = []
        names: Names | None = None
        while waiting and self._held[table] > self._room[table]:
            of, left = waiting.popleft()
            self._held[table] -= len(left.hashes)
            if names is not None and (of is not names or not self._recording.several):
                yield names.event(self._recording.removal(table, hashes))
                hashes = []
            names = of
            hashes = [*hashes, *left.hashes]
        if names is not None:
            yield names.event(self._recording.removal(table, hashes))


def single(capture: str, number: int, rank: int) -> bytes:
    """A batch of one root block that belongs to no lap, as this engine writes it."""
    recorded = recording(capture)
    message = recorded.laps[0].messages[0]
    event = Names(-1 - number, rank).event(recorded.single)
    return message.head + _array(1) + event + (message.tail and _encode(rank))


class Shape(NamedTuple):
    """Of one loop with a full cache: blocks in an event, and events in a batch."""

    blocks: float
    events: float


def plain_cost(shape: Shape, most: float, single: float, small: float) -> float:
    """What a block of this shape would cost if it were a plain store, by the costs of ``8x8``, ``64x1`` and ``1x1``.

    These three say what a batch costs, an event in it, and a block in that.
    """
    event_and_block = (64 * single - small) / 63
    batch = small - event_and_block
    block = (64 * most - batch - 8 * event_and_block) / 56
    return (batch / shape.events + event_and_block - block) / shape.blocks + block


def shape_of(family: str) -> Shape:
    """Counted, stores and removals alike."""
    looped = Looped(FAMILIES[family], live=1)
    batches = list(islice(looped, 2 * looped.batches))[looped.batches :]
    events = [event for payload in batches for event in events_of(payload)]
    return Shape(sum(len(event["block_hashes"]) for event in events) / len(events), len(events) / len(batches))


FAMILIES: Final = {
    "vllm-map": "vllm033_map_int",
    "vllm-extras": "vllm033_map_extras",
    "vllm-window": "vllm033_map_bytes",
    "vllm-mamba": "vllm033_mamba_64_16",
    "vllm-hybrid": "vllm033_hybrid_2176_64",
    "vllm-tiers": "syn_vllm033_tiers_storage",
    "vllm-two-sizes": "syn_vllm_two_granularities",
    "vllm-array": "syn_vllm023_positional",
    "vllm-array-bytes": "vllm0110_positional_bytes",
    "sglang-map": "sglang0523_map",
    "sglang-session": "sglang0523_salt_session",
    "sglang-eagle": "sglang0523_eagle_bigram",
    "sglang-page1": "sglang0523_page1",
    "sglang-hicache": "sglang0523_hicache",
    "sglang-tiers": "syn_sglang0523_tiers_disk",
    "sglang-array": "sglang0510_positional",
    "sglang-unchained": "sglang055_positional",
    "sglang-unchained-eagle": "sglang055_eagle",
    "sglang-variable": "syn_sglang_variable",
}
"""A family of engines and modes, and the capture that stands for it.

Left out are captures that are one of these with fewer fields (vLLM 0.9 and 0.20), and those of one event: an engine's
restart, and pages that collide.
"""

RECORDED: Final = {
    "vllm-map": "recorded batches of vLLM 0.33",
    "sglang-map": "recorded batches of SGLang 0.5.23",
}
"""The families that are measured beside synthetic loads, and what tables call their batches."""

NARROWED: Final = frozenset({"vllm-window", "vllm-mamba", "vllm-hybrid", "vllm-two-sizes", "sglang-variable"})
"""Families of which kvbus does not hand on every block under its own name: groups without prefixes, coarse duplicates,
radix nodes."""
