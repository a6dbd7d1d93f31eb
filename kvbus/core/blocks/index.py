"""The live blocks of one source: what its engine's cache holds at this moment.

Blocks that came in one event share one :class:`Chunk`. So a block costs a dictionary entry, its hash and the bytes of
its tokens. Keys are ``(group_idx, medium)`` and then the hash: the same hash is in several groups with different block
sizes (vLLM 0.20 and later), and on several media at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

from msgspec import UNSET, Raw, UnsetType, structs

from kvbus.core.blocks.chunk import Chunk, Meta
from kvbus.core.blocks.chunk_set import ChunkSet
from kvbus.core.blocks.lease import Lease
from kvbus.core.blocks.overlay import SMALL, Overlay
from kvbus.core.blocks.size import Size
from kvbus.core.types import Hash
from kvbus.core.wire.encoding import decode_value, encode_value
from kvbus.core.wire.schema import BlockStored

TableKey = tuple[int | None, str]
"""Group and medium key."""

MAX_RUN: Final = 512
"""Most blocks of one chunk, and of an event that kvbus puts together. To find a block in a chunk costs as many
comparisons as the chunk has blocks, to remove them all costs the square."""


class Table:
    """The live blocks of one group on one medium. ``copies`` counts physical copies beyond the first."""

    __slots__ = ("_overlay", "blocks", "copies", "lease", "refs", "sub_blocks")

    def __init__(self, copied_below: int = SMALL) -> None:
        base: dict[Hash, Chunk] = {}
        self.blocks: MutableMapping[Hash, Chunk] = base
        self._overlay = Overlay(base, copied_below)
        self.copies: dict[Hash, int] = {}
        self.refs: dict[Hash, int] = {}
        """How many live sub-blocks leave under one derived hash (reblocked chunks only)."""
        self.lease: Lease | None = None
        """Of a frozen copy: the one whose blocks it reads is not changed as long as this exists."""
        self.sub_blocks = 0
        """In a frozen copy, which has no ``refs``: how many derived hashes there are."""

    @property
    def announced(self) -> int:
        """Live blocks as routers count them: of a reblocked table the sub-blocks, each hash once."""
        return len(self.refs) or self.sub_blocks or len(self.blocks)

    def freeze(self, frozen: Table) -> tuple[MutableMapping[Hash, Chunk], MutableMapping[Hash, Chunk]]:
        """The blocks as they are now, for a frozen table, and the mapping to change from now on."""
        frozen.lease = Lease()
        return self._overlay.freeze(self.blocks, frozen.lease)

    def merge_overlay(self) -> None:
        """Go back to one plain dictionary, if nobody reads a frozen copy any more."""
        self.blocks = self._overlay.merge(self.blocks)

    def add(self, block: Hash, chunk: Chunk, copies: int, *, count: bool) -> None:
        """Add a block, and so many copies beyond it if they ``count``. A block that is there already is a copy, too."""
        if block in self.blocks:
            copies += 1
        else:
            self.blocks[block] = chunk
        if copies and count:
            self.copies[block] = self.copies.get(block, 0) + copies

    def remove(self, block: Hash) -> Chunk | None:
        """Take one copy away, whatever ``duplicates`` says: of blocks that no router knows (``left_out.py``).

        The chunk if it was the last one; None if copies are left, or none was known.
        """
        copies = self.copies
        if copies and (left := copies.get(block)) is not None:
            if left == 1:
                del copies[block]
            else:
                copies[block] = left - 1
            return None
        return self.blocks.pop(block, None)


_MAX_METAS: Final = 4096

MAX_SHARED: Final = 1024
"""Bytes of texts in a meta that is kept once for the blocks of many events."""


def weight_of(meta: Meta) -> int:
    """The bytes of what an engine may make as long as it likes."""
    texts = (meta.lora_name, meta.kind, meta.locality, meta.ownership, meta.session_id, meta.cache_salt, meta.lookahead)
    return sum(len(text) for text in texts if isinstance(text, (str, bytes)))


class Index:
    """All tables of one source.

    Args:
        copied_below: tables of fewer blocks are copied for a state snapshot, larger ones are frozen.
    """

    def __init__(self, copied_below: int = SMALL) -> None:
        self._copied_below = copied_below
        self._metas: dict[Meta, Meta] = {}
        self._begin()

    def _begin(self) -> None:
        self.tables: dict[TableKey, Table] = {}
        self._of_group: dict[int | None, dict[TableKey, Table]] = {}
        self._of_medium: dict[str, dict[TableKey, Table]] = {}
        self.media_names: AbstractSet[str] = self._of_medium.keys()
        """Media any table is of."""
        self.size = Size()
        """Whoever puts chunks into tables and takes them out counts them here."""

    def __len__(self) -> int:
        """Live blocks."""
        return sum(len(table.blocks) for table in self.tables.values())

    @property
    def announced(self) -> int:
        """Live blocks as routers count them, see :attr:`Table.announced`."""
        return sum(table.announced for table in self.tables.values())

    def table(self, group: int | None, medium: str) -> Table:
        """The table of one group and medium, made on first use."""
        key = (group, medium)
        table = self.tables.get(key)
        if table is None:
            table = Table(self._copied_below)
            self._put(key, table)
        return table

    def _put(self, key: TableKey, table: Table) -> None:
        group, medium = key
        self.tables[key] = table
        self._of_group.setdefault(group, {})[key] = table
        self._of_medium.setdefault(medium, {})[key] = table

    def _drop(self, key: TableKey) -> None:
        del self.tables[key]
        for tables, name in ((self._of_group, key[0]), (self._of_medium, key[1])):
            del tables[name][key]  # type: ignore[index]
            if not tables[name]:  # type: ignore[index]
                del tables[name]  # type: ignore[arg-type]

    def tables_on(self, media: Iterable[str]) -> list[tuple[TableKey, Table]]:
        """The tables of these media."""
        return [each for medium in media for each in self._of_medium.get(medium, {}).items()]

    def announces(self, group: int | None, medium: str, name: Hash) -> bool:
        """Whether routers know a live block by this name (not for a frozen copy with reblocked blocks)."""
        table = self.tables.get((group, medium))
        if table is None:
            return False
        chunk = table.blocks.get(name)
        return (chunk is not None and chunk.derived is None) or name in table.refs

    def names(self) -> Iterator[Hash]:
        """Every live block by the name that routers know it by, once for each table that holds it."""
        for table in self.tables.values():
            yield from table.refs
            for block, chunk in table.blocks.items():
                if chunk.derived is None:
                    yield block

    def media(self) -> dict[str, int]:
        """Live blocks per medium."""
        counts: dict[str, int] = {}
        for (_, medium), table in self.tables.items():
            counts[medium] = counts.get(medium, 0) + len(table.blocks)
        return counts

    def find(self, group: int | None, block: Hash) -> Chunk | None:
        """The chunk that holds this block on any medium of the group."""
        for table in self._of_group.get(group, {}).values():
            if (chunk := table.blocks.get(block)) is not None:
                return chunk
        return None

    def tables_with(self, medium: str, block: Hash) -> list[tuple[TableKey, Table]]:
        """Every group's table that holds this block on this medium."""
        return [(key, table) for key, table in self.tables_on((medium,)) if block in table.blocks]

    def keep(self, media: AbstractSet[str]) -> None:
        """Forget the blocks on any other medium."""
        for key, table in self.tables_on(self.media_names - media):
            for chunk in set_of_chunks(table):
                self.size.drop(table, chunk)
            self._drop(key)

    def keep_group(self, group: int | None) -> None:
        """Forget the blocks of any other group, in a frozen copy."""
        for key in [key for key in self.tables if key[0] != group]:
            self._drop(key)

    def drop_empty(self, media: Iterable[str]) -> None:
        """Forget the tables of these media that hold no block."""
        for key, table in self.tables_on(media):
            if not table.blocks:
                self._drop(key)

    def clear(self) -> None:
        """Forget all blocks."""
        self._begin()
        self._metas.clear()

    def count(self) -> None:
        """Count all blocks and bytes anew: chunks were put in, taken out or changed without being counted."""
        self.size = Size()
        for table in self.tables.values():
            for chunk in set_of_chunks(table):
                self.size.count(table, chunk)

    def meta(self, event: BlockStored) -> Meta:
        """The shared :class:`Meta` of an event."""
        return self.shared_meta(
            Meta(
                event.block_size,
                _or_none(event.lora_id),
                _or_none(event.lora_name),
                None if isinstance(event.medium, UnsetType) or event.medium is None else event.medium.upper(),
                event.group_idx,
                event.kv_cache_spec_kind,
                event.kv_cache_spec_sliding_window,
                carried_bytes(event.locality),
                carried_bytes(event.ownership),
                carried_bytes(event.session_id),
                carried_bytes(event.cache_salt),
                carried_bytes(event.lookahead_token_ids),
            )
        )

    def shared_meta(self, meta: Meta) -> Meta:
        """The one object for this value, unless it is too long to be kept for others."""
        known = self._metas.get(meta)
        if known is not None:
            return known
        weight = weight_of(meta)
        if weight > MAX_SHARED:
            return structs.replace(meta, weight=weight)
        if len(self._metas) >= _MAX_METAS:
            self._metas.clear()
        self._metas[meta] = meta
        return meta

    def merge_overlays(self) -> None:
        """Put changes back into the plain dictionaries: see :meth:`Table.merge_overlay`."""
        for table in self.tables.values():
            table.merge_overlay()

    def copy(self) -> Index:
        """A frozen copy: the same live blocks, whatever becomes of this index. It shares chunks and large tables."""
        frozen = Index()
        for key, table in self.tables.items():
            kept = frozen.table(*key)
            kept.blocks, table.blocks = table.freeze(kept)
            kept.sub_blocks = len(table.refs)
        return frozen

    def given_up(self) -> Index:
        """The tables as they are, for the last time: this index is about to be cleared."""
        last = Index()
        for key, table in self.tables.items():
            last._put(key, table)
        return last


def set_of_chunks(table: Table) -> Iterator[Chunk]:
    """Every chunk with a live block, once, in the order its first one came."""
    seen = ChunkSet()
    for chunk in table.blocks.values():  # as in overlay: not a generator expression
        if seen.add(chunk):
            yield chunk


def _or_none(value: Any) -> Any:
    return None if value is UNSET else value


def carried_bytes(raw: Raw | UnsetType) -> bytes | None:
    """A carried field's own bytes, None where the event has no such field."""
    return None if raw is UNSET else bytes(raw)


def raw_or_unset(value: bytes | None) -> Raw:
    """The reverse of what the index does to carried fields: bytes back to a field of an event."""
    return UNSET if value is None else Raw(value)  # type: ignore[return-value]


def slice_array(raw: bytes, a: int, b: int) -> Raw:
    """Items ``[a, b)`` of a raw msgpack array."""
    return encode_value(decode_value(raw)[a:b])
