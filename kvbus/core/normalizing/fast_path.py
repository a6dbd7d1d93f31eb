"""The fast path through normalizing, for batches that already are what a router may rely on.

Nearly all traffic is of this kind: stores of new blocks behind known parents, in the one block size of their group, and
removals of known blocks, leaf first. Such a batch is applied to the index event by event and not changed, and its
payload can be sent on as it came. Every rule of ``admission``, ``validate`` and ``normalizer`` is checked here too, in
the cheapest form it has. Whatever is not plainly in order is undone and left to them, so this module has no rule of its
own.

Whether a batch takes the fast path follows from the batch and the state alone, never from what is cached here. So a
restart that handles the log again comes to the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from math import isfinite
from operator import itemgetter
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from kvbus.core.blocks.index import MAX_RUN, Chunk, Index, Meta, Table
from kvbus.core.blocks.size import ITEM_BYTES, MANY
from kvbus.core.normalizing.admission import Admission
from kvbus.core.normalizing.block_size import BlockSizeDetector, Treatment
from kvbus.core.normalizing.left_out import LeftOut
from kvbus.core.normalizing.validate import keys_ok
from kvbus.core.stats import SourceStats
from kvbus.core.types import PREFIX_KINDS, Filtered, Hash, medium_key
from kvbus.core.wire.codec import decode_plain, decode_value
from kvbus.core.wire.schema import PlainBatch, PlainRemoved, PlainStored

_TOKEN: Final = rb"(?:\xcd..|\xce....|[\x00-\x7f]|\xcc.)"
_tokens: Final = re.compile(rb"(?:" + _TOKEN * 4 + rb")*+" + _TOKEN + rb"*+", re.DOTALL).fullmatch
"""Matches unsigned 32-bit integers in their shortest form, one after the other: three times as fast as decoding."""

Taken = tuple[PlainBatch[Any], bool]
"""A batch that was applied, and whether its payload may be sent on as it is: no field is missing that kvbus sends."""

Undo = tuple[MutableMapping[Hash, Chunk], Hash, Chunk]
"""The table a block was removed from, its hash, and the chunk to put back."""

Counted = tuple[dict[Hash, int], Hash, int]
"""The table's copies, the block of which one was counted, and by how much."""

_MAX_SHAPES: Final = 4096

_chunk_of: Final = itemgetter(2)


class _Shape:
    """What stores of one spelling have in common: where they go, and all that does not change between them."""

    __slots__ = ("complete", "group", "heads", "meta", "several", "table")

    def __init__(self, table: Table, group: int | None, meta: Meta) -> None:
        self.table = table
        self.group = group
        self.meta = meta
        self.several = False
        """Whether events of several blocks may take the fast path; the first one teaches the block size."""
        self.complete = False
        """Every field that kvbus always sends is there."""
        self.heads: dict[int, bytes] = {}
        """The array header of the tokens, by number of blocks."""

    def head(self, blocks: int) -> bytes:
        """The msgpack array header of the tokens of so many blocks."""
        count = blocks * self.meta.block_size
        if count < 16:
            head = bytes([0x90 | count])
        elif count < 1 << 16:
            head = b"\xdc" + count.to_bytes(2, "big")
        else:
            head = b"\xdd" + count.to_bytes(4, "big")
        if len(self.heads) < _MAX_SHAPES:
            self.heads[blocks] = head
        return head


