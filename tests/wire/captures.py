"""Recorded engine streams with their truth, and the plainest router that can be compared with it.

>>> router = PlainSetRouter()
>>> for message in published:
...     router.apply(message.seq, message.payload)
>>> assert matches_truth("vllm033_map_int", router) is None
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kvbus.capture.format import Message, read_capture
from kvbus.core.types import MEDIA, PREFIX_KINDS, medium_key

DATA: Final = Path(__file__).parent / "data"
CAPTURES: Final = sorted(path.name.removesuffix(".jsonl") for path in DATA.glob("*.jsonl"))
BY_PREFIX: Final = frozenset({"syn_sglang_variable"})
"""Captures whose truth names a block by the sha256 of its whole prefix, because the engine's hashes name nodes."""

Key = tuple[int | None, str, int | bytes | str]
"""Group, medium key, hash: an integer, bytes, or the hex sha256 of the prefix (see BY_PREFIX)."""

STORED_NAMES: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
REMOVED_NAMES: Final = ("block_hashes", "medium", "group_idx")


@functools.cache
def _load(name: str) -> tuple[Message, ...]:
    return tuple(read_capture(DATA / f"{name}.jsonl"))


def load(name: str) -> list[Message]:
    """Every message of a capture, in the order it was published; seq goes back to 0 where the engine restarted."""
    return list(_load(name))


def lives(name: str) -> list[list[Message]]:
    """The messages of a capture, one list for each life of its engine."""
    found: list[list[Message]] = []
    for message in _load(name):
        if not found or message.seq <= found[-1][-1].seq:
            found.append([])
        found[-1].append(message)
    return found


def truth(name: str) -> set[Key]:
    """What the engine's cache held at the end, in the groups whose blocks carry a prefix."""
    blocks = json.loads((DATA / f"{name}.truth.json").read_text())["blocks"]
    return {
        (block.get("group_idx"), _medium(block.get("medium")), _identity(block))
        for block in blocks
        if block.get("kind") is None or block["kind"] in PREFIX_KINDS
    }


def _medium(name: str | None) -> str:
    key = medium_key(name)
    assert key is not None, name
    return key


def _identity(block: dict[str, Any]) -> int | bytes | str:
    if "prefix" in block:
        return str(block["prefix"])
    value = block["hash"]
    return bytes.fromhex(value) if isinstance(value, str) else int(value)


def events_of(payload: bytes) -> list[dict[str, Any]]:
    """The events of a batch as maps, whether they were sent as maps or by position."""
    return [event if isinstance(event, dict) else _named(event) for event in msgspec.msgpack.decode(payload)[1]]


def _named(event: list[Any]) -> dict[str, Any]:
    names = STORED_NAMES if event[0] == "BlockStored" else REMOVED_NAMES
    return {"type": event[0], **dict(zip(names, event[1:], strict=False))}


class Block(NamedTuple):
    """What a router knows of one block. Tokens are ids, or ``(a, b)`` pairs with EAGLE."""

    parent: int | bytes | None
    tokens: tuple[Any, ...]


