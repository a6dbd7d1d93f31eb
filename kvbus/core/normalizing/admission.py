"""The first half of normalizing: which events of a batch may be applied at all.

Admission checks each event once and learns block sizes from the whole batch before any event is applied.
:mod:`~kvbus.core.normalizing.validate` has the rules that one event must keep, and a reason for each break.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, cast

from msgspec import UNSET, UnsetType
from msgspec.structs import astuple as fields_of

from kvbus.core.blocks.chunk import Chunk, Meta, Rest
from kvbus.core.blocks.index import MAX_RUN, MAX_SHARED, Index, weight_of
from kvbus.core.normalizing.block_size import BlockSizeDetector
from kvbus.core.normalizing.shape import KEYS, NOTHING_CARRIED, SPELLED, Shape, Sizes
from kvbus.core.normalizing.validate import (
    MAX_SIZE,
    check_removed,
    check_stored,
)
from kvbus.core.source_stats import SourceStats
from kvbus.core.types import DEVICE_MEDIUM, PREFIX_KINDS, UNKNOWN_MEDIUM, Filtered, Hash, Reason, medium_key
from kvbus.core.wire.batch import Batch
from kvbus.core.wire.carried import known_names, set_aside
from kvbus.core.wire.codec import lacks_field, note
from kvbus.core.wire.parts import NOTHING, extras_of, parts
from kvbus.core.wire.schema import AllBlocksCleared, BlockInactive, BlockRemoved, BlockStored, Extras


class Checked:
    """A store that may be applied."""

    __slots__ = ("chunk", "event", "extras", "shape")

    def __init__(self, event: BlockStored, shape: Shape, chunk: Chunk | None, extras: Extras | None) -> None:
        self.event = event
        self.shape = shape
        self.chunk = chunk
        """None where it has no tokens, or more than its hashes have."""
        self.extras = extras
        """Fields no struct knows."""


Step = Checked | BlockRemoved | AllBlocksCleared
"""An event that may be applied."""

_MAX_SHAPES: Final = 4096


class Admission:
    """Checks each event of one source and counts what is wrong with it. Its only state is what the checks learn.

    Args:
        index: the live blocks, whose metas are shared.
        stats: where events and rejections are counted.
        refused: takes medium and reason of each store that is refused.
        pinned: the operator's block size.
        groups: ``prefix`` leaves out groups whose kind carries no prefixes.
        max_groups: groups that anything is remembered of; stores of further ones are refused.
        without_media: media whose stores are left out, as if the engine did not have them.
    """

    def __init__(
        self,
        index: Index,
        stats: SourceStats,
        refused: set[tuple[str, str]],
        *,
        pinned: int | None,
        groups: Literal["prefix", "all"],
        max_groups: int,
        without_media: frozenset[str],
    ) -> None:
        self._index = index
        self._stats = stats
        self._refused = refused
        self._pinned = pinned
        self._prefix_only = groups == "prefix"
        self._max_groups = max_groups
        self._without_media = without_media

        # What was learned of the stream.
        self.ints = 0
        """Stores that named their blocks by integers."""
        self.bytes = 0
        """The same by byte strings."""
        self.known: set[int | None] = set()
        """Groups that stores were of."""
        self.no_prefix: set[int | None] = set()
        """Groups that announced themselves as sliding window, chunked local or mamba."""
        self.media: set[str] = set()
        """Media that events have spoken of."""
        self.sizes: dict[int | None, Sizes] = {}
        """By group, in the order they came."""

        # Of the batch that was looked at last.
        self.relearned = False
        """Blocks announced before would now be treated differently."""

        # What is cached; :meth:`forget` empties it.
        self.shapes: dict[tuple[Any, ...], Shape] = {}
        """By the spelling of a store."""

    @property
    def only_without_prefix(self) -> bool:
        """Whether groups have stored blocks, and all of them are left out."""
        return bool(self.no_prefix) and self.known <= self.no_prefix

    def forget(self) -> None:
        """Empty the cache of shapes."""
        self.shapes.clear()

    def count_inactive(self) -> None:
        """Count an event that is about requests: it says nothing of what the cache holds, and does not leave."""
        self._stats.filtered[Filtered.INACTIVE] += 1

    def count_rejects(self, rejects: Sequence[Reason]) -> None:
        """Count events that could not be read. Any of them may have been a store, but for those of an unknown kind."""
        for reason in rejects:
            if reason is Reason.UNKNOWN_EVENT:
                self._stats.rejected[reason] += 1
            else:
                self._refuse(reason)

    def _refuse(self, reason: Reason, medium: str = UNKNOWN_MEDIUM) -> None:
        """Count a store that is refused: the engine holds blocks that the index does not."""
        self._stats.rejected[reason] += 1
        self._refused.add((medium, reason))

    def check_all(self, batch: Batch) -> list[Step]:
        """Return the events of a batch that may be applied, in the order they came."""
        steps: list[Step] = []
        self.relearned = False
        for event in batch.events:
            if type(event) is BlockStored:
                self._check(event, batch, steps)
            elif type(event) is BlockInactive:  # type: ignore[comparison-overlap]
                self.count_inactive()
            elif type(event) is AllBlocksCleared:
                self._stats.cleared += 1
                if medium_key(event.medium) is None:
                    self._stats.rejected[Reason.UNKNOWN_MEDIUM] += 1
                else:
                    steps.append(event)
            elif self.removable(event):  # type: ignore[arg-type]
                steps.append(event)  # type: ignore[arg-type]
        return steps

    def removable(self, event: BlockRemoved) -> bool:
        """Count a removal; whether it can be applied. If not, that is counted, too."""
        self._stats.removed += 1
        self._note_medium(event.medium)
        found = check_removed(event)
        if isinstance(found, Reason):
            self._stats.rejected[found] += 1
            return False
        if not event.block_hashes:
            self._stats.filtered[Filtered.NO_HASHES] += 1
            return False
        return True

    def _check(self, event: BlockStored, batch: Batch, steps: list[Step]) -> None:
        """Take in a store, or count what is wrong with it."""
        stats = self._stats
        if lacks_field(event):
            self._refuse(Reason.MISSING_FIELD)
            return
        stats.stored += 1
        shape = self._shape_of(event)
        if shape.left_out is not None:
            stats.filtered[shape.left_out] += 1
            return
        size = event.block_size
        tokens = check_stored(event)
        if isinstance(tokens, Reason):
            self._refuse(tokens, shape.medium)
            return
        if not event.block_hashes:
            stats.filtered[Filtered.NO_HASHES] += 1
            return
        if not self._right_kind(event.block_hashes[0]):
            self._refuse(Reason.HASH_KIND, shape.medium)
            return
        if not shape.known:
            self._refuse(Reason.TOO_MANY_GROUPS, shape.medium)
            return
        if event.block_size != size:
            shape = self._shape_of(event)
        extras: Extras | None = None
        if batch.extras is not None:
            extras = next((batch.extras.get(at) for at, each in enumerate(batch.events) if each is event), None)
        if odd := set_aside(event):
            extras = {**(extras or {}), **odd}
            batch.unknown = batch.unknown or set()
            for name in odd:
                note(batch.unknown, "value of", name)
        if extras and known_names(extras):
            stats.filtered[Filtered.ODD_FIELD] += 1
        meta = shape.meta if shape.good and fields_of(event)[KEYS + 1 :] == NOTHING_CARRIED else None
        first, count, size = 0, len(event.block_hashes), event.block_size
        known = tokens > 0 and tokens == count * size
        if not known:  # which of the tokens are those of a hash is not said
            event.token_ids = NOTHING
        if size and (known or shape.group not in self.sizes):
            self._observe(shape, size, max(count, tokens // size), shape.medium if known else "")
        for part in split_long(event):
            chunk, end = None, first + len(part.block_hashes)
            own = extras and extras_of(extras, count, first, end)
            if known:
                chunk = chunk_of(self._index, part, own, meta)
            steps.append(Checked(part, shape, chunk, own))
            first = end

    def _observe(self, shape: Shape, size: int, blocks: int, medium: str) -> None:
        """Learn block sizes from a store on this medium; without a medium, until a store with tokens says them."""
        sizes = self.sizes.get(shape.group)
        if sizes is None or self._takes_over(sizes, shape, size, blocks):
            self.relearned |= sizes is not None and sizes.detector.knows
            sizes = Sizes(BlockSizeDetector(self._pinned, numbered=shape.group is not None), medium)
            self.sizes[shape.group] = sizes
        detector = sizes.detector
        if medium != sizes.medium:
            if size == detector.size and medium not in sizes.fine:
                sizes.fine.add(medium)
                table = self._index.tables.get((shape.group, medium))
                self.relearned |= table is not None and len(table.refs) > 0  # larger blocks were cut, and are repeated
            return
        own = detector.size
        self.relearned |= detector.observe(size, blocks)
        if detector.size != own:
            sizes.fine = {sizes.medium}

    def _takes_over(self, sizes: Sizes, shape: Shape, size: int, blocks: int) -> bool:
        """Whether the group's sizes have to be learned anew from the medium of this store.

        The device counts before every other medium. Without it, several blocks of a finer size count before coarser
        ones.
        """
        if not sizes.detector.knows:
            return shape.medium != sizes.medium
        if sizes.medium in {DEVICE_MEDIUM, shape.medium}:
            return False
        if shape.medium != DEVICE_MEDIUM and sizes.medium:
            return blocks > 1 and 0 < size < sizes.detector.size
        if size == sizes.detector.size:
            sizes.medium = shape.medium
            sizes.fine.add(shape.medium)
            return False
        return not (blocks == 1 and sizes.detector.teaches_nothing(size))

    def _shape_of(self, event: BlockStored) -> Shape:
        """The shape of an event."""
        spelling = fields_of(event)[SPELLED:KEYS]
        return self.shapes.get(spelling) or self._new_shape(event, spelling)

    def _new_shape(self, event: BlockStored, spelling: tuple[Any, ...]) -> Shape:
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
        if medium in self._without_media:
            shape.left_out = Filtered.MEDIUM
        elif self._prefix_only and isinstance(kind, str) and kind not in PREFIX_KINDS:
            shape.left_out = Filtered.GROUP
            if known:
                self.no_prefix.add(group)
        elif known and medium is not None and 0 < size <= MAX_SIZE:
            shape.meta = self._index.shared_meta(shape.meta)
            shape.good = True
        if weight_of(shape.meta) > MAX_SHARED:
            shape.good = False
        elif shape.good or shape.left_out is not None:
            if len(self.shapes) >= _MAX_SHAPES:
                self.forget()
            self.shapes[spelling] = shape
        return shape

    def _note_medium(self, medium: str | UnsetType | None) -> None:
        key = medium_key(medium)
        if key in self._without_media:
            return
        self.media.add(key or UNKNOWN_MEDIUM)

    def _gets_known(self, group: int | None) -> bool:
        if len(self.known) >= self._max_groups:
            return False
        self.known.add(group)
        return True

    def _right_kind(self, block: Hash) -> bool:
        """Whether the hash is of this stream's kind. The majority decides, so an odd event changes nothing."""
        if isinstance(block, int):
            self.ints += 1
            return self.ints >= self.bytes
        self.bytes += 1
        return self.bytes >= self.ints

    def dump(self) -> list[Any]:
        """Plain data for a restart."""
        return [[self.ints, self.bytes], list(self.no_prefix), list(self.known)]

    def load(self, data: list[Any]) -> None:
        """The reverse of :meth:`dump`."""
        (self.ints, self.bytes), no_prefix, known = data
        self.no_prefix.update(no_prefix)
        self.known.update(known)


def split_long(event: BlockStored) -> list[BlockStored]:
    """A store of more than :data:`MAX_RUN` blocks as several that follow one another."""
    count = len(event.block_hashes)
    if count <= MAX_RUN:
        return [event]
    runs = [(at, min(at + MAX_RUN, count)) for at in range(0, count, MAX_RUN)]
    return cast("list[BlockStored]", parts(event, runs))


def chunk_of(index: Index, event: BlockStored, extras: Extras | None, meta: Meta | None = None) -> Chunk:
    """The blocks of a store that keeps the rules, with its ``meta`` where that is known."""
    fields = fields_of(event)
    parent, keys = fields[1], fields[KEYS]
    if meta is None:
        meta = index.meta(event)
    chunk = Chunk(
        fields[0],
        None if parent is UNSET else parent,
        bytes(fields[2]),
        meta,
        None if keys is UNSET else bytes(keys),
    )
    if extras or meta.weight:
        chunk.rest = Rest({name: bytes(raw) for name, raw in (extras or {}).items()} or None)
    return chunk