class FastPath:
    """Applies plain batches to the index of one source.

    Args:
        index: the live blocks.
        block_sizes: block sizes, by group.
        admission: which hashes the stream speaks in, and which groups it leaves out.
        left_out: what the limit of the index counts, too.
        stats: where copies that are left out are counted.
        max_blocks: limit of the index.
        max_bytes: the same in bytes.
        prefix_only: groups whose kind carries no prefixes are left out.
        count_copies: a copy has to be removed once more, before the block is gone.
    """

    def __init__(
        self,
        index: Index,
        block_sizes: dict[int | None, BlockSizeDetector],
        admission: Admission,
        left_out: LeftOut,
        stats: SourceStats,
        *,
        max_blocks: int,
        max_bytes: int,
        prefix_only: bool,
        count_copies: bool,
    ) -> None:
        # Shared with the slow path.
        self._index = index
        self._block_sizes = block_sizes
        self._admission = admission
        self._left_out = left_out
        self._stats = stats

        # The operator's choices.
        self._max_blocks = max_blocks
        self._max_bytes = max_bytes
        self._prefix_only = prefix_only
        self._count_copies = count_copies

        self.bytes_hashes = False
        """The kind of hash in the last batch taken."""

        # What is cached; :meth:`forget` empties it.
        self._shapes: dict[tuple[Any, ...], _Shape] = {}
        """By the spelling of a store."""

        self._most_blocks = self._most_bytes = -1
        """What the index may hold beside what is left out."""

        # ``extra_keys`` that say nothing, by number of blocks: kept once for all blocks that have them.
        self._usual_keys: dict[int, tuple[Raw, bytes]] = {}

    def forget(self) -> None:
        """Empty the caches: the tables, what is left out, or the known block sizes have changed."""
        self._shapes.clear()
        self._most_blocks = self._most_bytes = -1

    def take(self, payload: bytes) -> Taken | None:
        """Apply a batch; None, and nothing has changed, if it has to take the slow path."""
        batch = decode_plain(payload, bytes_first=self.bytes_hashes)
        if batch is None or not isfinite(batch.ts):
            return None
        shapes, unchanged = self._shapes, True
        undo: list[Undo] = []
        firsts: list[tuple[Table, Chunk]] = []
        copies: list[Counted] = []
        gone: set[Hash] = set()
        stores = added = size = done = again = 0
        bytes_hashes = False
        for event in batch.events:
            if type(event) is not PlainStored:
                if type(event) is not PlainRemoved or not event.block_hashes:
                    break
                bytes_hashes = type(event.block_hashes[0]) is bytes
                if not self._remove(event, gone, undo, firsts, copies):
                    break
                done += 1
                continue
            spelling = (
                event.block_size,
                event.medium,
                event.group_idx,
                event.lora_id,
                event.lora_name,
                event.kv_cache_spec_kind,
            )
            shape = shapes.get(spelling) or self._shape(spelling, event)
            hashes = event.block_hashes
            count = len(hashes)
            bytes_hashes = count > 0 and type(hashes[0]) is bytes
            if shape is None or (count != 1 and (not 0 < count <= MAX_RUN or not shape.several)):
                break
            tokens = bytes(event.token_ids)
            head = shape.heads.get(count) or shape.head(count)
            if not tokens.startswith(head) or _tokens(tokens, len(head)) is None:
                break
            raw_keys, keys = event.extra_keys, None
            if raw_keys is not UNSET:  # type: ignore[comparison-overlap]
                usual = self._usual_keys.get(count)
                if usual is not None and usual[0] == raw_keys:
                    keys = usual[1]
                elif (keys := self._checked_keys(bytes(raw_keys), count)) is None:
                    break
                size += len(keys)
            blocks = shape.table.blocks
            parent = event.parent_block_hash
            if parent is not None:
                holder = blocks.get(parent)
                if holder is None:
                    if self._index.find(shape.group, parent) is None:
                        break
                elif holder.hashes[-1] == parent:
                    parent = holder.hashes[-1]  # one object for one hash
            if hashes[0] in blocks:
                if not self._copy(event, tokens, shape, copies):
                    break
                size -= ITEM_BYTES + len(keys or b"")  # it makes no chunk
                again += parent is None and count > 1
                done += 1
                stores += 1
                continue
            chunk = Chunk(hashes, parent, tokens, shape.meta, keys)
            if count == 1:
                blocks[hashes[0]] = chunk
            else:
                if not blocks.keys().isdisjoint(hashes):
                    break
                before = len(blocks)
                for block in hashes:
                    blocks[block] = chunk
                if len(blocks) != before + count:  # one of them twice
                    for block in set(hashes):
                        del blocks[block]
                    break
            if gone:
                gone = set()
            if not shape.complete:
                unchanged = False
                _complete(event)
            added += count
            size += len(tokens)
            stores += 1
            done += 1
        if done and done == len(batch.events):
            now = self._index.size
            live = now.blocks + added
            size += now.at_most + ITEM_BYTES * (added + stores)
            if (size <= self._most_bytes and live <= self._most_blocks) or self._fits(live - len(undo), size):
                self.bytes_hashes = bytes_hashes
                if self._admission.count_plain(bytes if bytes_hashes else int, stores, done - stores):
                    now.blocks = live
                    now.at_most = size
                    if undo:
                        now.blocks = live - len(undo)
                        now.firsts_gone += firsts
                        if now.left or len(now.firsts_gone) > MANY:
                            now.removed(map(_chunk_of, undo))
                    if copies:
                        unchanged = False
                        batch.events = [event for event in batch.events if event.block_hashes]  # type: ignore[union-attr]
                        self._stats.filtered[Filtered.COPY] += len(copies)
                        self._stats.reannounced += again
                    return batch, unchanged
            elif now.firsts_gone:
                self._undo(batch, done, undo, copies)
                now.settle()  # bytes were counted that have gone
                return self.take(payload)
        self._undo(batch, done, undo, copies)
        return None

    def _fits(self, blocks: int, size: int) -> bool:
        """Whether the index may hold so many blocks and bytes, beside what is left out."""
        self._most_blocks = self._max_blocks - len(self._left_out)
        self._most_bytes = self._max_bytes - self._left_out.bytes
        return blocks <= self._most_blocks and size <= self._most_bytes

    def _copy(self, event: PlainStored[Any], tokens: bytes, shape: _Shape, copies: list[Counted]) -> bool:
        """Count an event whose blocks are all live, with the same tokens; nothing of it is announced."""
        blocks, hashes = shape.table.blocks, event.block_hashes
        held = blocks[hashes[0]]
        if held.hashes == hashes:
            if held.tokens != tokens or any(blocks.get(block) is not held for block in hashes):
                return False
        elif len(hashes) != 1 or held.block_tokens(held.hashes.index(hashes[0])) != decode_value(tokens):
            return False
        counts = shape.table.copies
        for block in hashes:
            if self._count_copies:
                counts[block] = count = counts.get(block, 0) + 1
                self._stats.most_copies = max(self._stats.most_copies, count)
            copies.append((counts, block, int(self._count_copies)))
        event.block_hashes = ()
        return True

    def _remove(
        self,
        event: PlainRemoved[Any],
        gone: set[Hash],
        undo: list[Undo],
        firsts: list[tuple[Table, Chunk]],
        copies: list[Counted],
    ) -> bool:
        """``gone`` are the blocks removed since the last store: no parent of a block may be among them."""
        medium = event.medium
        if isinstance(medium, UnsetType) or (medium is not None and medium != "GPU" and medium != medium.upper()):
            return False
        name = medium_key(medium)
        group = event.group_idx
        table = self._index.tables.get((None if isinstance(group, UnsetType) else group, name))  # type: ignore[arg-type]
        hashes = event.block_hashes
        if table is None or not hashes:
            return False
        if table.copies and not table.copies.keys().isdisjoint(hashes):
            if len(set(hashes)) != len(hashes) or not table.blocks.keys() >= set(hashes):
                return False
            left = tuple(block for block in hashes if block not in table.copies)
            for block in hashes:
                if block in table.copies:
                    table.remove(block)
                    copies.append((table.copies, block, -1))
            hashes = event.block_hashes = left
        blocks = table.blocks
        before: Chunk | None = None
        at = -1
        """Where the last block that was removed is in its chunk ``before``."""
        for block in hashes:
            chunk = blocks.pop(block, None)
            if chunk is None:
                return False
            undo.append((blocks, block, chunk))
            if chunk is before and at and chunk.hashes[at - 1] == block:
                at -= 1  # the usual order, a chain from its end
            else:
                meta = chunk.meta
                if not at:
                    firsts.append((table, before))  # type: ignore[arg-type]
                if chunk.rest is not None or meta.medium != medium or meta.group_idx != group:
                    return False  # reblocked, or spelled otherwise than when it was stored
                before, at = chunk, chunk.hashes.index(block)
            if gone and (chunk.hashes[at - 1] if at else chunk.parent) in gone:
                return False
            gone.add(block)
        if not at:
            firsts.append((table, before))  # type: ignore[arg-type]
        return True

    def _undo(self, batch: PlainBatch[Any], done: int, undo: list[Undo], copies: list[Counted]) -> None:
        for counts, block, change in copies:
            counts[block] = counts.get(block, 0) - change
            if not counts[block]:
                del counts[block]
        removed = sum(len(event.block_hashes) for event in batch.events[:done] if type(event) is PlainRemoved)
        while len(undo) > removed:  # of the event that was broken off
            blocks, block, chunk = undo.pop()
            blocks[block] = chunk
        for event in reversed(batch.events[:done]):
            if type(event) is PlainRemoved:
                for _ in event.block_hashes:
                    blocks, block, chunk = undo.pop()
                    blocks[block] = chunk
            elif type(event) is PlainStored:
                table = self._index.tables[_group(event.group_idx), medium_key(_or_none(event.medium))]  # type: ignore[index]
                for block in event.block_hashes:
                    del table.blocks[block]

    def _checked_keys(self, keys: bytes, count: int) -> bytes | None:
        """``extra_keys`` of so many blocks; None if they are not what they should be."""
        try:
            value = decode_value(keys)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None
        if not keys_ok(value, count):
            return None
        if not value or value.count(None) == len(value):
            self._usual_keys[count] = Raw(keys), keys
        return keys

    def _shape(self, spelling: tuple[Any, ...], event: PlainStored[Any]) -> _Shape | None:
        """The shape of an event whose spelling was not seen before; None if it has to take the slow path."""
        group, kind, size = _group(event.group_idx), event.kv_cache_spec_kind, event.block_size
        if self._prefix_only and isinstance(kind, str) and kind not in PREFIX_KINDS:
            return None
        medium = _or_none(event.medium)
        name = medium_key(medium)
        if name is None or (medium is not None and medium != medium.upper()):
            return None
        block_sizes = self._block_sizes.get(group)
        if block_sizes is None or not block_sizes.settled or block_sizes.treatment(size) is not Treatment.NATIVE:
            return None
        table = self._index.table(group, name)
        lora = _or_none(event.lora_id), _or_none(event.lora_name)
        meta = self._index.shared_meta(Meta(size, *lora, medium, event.group_idx, kind, UNSET))
        if meta.weight:
            return None  # too long to be kept
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
        shape = self._shapes[spelling] = _Shape(table, group, meta)
        shape.several = block_sizes.proven == size
        shape.complete = UNSET not in (event.lora_id, event.medium, event.lora_name)
        return shape


def _group(group: int | UnsetType | None) -> int | None:
    return None if isinstance(group, UnsetType) else group


def _or_none(value: Any) -> Any:
    return None if value is UNSET else value


def _complete(event: PlainStored[Any]) -> None:
    """Fill in the fields that were not sent, as kvbus sends them."""
    event.lora_id = _or_none(event.lora_id)
    event.medium = _or_none(event.medium)
    event.lora_name = _or_none(event.lora_name)
