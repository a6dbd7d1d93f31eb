"""The events and blocks that routers with limited rights may read (a view).

Each store names its LoRA adapter. The cache salt is named by every store (SGLang), or only by the first block of a
chain of blocks, and applies to all later blocks of the chain. So a block belongs to the view if its parent belongs to
the view, even if the parent was stored long before. Therefore the view keeps the blocks that its routers have. A
removal is sent if the view has the block. A clear is always sent.

A store whose parent is unknown may have any salt. It is left out, and counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

from kvbus.core.blocks.announce import removals_of
from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import Index, Table, filed, key_of
from kvbus.core.outputs.spec import Rights
from kvbus.core.stats import NumberingStats
from kvbus.core.types import Hash, Residencies
from kvbus.core.wire.carried import readable
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.encoding import changed, decode_value, hashes_of, is_store, value
from kvbus.core.wire.schema import AllBlocksCleared, BlockStored

_FIELDS: Final = frozenset(BlockStored.__struct_fields__)


class TenantIndex:
    """The blocks that the routers of one output may read, if their rights are limited.

    Args:
        rights: limits on the blocks that the routers may read.
        residencies: how the routers distinguish residencies of a block.
        stats: the counters of the events that are left out.
    """

    def __init__(self, rights: Rights, stats: NumberingStats, residencies: Residencies = "named") -> None:
        self._loras = None if rights.loras is None else re.compile(rights.loras)
        self._salts = rights.salts
        self._stats = stats
        self._residencies = residencies
        self.indexes: dict[int, Index] = {}
        """The permitted blocks of each source, by the source's slot.

        They have the hashes by which routers know them.
        """

    def index(self, slot: int) -> Index:
        """Return the index with those blocks of the source in slot ``slot`` that the routers may read."""
        found = self.indexes.get(slot)
        if found is None:
            found = self.indexes[slot] = Index()
        return found

    def forget(self, slot: int) -> None:
        """Forget the blocks of a source, because kvbus knows nothing about the source's cache any more."""
        self.indexes.pop(slot, None)

    def merge_overlays(self) -> None:
        """Merge the later changes (overlay) of each table into the table itself, unless a reader uses a frozen copy.

        See :meth:`kvbus.core.blocks.index.Table.merge_overlay`.
        """
        for index in self.indexes.values():
            index.merge_overlays()

    def take(
        self, slot: int, events: Sequence[AnyEvent], known: Index
    ) -> tuple[list[AnyEvent], list[Callable[[], Sequence[AnyEvent]]]]:
        """Filter a source's events by the rights of this view, and apply the permitted events to the view's blocks.

        Args:
            slot: the slot of the source.
            events: the events that such routers with all rights get, in order.
            known: every live block of the source.

        Returns:
            The events that the routers may read, and one function for each clear among them. The function builds
            removals of the blocks that the clear removes.
        """
        index = self.index(slot)
        cleared: list[Callable[[], Sequence[AnyEvent]]] = []
        kept: list[AnyEvent] = []
        for event in events:
            if isinstance(event, AllBlocksCleared):
                before, index = index, Index()
                self.indexes[slot] = index
                cleared.append(partial(removals_of, before))
                kept.append(event)
            elif is_store(event):
                if self._takes(event, index, known):
                    self._put(index, event)
                    kept.append(event)
            else:
                left = self._remove(index, event)
                if left is not None:
                    kept.append(left)
        return kept, cleared

    def _takes(self, event: AnyEvent, index: Index, known: Index) -> bool:
        """Return whether the routers may read a store. If not, count the store."""
        takes = self._may_read(event, index)
        if takes is None:
            parent = value(event, "parent_block_hash")
            if any(parent in table.blocks or parent in table.refs for table in known.tables.values()):
                takes = False
        if takes is None:
            self._stats.undecided += 1
        elif not takes:
            self._stats.not_read += 1
        return bool(takes)

    def _may_read(self, event: AnyEvent, index: Index) -> bool | None:
        """Return whether the rights permit a store; None if the rights alone do not decide it.

        They do not decide it if the store names no salt and its parent is not in the view.
        """
        if self._loras is not None:
            name = value(event, "lora_name")
            lora = value(event, "lora_id") if name is None else name
            if lora is None or self._loras.fullmatch(str(lora)) is None:
                return False
        if self._salts is None:
            return True
        raw_salt = value(event, "cache_salt")
        salt = None if raw_salt is None else decode_value(raw_salt)
        if salt is not None:
            return isinstance(salt, str) and salt in self._salts
        parent = value(event, "parent_block_hash")
        if parent is None:
            return root_salt(event) in self._salts
        first = hashes_of(event)[0]
        if any(parent in table.blocks or first in table.blocks for table in index.tables.values()):
            return True
        return None

    def _table(self, index: Index, event: AnyEvent) -> Table:
        """Return the table of ``index`` for the blocks of an event, as the routers file them."""
        return index.table(*filed(key_of(event), self._residencies))

    def _put(self, index: Index, event: AnyEvent) -> None:
        """Add the blocks of a store to ``index``, which holds one source's blocks in the view."""
        self._table(index, event).blocks.update(dict.fromkeys(hashes_of(event), _stored(index, event)))

    def _remove(self, index: Index, event: AnyEvent) -> AnyEvent | None:
        """Apply a removal to ``index``, which holds one source's blocks in the view.

        Return the event with only the blocks that the index had; None if it had none of them.
        """
        blocks = self._table(index, event).blocks
        hashes = hashes_of(event)
        gone: tuple[Hash, ...] = tuple(block for block in hashes if blocks.pop(block, None) is not None)
        if len(gone) == len(hashes):
            return event
        return changed(event, {"block_hashes": gone}) if gone else None


def root_salt(event: AnyEvent) -> str | None:
    """Return the cache salt in the extra keys of a store's first block; None if there is no salt.

    vLLM puts the salt only into the extra keys of the first block of a chain. There the order is: the name of the
    adapter, images, the salt, and hashes of embeddings (bytes).
    """
    raw = value(event, "extra_keys")
    keys = None if raw is None else decode_value(raw)
    own = keys[0] if isinstance(keys, list) and keys else None
    if not isinstance(own, list):
        return None
    if own and own[0] == value(event, "lora_name"):
        own = own[1:]
    texts = [each for each in own if isinstance(each, str)]
    return texts[-1] if texts else None


def _stored(index: Index, event: AnyEvent) -> Chunk:
    """Return a chunk with the blocks of a store, for ``index``, which holds one source's blocks in the view."""
    extras: dict[str, Any] = {}
    if isinstance(event, dict):
        known = readable(event)
        extras = {
            name: raw
            for name, raw in event.items()
            if name != "type" and (name not in _FIELDS or known.get(name) is not raw)
        }
        stored: BlockStored = BlockStored(**{name: known[name] for name in known if name in _FIELDS})
    else:
        stored = cast("BlockStored", event)
    return index.chunk_of(stored, extras)
