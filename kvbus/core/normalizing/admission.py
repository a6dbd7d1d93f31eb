"""The first half of normalizing: which events of a batch may be applied at all.

Each event is checked once, and what is learned of the stream is learned from the whole batch before any of it is
applied. An event that is plainly in order (a known spelling, tokens in their shortest form) is checked in a few steps;
:mod:`~kvbus.core.normalizing.validate` has the rules for all others, and the reason for each break.
"""

from __future__ import annotations

from typing import Any, Final, Literal, cast

from msgspec import UNSET, Raw, UnsetType, structs

from kvbus.core.blocks.chunk import Chunk, Meta, Rest
from kvbus.core.blocks.index import MAX_RUN, MAX_SHARED, Index, carried_bytes, weight_of
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
from kvbus.core.wire.tokens import are_ids, are_pairs, body_at

Store = tuple[BlockStored[Any], Shape, Chunk, dict[Hash, Chunk] | None]
"""A store that is plainly in order: the event, its shape, its blocks, and these by hash; None where it is one block."""


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
        self._steps: list[Step] = []
        self.relearned = False
        """Blocks announced before would now be treated differently."""
        self.touched = False
        """An event was changed."""
        self.pairs = False
        """Tokens are pairs."""
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

    def forget(self) -> None:
        """Empty the caches: tables have gone."""
        self._shapes.clear()
        for step in self._steps:
            if type(step) is tuple:
                step[1].table = None
            elif type(step) is OddStore:
                step.shape.table = None

    def steps(self, batch: Batch) -> list[Step]:
        """The events of a batch that may be applied, in the order they came."""
        steps: list[Step] = []
        self._steps = steps
        self.relearned = self.touched = self.pairs = self.offloads = False
        stats = self._stats
        for reason in batch.rejects:
            stats.rejected[reason] += 1
        ours, others = (self._bytes, self._ints) if batch.bytes_hashes else (self._ints, self._bytes)
        plain = batch.uniform and ours + 1 >= others
        """Every store has the right kind of hash."""
        shapes, spoken = self._shapes, self._spoken
        stored = removed = taken = 0
        for position, event in enumerate(batch.events):
            if type(event) is BlockStored:
                stored += 1
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
                ) = structs.astuple(event)
                shape = shapes.get((size, medium, lora_id, lora_name, group, kind, window))
                if shape is None or shape.left_out:
                    if lacks_field(event):  # it could not be read
                        stats.rejected[Reason.MISSING_FIELD] += 1
                        stored -= 1
                        continue
                    shape = shape or self._shape(event)
                    if shape.left_out:
                        stats.filtered[Filtered.GROUP] += 1
                        continue
                count = len(hashes)
                if not (plain and shape.good and 0 < count <= MAX_RUN):
                    self._check(event, shape, batch, position)
                    continue
                tokens = bytes(raw_tokens)
                head = shape.heads.get(count) or shape.head(count)
                if not tokens.startswith(head):
                    self._check(event, shape, batch, position)
                    continue
                if are_ids(tokens, len(head)) is None:
                    if are_pairs(tokens, len(head)) is None:
                        self._check(event, shape, batch, position)
                        continue
                    self.pairs = True
                keys = None
                if raw_keys is not UNSET:
                    usual = self._usual_keys.get(count)
                    if usual is not None and usual[0] == raw_keys:
                        keys = usual[1]
                    elif (keys := self._good_keys(bytes(raw_keys), count)) is None:
                        self._check(event, shape, batch, position)
                        continue
                meta = shape.meta
                if carried != NOTHING_CARRIED:
                    if carried == shape.last_carried:
                        meta = shape.last_meta
                    else:
                        known = self._good_meta(event, shape, carried, count)
                        if known is None:
                            self._check(event, shape, batch, position)
                            continue
                        meta = known
                chunk = Chunk(hashes, None if parent is UNSET else parent, tokens, meta, keys)
                named = None
                if count != 1:
                    named = dict.fromkeys(hashes, chunk)
                    if len(named) != count:
                        self._check(event, shape, batch, position)
                        continue
                taken += 1
                if not (shape.sizes.quiet and (shape.several or (count == 1 and shape.native))):
                    self._observe(shape, size, count)
                steps.append((event, shape, chunk, named))
            elif type(event) is BlockRemoved:
                removed += 1
                if not batch.uniform or event.medium not in spoken or not event.block_hashes:
                    bad = self._check_removed(event)
                    if bad:
                        continue
                steps.append(event)
            elif type(event) is AllBlocksCleared:
                stats.cleared += 1
                steps.append(event)
        stats.stored += stored
        stats.removed += removed
        if batch.bytes_hashes:
            self._bytes += taken
        else:
            self._ints += taken
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

    def _check(self, event: BlockStored[Any], shape: Shape, batch: Batch, position: int) -> None:
        """Take in a store that is not plainly in order, or count what is wrong with it."""
        stats = self._stats
        size = event.block_size
        tokens = check_stored(event)
        if isinstance(tokens, Reason):
            stats.rejected[tokens] += 1
            if tokens is Reason.MISSING_FIELD:
                stats.stored -= 1  # it could not be read
            return
        if not event.block_hashes:
            stats.filtered[Filtered.NO_HASHES] += 1
            return
        if not self._right_kind(event.block_hashes[0]):
            stats.rejected[Reason.HASH_KIND] += 1
            return
        if not shape.known:
            stats.rejected[Reason.TOO_MANY_GROUPS] += 1
            self._refused.add(shape.medium)
            return
        if event.block_size != size:
            self.touched = True
            shape = self._shape(event)
        extras = None if batch.extras is None else batch.extras.get(position)
        for part in split_long(event):
            self._take_in(part, shape, tokens, extras)

    def _take_in(self, event: BlockStored[Any], shape: Shape, tokens: int, extras: Extras | None) -> None:
        """Make a step of a store that keeps the rules."""
        chunk = None
        if tokens:
            chunk = chunk_of(self._index, event, extras)
            self._observe(shape, event.block_size, len(event.block_hashes))
        else:
            self.offloads = True
        self._steps.append(OddStore(event, shape, chunk, extras))

    def _observe(self, shape: Shape, size: int, blocks: int) -> None:
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
            for step in self._steps:
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

    def _shape(self, event: BlockStored[Any]) -> Shape:
        """The shape of an event whose spelling is not known."""
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
            spelling = (size, event.medium, event.lora_id, event.lora_name, event.group_idx, kind, window)
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