class PlainSetRouter:
    """A router that keeps a set: a store adds, a removal deletes, a clear empties. Copies are unknown to it.

    Everything that a stream of fixed-size, gap-free, validated blocks must not do is written down in ``violations``;
    stores behind a parent that is not there are legal and counted in ``orphans``.
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[int | None, str, int | bytes], Block] = {}
        self.violations: list[str] = []
        self.orphans = 0
        self.events = 0
        self.clears = 0
        self.next_seq: int | None = None
        self.block_sizes: dict[int | None, int] = {}
        self.ranks: set[int | None] = set()
        self._run: list[tuple[tuple[int | None, str], int | bytes, int | bytes | None]] = []

    def apply(self, seq: int, payload: bytes) -> None:
        """Take in one batch. One that was seen before (replay and live stream may overlap) is ignored."""
        if self.next_seq is not None:
            if seq < self.next_seq:
                return
            if seq > self.next_seq:
                self._wrong(seq, f"gap: expected seq {self.next_seq}")
        self.next_seq = seq + 1
        batch = msgspec.msgpack.decode(payload)
        if not isinstance(batch, list) or len(batch) != 3:
            self._wrong(seq, "a batch is an array of three")
            return
        if not isinstance(batch[0], float) or not math.isfinite(batch[0]):
            self._wrong(seq, f"ts {batch[0]!r}")
        self.ranks.add(batch[2])
        for event in events_of(payload):
            self._event(seq, event)
        self._end_of_run(seq)

    def prefixes(self) -> set[str]:
        """Every block as the hex sha256 of all tokens from the root to its end, four bytes little endian each."""
        return {
            hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in self.path(group, block))).hexdigest()
            for group, _, block in self.blocks
        }

    def path(self, group: int | None, block: int | bytes) -> list[Any]:
        """The tokens from the root (or the first unknown ancestor) to the end of a block."""
        parts: list[tuple[Any, ...]] = []
        seen: set[int | bytes] = set()
        at: int | bytes | None = block
        while at is not None and at not in seen and (found := self._find(group, at)) is not None:
            seen.add(at)
            parts.append(found.tokens)
            at = found.parent
        return [token for part in reversed(parts) for token in part]

    def _find(self, group: int | None, block: int | bytes) -> Block | None:
        found = self.blocks.get((group, "GPU", block))
        if found is not None:
            return found
        return next((known for key, known in self.blocks.items() if key[0] == group and key[2] == block), None)

    def _wrong(self, seq: int, what: str) -> None:
        self.violations.append(f"seq {seq}: {what}")

    def _event(self, seq: int, event: dict[str, Any]) -> None:
        self.events += 1
        if event["type"] == "AllBlocksCleared":
            self._end_of_run(seq)
            self.clears += 1
            self.blocks.clear()
            return
        medium = medium_key(event.get("medium"))
        if medium is None or (event.get("medium") or "GPU") not in MEDIA:
            self._wrong(seq, f"medium {event.get('medium')!r}")
            return
        group, hashes = event.get("group_idx"), event["block_hashes"]
        if not hashes or len({type(value) for value in hashes}) != 1 or not isinstance(hashes[0], int | bytes):
            self._wrong(seq, f"{event['type']} with hashes {hashes!r}")
            return
        if event["type"] == "BlockRemoved":
            self._removed(seq, group, medium, hashes)
        elif event["type"] == "BlockStored":
            self._end_of_run(seq)
            self._stored(seq, group, medium, event)
        else:
            self._wrong(seq, f"event {event['type']!r}")

    def _stored(self, seq: int, group: int | None, medium: str, event: dict[str, Any]) -> None:
        hashes, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
        if not isinstance(size, int) or size < 1 or len(tokens) != size * len(hashes):
            self._wrong(seq, f"{len(hashes)} blocks of {size} in {len(tokens)} tokens")
            return
        if self.block_sizes.setdefault(group, size) != size and any(key[0] == group for key in self.blocks):
            self._wrong(seq, f"block size {size} after {self.block_sizes[group]} in group {group}")
        self.block_sizes[group] = size
        parent = event["parent_block_hash"]
        if parent is not None:
            if type(parent) is not type(hashes[0]):
                self._wrong(seq, f"parent {parent!r} of {hashes[0]!r}")
            if parent == hashes[0]:
                self._wrong(seq, f"{parent!r} is its own parent")
            self.orphans += self._find(group, parent) is None
        for i, block in enumerate(hashes):
            if (group, medium, block) in self.blocks:
                self._wrong(seq, f"stored twice: {group, medium, block}")
            piece = tuple(tuple(t) if isinstance(t, list) else t for t in tokens[i * size : (i + 1) * size])
            self.blocks[(group, medium, block)] = Block(parent, piece)
            parent = block

    def _removed(self, seq: int, group: int | None, medium: str, hashes: list[Any]) -> None:
        for block in hashes:
            known = self.blocks.pop((group, medium, block), None)
            if known is None:
                self._wrong(seq, f"removed but not there: {group, medium, block}")
            else:
                self._run.append(((group, medium), block, known.parent))

    def _end_of_run(self, seq: int) -> None:
        """Within a run of removals a child goes before its parent (a cycle has no leaf: one of its members is first)."""
        where = {(table, block): at for at, (table, block, _) in enumerate(self._run)}
        parents = {(table, block): parent for table, block, parent in self._run}
        for at, (table, block, parent) in enumerate(self._run):
            if parent is None or where.get((table, parent), at) >= at:
                continue
            seen, walk = {block}, parent
            while walk is not None and walk not in seen:
                seen.add(walk)
                walk = parents.get((table, walk))
            if walk != block:
                self._wrong(seq, f"{parent!r} removed before its child {block!r}")
        self._run.clear()


def matches_truth(name: str, router: PlainSetRouter) -> str | None:
    """None if the router holds exactly what the engine held at the end; otherwise a short account of the difference."""
    expected = truth(name)
    got: set[Key]
    if name in BY_PREFIX:
        got = {(None, "GPU", prefix) for prefix in router.prefixes()}
        if len(got) != len(router.blocks):
            return f"{name}: {len(router.blocks)} blocks but {len(got)} prefixes"
    else:
        got = set(router.blocks)
    missing, dead = expected - got, got - expected
    if not missing and not dead:
        return None
    return (
        f"{name}: {len(missing)} of {len(expected)} blocks missing, {len(dead)} dead"
        f" (for example missing {_some(missing)}, dead {_some(dead)})"
    )


def _some(keys: set[Key]) -> list[Key]:
    return sorted(keys, key=repr)[:2]
