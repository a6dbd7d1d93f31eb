"""Events that are plainly in order: checked and applied as they come.

Such a store is spelled like others before it, and its blocks are of its group's own size, which one store more teaches
nothing about. Its tokens are in their shortest form, and as many as they have to be. Its parent is known. Every rule of
:mod:`~kvbus.core.normalizing.validate` is kept by what is looked at here, in the cheapest form it has.

Whether an event is plain follows from the event and the state alone, never from what is cached. So a restart that
handles the log again comes to the same bytes.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final

from msgspec import UNSET
from msgspec.structs import astuple

from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import Index
from kvbus.core.blocks.size import ITEM_BYTES
from kvbus.core.normalizing.admission import Admission
from kvbus.core.normalizing.leaving import Leaving
from kvbus.core.normalizing.removals import Removals
from kvbus.core.normalizing.shape import KEYS, NOTHING_CARRIED, SPELLED
from kvbus.core.normalizing.stores import Stores
from kvbus.core.source_stats import SourceStats
from kvbus.core.types import Hash
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.schema import BlockInactive, BlockRemoved, BlockStored, Event

_NOT_SENT: Final = UNSET
_STORED: Final = BlockStored
_REMOVED: Final = BlockRemoved
_chunk: Final = Chunk
_fields_of: Final = astuple
"""Compiled code looks a name of another module up in a dictionary each time, and has its own at hand."""

_NO_BLOCKS: Final[MutableMapping[Hash, Chunk]] = {}


class PlainEvents:
    """Applies plain events to the index of one source.

    Args:
        index: the live blocks.
        admission: what is known of the stream.
        removals: those of the batch.
        stores: takes stores of blocks that are live, or that may not fit.
        leaving: is told whether an event was changed.
        stats: where events are counted.
    """

    def __init__(
        self,
        index: Index,
        admission: Admission,
        removals: Removals,
        stores: Stores,
        leaving: Leaving,
        stats: SourceStats,
    ) -> None:
        self._index = index
        self._admission = admission
        self._removals = removals
        self._stores = stores
        self._leaving = leaving
        self._stats = stats

    def apply(self, events: list[Event], out: list[AnyEvent], *, as_bytes: bool, uniform: bool) -> list[Event]:
        """Apply the events up to the first one that is not plainly in order; that one and those behind it.

        Of these the whole has to be known before any is applied: what they teach, or where a parent comes.

        Args:
            events: of one batch, in order.
            out: takes those that leave.
            as_bytes: hashes are byte strings, where they are ``uniform``.
            uniform: they are of one kind, and no event had to be looked at alone.
        """
        admission, index, removals, stores = self._admission, self._index, self._removals, self._stores
        # where the kind of hash is in doubt, no store is plainly in order
        doubtful = not uniform
        if as_bytes:
            doubtful |= admission.bytes + 1 < admission.ints
        else:
            doubtful |= admission.ints + 1 < admission.bytes
        shapes = admission.shapes
        size = index.size
        room, room_bytes = stores.room()
        added = added_bytes = stored = removed = 0
        rest: list[Event] = []
        for at, event in enumerate(events):
            if type(event) is _STORED:
                if doubtful:
                    rest = events[at:]
                    break
                fields: tuple[Any, ...] = _fields_of(event)
                hashes: tuple[Hash, ...] = fields[0]
                parent: Any = fields[1]
                raw_keys: Any = fields[KEYS]
                count = len(hashes)
                spelling = fields[SPELLED:KEYS]
                if spelling == admission.newest_spelling:
                    shape = admission.newest_shape
                else:
                    shape = shapes.get(spelling)
                    if shape is not None:
                        admission.newest_spelling, admission.newest_shape = spelling, shape
                if shape is None:
                    shape = admission.plain_shape(event)
                    if shape is None:
                        rest = events[at:]
                        break
                tokens = bytes(fields[2])
                if shape.left_out is not None and tokens:
                    admission.count_left_out(shape.left_out)
                    continue
                match = shape.matchers.get(count) or shape.expect(count)
                if match is None or not match(tokens) or not shape.sizes.quiet:
                    rest = events[at:]
                    break
                held = len(tokens) + ITEM_BYTES * (1 + count)
                keys = None
                if raw_keys is not _NOT_SENT:
                    usual = admission.usual_keys.get(count)
                    if usual is not None and usual[0] == raw_keys:
                        keys = usual[1]
                    elif (keys := admission.good_keys(bytes(raw_keys), count)) is None:
                        rest = events[at:]
                        break
                    held += len(keys)
                meta = shape.meta
                carried = fields[KEYS + 1 :]
                if carried != NOTHING_CARRIED:
                    if carried == shape.newest_carried:
                        meta = shape.newest_meta
                    else:
                        own = admission.good_meta(event, shape, carried, count)
                        if own is None:
                            rest = events[at:]
                            break
                        meta = own
                table = shape.table
                if table is None:
                    table = shape.table = index.tables.get((shape.group, shape.medium))
                blocks = _NO_BLOCKS if table is None else table.blocks
                if parent is not None:
                    holder = blocks.get(parent)
                    if holder is not None:
                        last = holder.hashes[-1]
                        if last == parent:
                            parent = last  # one object for one hash
                    elif parent is _NOT_SENT:
                        parent = None
                        self._leaving.touched = True
                        event.parent_block_hash = None
                    elif parent in hashes or index.find(shape.group, parent) is None:
                        rest = events[at:]
                        break
                chunk = _chunk(hashes, parent, tokens, meta, keys)
                fits = table is not None and added + count <= room and added_bytes + held <= room_bytes
                if count == 1:
                    block = hashes[0]
                    fresh = fits and block not in blocks
                    if fresh:
                        blocks[block] = chunk
                else:
                    named = dict.fromkeys(hashes, chunk)
                    if len(named) != count:
                        rest = events[at:]
                        break
                    fresh = fits and blocks.keys().isdisjoint(named)
                    if fresh:
                        blocks.update(named)
                stored += 1
                if not shape.complete:
                    shape.as_sent(event)
                    self._leaving.touched = True
                if fresh:
                    added += count
                    added_bytes += held
                    if removals.waiting:
                        removals.flush()
                    out.append(event)
                    continue
                size.blocks += added
                size.at_most += added_bytes
                added = added_bytes = 0
                stores.place(event, shape, chunk, None)
                room, room_bytes = stores.room()
            elif type(event) is not _REMOVED:
                if type(event) is BlockInactive:  # type: ignore[comparison-overlap]
                    admission.count_inactive()
                    continue
                rest = events[at:]
                break
            elif uniform and event.medium in admission.spoken and event.block_hashes:
                removed += 1
                removals.remove(event)
            elif admission.removable(event, uniform=uniform):
                removals.remove(event)
        if stored:
            size.blocks += added
            size.at_most += added_bytes
            self._stats.stored += stored
            if as_bytes:
                admission.bytes += stored
            else:
                admission.ints += stored
        if removed:
            self._stats.removed += removed
        return rest
