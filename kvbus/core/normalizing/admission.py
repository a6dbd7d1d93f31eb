"""The first half of normalizing: which events of a batch may be applied at all.

Each event is checked once, and what is learned of the stream is learned from the whole batch before any of it is
applied. An event that is plainly in order (a known spelling, tokens in their shortest form) is checked in a few steps;
:mod:`~kvbus.core.normalizing.validate` has the rules for all others, and the reason for each break.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, cast

from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import astuple as fields_of

from kvbus.core.blocks.index import MAX_RUN, MAX_SHARED, Chunk, Index, Meta, Rest, carried_bytes, weight_of
from kvbus.core.blocks.size import ITEM_BYTES
from kvbus.core.normalizing.block_size import BlockSizeDetector
from kvbus.core.normalizing.shape import NOTHING_CARRIED, Shape, Sizes, own_copy
from kvbus.core.normalizing.validate import (
    MAX_SIZE,
    check_removed,
    check_stored,
    keys_ok,
    lookahead_ok,
    texts_ok,
)
from kvbus.core.stats import SourceStats
from kvbus.core.types import PREFIX_KINDS, UNKNOWN_MEDIUM, Filtered, Hash, Reason, medium_key
from kvbus.core.wire.codec import Batch, Extras, lacks_field
from kvbus.core.wire.parts import parts
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, BlockStored
from kvbus.core.wire.tokens import body_at

Store = tuple[BlockStored[Any], Shape, Chunk, dict[Hash, Chunk] | None, int, int]
"""A store that is plainly in order: the event, its shape, its blocks, these by hash (None where it is one), their
number, and the bytes they hold."""


class OddStore:
    """Any other store that may be applied."""

    __slots__ = ("chunk", "event", "extras", "shape")

    def __init__(self, event: BlockStored[Any], shape: Shape, chunk: Chunk | None, extras: Extras | None) -> None:
        self.event = event
        self.shape = shape
        self.chunk = chunk
        """None where it has no tokens."""
        self.extras = extras
        """Fields no struct knows."""


Step = Store | OddStore | BlockRemoved[Any] | AllBlocksCleared
"""An event that may be applied."""

_MAX_SHAPES: Final = 4096
_NO_SHAPES: Final[dict[tuple[Any, ...], Shape]] = {}


class Admission:
    """Checks each event of one source and counts what is wrong with it. Its only state is what the checks learn.

    Args:
        index: the live blocks, whose metas are shared.
        stats: where events and rejections are counted.
        refused: takes the media of stores that a limit has refused.
        pinned: the operator's block size.
        groups: ``prefix`` leaves out groups whose kind carries no prefixes.
        max_groups: groups that anything is remembered of; stores of further ones are refused.
    """

    def __init__(
        self,
        index: Index,
        stats: SourceStats,
        refused: set[str],
        *,
        pinned: int | None,
        groups: Literal["prefix", "all"],
        max_groups: int,
    ) -> None:
        self._index = index
        self._stats = stats
        self._refused = refused
        self._pinned = pinned
        self._prefix_only = groups == "prefix"
        self._max_groups = max_groups

        # What was learned of the stream.
        self._ints = 0
        """Stores that named their blocks by integers."""
        self._bytes = 0
        """The same by byte strings."""
        self.known: set[int | None] = set()
        """Groups that stores were of."""
        self.no_prefix: set[int | None] = set()
        """Groups that announced themselves as sliding window, chunked local or mamba."""
        self.media: set[str] = set()
        """Media that events have spoken of."""
        self._spoken: set[Any] = set()
        """Known media as events have named them, so that each is looked up once."""
        self.sizes: dict[int | None, Sizes] = {}
        """By group, in the order they came."""

        # Of the batch that was looked at last.
        self.relearned = False
        """Blocks announced before would now be treated differently."""
        self.touched = False
        """An event was changed."""
        self.offloads = False
        """A store names blocks without their tokens."""

        # What is cached; :meth:`forget` empties it.
        self._shapes: dict[tuple[Any, ...], Shape] = {}
        """By the spelling of a store."""
        self._usual_keys: dict[int, tuple[Raw, bytes]] = {}
        """``extra_keys`` that say nothing, by number of blocks: kept once for all blocks that have them."""

    @property
    def only_without_prefix(self) -> bool:
        """Whether groups have stored blocks, and all of them are left out."""
        return bool(self.no_prefix) and self.known <= self.no_prefix

    def forget(self, steps: Sequence[Step] = ()) -> None:
        """Empty the caches: tables have gone. The batch under way still has these steps."""
        self._shapes.clear()
        for step in steps:
            if type(step) is tuple:
                step[1].table = None
            elif type(step) is OddStore:
                step.shape.table = None

    def steps(self, batch: Batch) -> list[Step]:
        """The events of a batch that may be applied, in the order they came."""
        steps: list[Step] = []
        self.relearned = self.touched = self.offloads = False
        stats = self._stats
        ours, others = (self._bytes, self._ints) if batch.bytes_hashes else (self._ints, self._bytes)
        # where the kind of hash is in doubt, no store is plainly in order
        shapes = self._shapes if batch.uniform and ours + 1 >= others else _NO_SHAPES
        spoken = self._spoken
        removed = cleared = odd = 0
        for event in batch.events:
            if type(event) is BlockStored:
                (
                    hashes,
                    parent,
                    raw_tokens,
                    size,
                    lora_id,
                    medium,
                    lora_name,
                    group,
                    kind,
                    window,
                    raw_keys,
                    *carried,
                ) = fields_of(event)
                shape = shapes.get((size, medium, lora_id, lora_name, group, kind, window))
                if shape is None:
                    odd += self._check(event, batch, steps)
                    continue
                count = len(hashes)
                match = shape.matchers.get(count)
                tokens = bytes(raw_tokens)
                if match is None or match(tokens) is None or not shape.sizes.quiet:
                    odd += self._check(event, batch, steps)
                    continue
                held = len(tokens) + ITEM_BYTES * (1 + count)
                keys = None
                if raw_keys is not UNSET:
                    usual = self._usual_keys.get(count)
                    if usual is not None and usual[0] == raw_keys:
                        keys = usual[1]
                    elif (keys := self._good_keys(bytes(raw_keys), count)) is None:
                        odd += self._check(event, batch, steps)
                        continue
                    held += len(keys)
                meta = shape.meta
                if carried != NOTHING_CARRIED:
                    if carried == shape.last_carried:
                        meta = shape.last_meta
                    else:
                        own = self._good_meta(event, shape, carried, count)
                        if own is None:
                            odd += self._check(event, batch, steps)
                            continue
                        meta = own
                chunk = Chunk(hashes, parent, tokens, meta, keys)
                named = None
                if count != 1:
                    named = dict.fromkeys(hashes, chunk)
                    if len(named) != count:
                        odd += self._check(event, batch, steps)
                        continue
                steps.append((event, shape, chunk, named, count, held))
            elif type(event) is BlockRemoved:
                removed += 1
                known = batch.uniform and event.medium in spoken and event.block_hashes
                if not known and self._check_removed(event):
                    continue
                odd += 1
                steps.append(event)
            elif type(event) is AllBlocksCleared:
                cleared += 1
                odd += 1
                steps.append(event)
        stats.stored += len(batch.events) - removed - cleared
        stats.removed += removed
        stats.cleared += cleared
        if batch.rejects:
            for reason in batch.rejects:
                stats.rejected[reason] += 1
        if batch.bytes_hashes:
            self._bytes += len(steps) - odd
        else:
            self._ints += len(steps) - odd
        return steps

    def _check_removed(self, event: BlockRemoved[Any]) -> bool:
        """Whether the removal cannot be applied; that is counted."""
        self._note_medium(event.medium)
        found = check_removed(event)
        if isinstance(found, Reason):
            self._stats.rejected[found] += 1
            return True
        if not event.block_hashes:
            self._stats.filtered[Filtered.NO_HASHES] += 1
            return True
        return False

    def _check(self, event: BlockStored[Any], batch: Batch, steps: list[Step]) -> int:
        """Take in a store that is not plainly in order, or count what is wrong with it; how many steps it makes."""
        stats = self._stats
        if lacks_field(event):
            stats.rejected[Reason.MISSING_FIELD] += 1
            stats.stored -= 1  # it could not be read
            return 0
        shape = self._shape_of(event)
        if shape.left_out:
            stats.filtered[Filtered.GROUP] += 1
            return 0
        size = event.block_size
        tokens = check_stored(event)
        if isinstance(tokens, Reason):
            stats.rejected[tokens] += 1
            return 0
        if not event.block_hashes:
            stats.filtered[Filtered.NO_HASHES] += 1
            return 0
        if not self._right_kind(event.block_hashes[0]):
            stats.rejected[Reason.HASH_KIND] += 1
            return 0
        if not shape.known:
            stats.rejected[Reason.TOO_MANY_GROUPS] += 1
            self._refused.add(shape.medium)
            return 0
        if event.block_size != size:
            self.touched = True
            shape = self._shape_of(event)
        extras = None
        if batch.extras is not None:
            extras = next((batch.extras.get(at) for at, each in enumerate(batch.events) if each is event), None)
        several = split_long(event)
        for part in several:
            chunk = None
            if tokens:
                chunk = chunk_of(self._index, part, extras)
                self._observe(shape, part.block_size, len(part.block_hashes), steps)
            else:
                self.offloads = True
            steps.append(OddStore(part, shape, chunk, extras))
        if tokens:
            shape.expect(len(event.block_hashes))
        return len(several)

    def _observe(self, shape: Shape, size: int, blocks: int, steps: list[Step]) -> None:
        """Learn block sizes from a store."""
        sizes = self.sizes.get(shape.group)
        if sizes is None:
            sizes = Sizes(BlockSizeDetector(self._pinned, numbered=shape.group is not None))
            self.sizes[shape.group] = sizes
        detector = sizes.detector
        before = (detector.proven, detector.single, detector.divisor, detector.variable)
        self.relearned |= detector.observe(size, blocks)
        sizes.quiet = detector.settled
        if before != (detector.proven, detector.single, detector.divisor, detector.variable):
            for other in self._shapes.values():
                if other.group == shape.group:
                    other.learn(sizes)
            for step in steps:
                if type(step) is tuple and step[1].group == shape.group:
                    step[1].learn(sizes)
            shape.learn(sizes)
        elif shape.sizes is not sizes:
            shape.learn(sizes)

    def _good_keys(self, keys: bytes, count: int) -> bytes | None:
        """``extra_keys`` of so many blocks; None if they are not what they should be."""
        if not keys_ok(keys, count):
            return None
        if not keys[body_at(keys) or 1 :].strip(b"\xc0"):
            self._usual_keys[count] = Raw(keys), keys
        return keys

    def _good_meta(self, event: BlockStored[Any], shape: Shape, carried: list[Any], count: int) -> Meta | None:
        """The meta of a store with fields that are only carried; None if they are not what they should be, or long."""
        if not texts_ok(carried[:4]):
            return None
        lookahead = carried[4]
        if lookahead is not UNSET and not lookahead_ok(lookahead, count):
            return None
        meta = self._index.meta(event)
        if meta.weight:
            return None
        if lookahead is UNSET:  # its form depends on the number of blocks
            shape.last_carried, shape.last_meta = own_copy(carried), meta
        return meta

    def _shape_of(self, event: BlockStored[Any]) -> Shape:
        """The shape of an event."""
        spelling = (
            event.block_size,
            event.medium,
            event.lora_id,
            event.lora_name,
            event.group_idx,
            event.kv_cache_spec_kind,
            event.kv_cache_spec_sliding_window,
        )
        return self._shapes.get(spelling) or self._new_shape(event, spelling)

    def _new_shape(self, event: BlockStored[Any], spelling: tuple[Any, ...]) -> Shape:
        group = None if isinstance(event.group_idx, UnsetType) else event.group_idx
        self._note_medium(event.medium)
        known = group in self.known or self._gets_known(group)
        kind, size = event.kv_cache_spec_kind, event.block_size
        medium = medium_key(event.medium)
        spelled = event.medium.upper() if isinstance(event.medium, str) else None
        lora_id = None if isinstance(event.lora_id, UnsetType) else event.lora_id
        lora_name = None if isinstance(event.lora_name, UnsetType) else event.lora_name
        window = event.kv_cache_spec_sliding_window
        shape = Shape(
            group,
            medium or UNKNOWN_MEDIUM,
            spelled,
            Meta(size, lora_id, lora_name, spelled, event.group_idx, kind, window),
        )
        shape.known = known
        shape.complete = (event.medium, event.lora_id, event.lora_name) == (spelled, lora_id, lora_name)
        if self._prefix_only and isinstance(kind, str) and kind not in PREFIX_KINDS:
            shape.left_out = True
            if known:
                self.no_prefix.add(group)
        elif known and medium is not None and 0 < size <= MAX_SIZE:
            shape.meta = shape.last_meta = self._index.shared_meta(shape.meta)
            shape.good = True
            sizes = self.sizes.get(group)
            if sizes is not None:
                shape.learn(sizes)
        if weight_of(shape.meta) > MAX_SHARED:
            shape.good = False
        elif shape.good or shape.left_out:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[spelling] = shape
        return shape

    def _note_medium(self, medium: str | UnsetType | None) -> None:
        key = medium_key(medium)
        if key is not None:
            self._spoken.add(medium)
        self.media.add(key or UNKNOWN_MEDIUM)

    def _gets_known(self, group: int | None) -> bool:
        if len(self.known) >= self._max_groups:
            return False
        self.known.add(group)
        return True

    def _right_kind(self, block: Hash) -> bool:
        """Whether the hash is of this stream's kind. The majority decides, so an odd event changes nothing."""
        if isinstance(block, int):
            self._ints += 1
            return self._ints >= self._bytes
        self._bytes += 1
        return self._bytes >= self._ints

    def dump(self) -> list[Any]:
        """Plain data for a restart."""
        return [[self._ints, self._bytes], list(self.no_prefix), list(self.known)]

    def load(self, data: list[Any]) -> None:
        """The reverse of :meth:`dump`."""
        (self._ints, self._bytes), no_prefix, known = data
        self.no_prefix.update(no_prefix)
        self.known.update(known)


def split_long(event: BlockStored[Any]) -> list[BlockStored[Any]]:
    """A store of more than :data:`MAX_RUN` blocks as several that follow one another."""
    count = len(event.block_hashes)
    if count <= MAX_RUN:
        return [event]
    runs = [(at, min(at + MAX_RUN, count)) for at in range(0, count, MAX_RUN)]
    return cast("list[BlockStored[Any]]", parts(event, runs))


def chunk_of(index: Index, event: BlockStored[Any], extras: Extras | None) -> Chunk:
    """The blocks of a store that keeps the rules."""
    meta = index.meta(event)
    parent = event.parent_block_hash
    chunk = Chunk(
        event.block_hashes,
        None if isinstance(parent, UnsetType) else parent,
        bytes(event.token_ids),
        meta,
        carried_bytes(event.extra_keys),
    )
    if extras or meta.weight:
        chunk.rest = Rest({name: bytes(raw) for name, raw in (extras or {}).items()} or None)
    return chunk
