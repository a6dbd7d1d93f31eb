"""A router that keeps a plain set of blocks, which tests compare with an engine's cache. All other test routers use it.

>>> router = PlainSetRouter()
>>> for message in published:
...     router.apply(message.seq, message.payload)
>>> assert router.violations == []
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Final, NamedTuple

import msgspec

from kvbus.core.types import MEDIA, medium_key

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


def events_of(payload: bytes) -> list[dict[str, Any]]:
    """Return the events of a batch as maps.

    The batch may have encoded them as maps or as arrays of positional fields.
    """
    return [_named(event) for event in msgspec.msgpack.decode(payload)[1]]


def unpack_rank(payload: bytes) -> int:
    """Return the rank that the payload of a batch names."""
    rank: int = msgspec.msgpack.decode(payload)[2]
    return rank


def _named(event: list[Any] | dict[str, Any]) -> dict[str, Any]:
    if isinstance(event, dict):
        return event
    names = STORED_NAMES if event[0] == "BlockStored" else REMOVED_NAMES
    return {"type": event[0], **dict(zip(names, event[1:], strict=False))}


def _names(event: dict[str, Any]) -> tuple[Any, Any]:
    """Return the locality and the owner that an event names; None for each that is no text."""
    found = event.get("locality"), event.get("ownership")
    return tuple(each if isinstance(each, str) else None for each in found)  # type: ignore[return-value]


class Block(NamedTuple):
    """A router's record of one block. ``tokens`` has token ids or, with EAGLE, pairs of token ids."""

    parent: int | bytes | None
    tokens: tuple[Any, ...]


class PlainSetRouter:
    """A router that keeps a set of blocks: a store adds blocks, a removal deletes blocks, a clear empties the set.

    The router does not count copies of a block. A block that kvbus names with several localities or owners is there
    until its last removal. ``violations`` lists every event that breaks a rule of kvbus's output:
    seqs without gaps, valid events, and one block size for each group. A store with an unknown parent breaks no rule.
    The router counts such stores in ``orphans``.
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
        self._residencies: dict[tuple[int | None, str, int | bytes], set[tuple[Any, Any]]] = {}
        """The localities and owners under which kvbus has announced each block."""

    def apply(self, seq: int, payload: bytes) -> None:
        """Apply a batch. Ignore a batch that the router has seen before, because replay and live stream may overlap."""
        if self.next_seq is not None:
            if seq < self.next_seq:
                return
            if seq > self.next_seq:
                self._wrong(seq, f"gap: expected seq {self.next_seq}")
        self.next_seq = seq + 1
        self.take(seq, payload)

    def take(self, seq: int, payload: bytes) -> None:
        """Apply a batch without checking its seq. ``seq`` is used only to report violations."""
        batch = msgspec.msgpack.decode(payload)
        if not isinstance(batch, list) or len(batch) != 3:
            self._wrong(seq, "a batch is an array of three")
            return
        if not isinstance(batch[0], float) or not math.isfinite(batch[0]):
            self._wrong(seq, f"ts {batch[0]!r}")
        self.ranks.add(batch[2])
        for event in batch[1]:
            self._event(seq, _named(event))
        self._end_of_run(seq)

    def prefixes(self) -> set[str]:
        """Return for each block a hash of the prefix that ends with the block.

        The hash is the hex SHA-256 of all tokens from the root to the end of the block, with four little-endian bytes
        per token.
        """
        return {
            hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in self.path(group, block))).hexdigest()
            for group, _, block in self.blocks
        }

    def path(self, group: int | None, block: int | bytes) -> list[Any]:
        """Return the tokens of a block and of its ancestors, beginning at the root of the block tree.

        If the router does not know an ancestor, the tokens begin after this ancestor.
        """
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
            self._residencies.clear()
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
            self._removed(seq, group, medium, event)
        elif event["type"] == "BlockStored":
            self._end_of_run(seq)
            self._stored(seq, group, medium, event)
        else:
            self._wrong(seq, f"event {event['type']!r}")

    def _stored(self, seq: int, group: int | None, medium: str, event: dict[str, Any]) -> None:
        hashes, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
        if not isinstance(size, int) or size < 1 or len(tokens) not in (0, size * len(hashes)):
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
        names = _names(event)
        for i, block in enumerate(hashes):
            held = self._residencies.setdefault((group, medium, block), set())
            if names in held:
                self._wrong(seq, f"stored twice: {group, medium, block}")
            held.add(names)
            piece = tuple(tuple(t) if isinstance(t, list) else t for t in tokens[i * size : (i + 1) * size])
            self.blocks[(group, medium, block)] = Block(parent, piece)
            parent = block

    def _removed(self, seq: int, group: int | None, medium: str, event: dict[str, Any]) -> None:
        names = _names(event)
        for block in event["block_hashes"]:
            held = self._residencies.get((group, medium, block), set())
            if names not in held:
                self._wrong(seq, f"removed but not there: {group, medium, block}")
                continue
            held.discard(names)
            if not held and (known := self.blocks.pop((group, medium, block), None)) is not None:
                self._run.append(((group, medium), block, known.parent))

    def _end_of_run(self, seq: int) -> None:
        """Check that a run of removals removes each child before its parent.

        A cycle of parents has no leaf, so any block of the cycle may be first.
        """
        where = {(table, block): at for at, (table, block, _) in enumerate(self._run)}
        parents = {(table, block): parent for table, block, parent in self._run}
        for at, (table, block, parent) in enumerate(self._run):
            if parent is None or where.get((table, parent), at) >= at:
                continue
            seen = {block}
            walk: int | bytes | None = parent
            while walk is not None and walk not in seen:
                seen.add(walk)
                walk = parents.get((table, walk))
            if walk != block:
                self._wrong(seq, f"{parent!r} removed before its child {block!r}")
        self._run.clear()


class RankedRouter:
    """A router of a merged stream. It counts one series of seqs, and keeps a plain set of blocks for each rank."""

    def __init__(self, first: int = 0) -> None:
        self.next = first
        self.views: dict[int, PlainSetRouter] = {}

    def apply(self, seq: int, payload: bytes) -> bool:
        """Apply a batch unless the router has seen it before. Return False if earlier batches are missing."""
        if seq == self.next:
            self.next += 1
            self.take(payload)
            return True
        return seq < self.next

    def take(self, payload: bytes) -> None:
        """Apply a batch without checking its seq."""
        rank = msgspec.msgpack.decode(payload)[2]
        self.views.setdefault(rank, PlainSetRouter()).take(self.next - 1, payload)

    @property
    def violations(self) -> list[str]:
        return [f"rank {rank}, {what}" for rank, view in self.views.items() for what in view.violations]

    @property
    def blocks(self) -> set[tuple[Any, ...]]:
        """Keys of all blocks that the router holds. A key has rank, group, medium key and hash."""
        return {(rank, *key) for rank, view in self.views.items() for key in view.blocks}

    def hashes(self) -> dict[int, set[int | bytes]]:
        """Return the block hashes of each rank, on any medium and in any group."""
        return {rank: {block for *_, block in view.blocks} for rank, view in self.views.items()}
