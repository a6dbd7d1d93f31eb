"""The index of one source: the blocks that its engine's cache holds.

Blocks of one event share one :class:`Chunk`. So each block costs only a dictionary entry, its hash and the bytes of its
tokens. A block is found by its residency (group, medium, locality and owner) and then by its hash. The same hash can be
in several groups with different block sizes (vLLM 0.20 and later), on several media at the same time, and there under
several localities and owners (vLLM 0.26 and 0.30): the engine stores and removes each of them separately.

A reader that needs the current blocks freezes the tables. Copying a million entries would stop the event loop for about
20 ms. So the reader of a large table gets the dictionary itself, and further changes are stored in a :class:`Layer` on
top of it. After the last reader has finished, the changes are merged into the dictionary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from collections.abc import Set as AbstractSet
from typing import Final
from weakref import ref

from msgspec import UNSET, Raw, structs

from kvbus.core.blocks.chunk import Chunk, Meta, Rest, carried_bytes, meta_of
from kvbus.core.types import LOCAL, UNKNOWN_MEDIUM, Hash, Residencies, medium_key
from kvbus.core.wire.carried import text_of
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.encoding import value
from kvbus.core.wire.schema import BlockStored

TableKey = tuple[int | None, str, str | None, str | None]
"""The key of a table of an index: the KV-cache group, the medium, the locality and the owner of the table's blocks.

The locality and the owner are None if the engine names none.
"""

BlockKey = tuple[int | None, str, str | None, str | None, Hash]
"""A block of one residency: the key of its table, and then its hash."""

MERGED: Final[tuple[Residencies, ...]] = ("worker", "one")
"""The ways to distinguish residencies in which some tables of an index are one table for routers."""


def filed(key: TableKey, residencies: Residencies) -> TableKey:
    """Return the key under which routers file the blocks of a table. Tables with equal keys are one table for them."""
    if residencies == "one":
        return (key[0], key[1], None, None)
    if residencies == "worker" and key[2] == LOCAL:
        return (key[0], key[1], None, key[3])
    return key


MAX_RUN: Final = 512
"""Maximum number of blocks in one chunk, and in one event that kvbus builds.

The limit bounds the search for a block in a chunk, which compares the block with each block of the chunk.
"""

SMALL: Final = 150_000
"""Minimum number of blocks of a table that is shared with its frozen copy. A smaller table is copied completely.

Copying a smaller table takes at most 1 to 2 ms. Sharing a table makes its later changes slower.
"""

MAX_LAYERS: Final = 4
"""Maximum number of layers (later changes) on top of one table.

If the number is reached, the table is copied completely when it is frozen the next time.
"""


def key_of(event: AnyEvent) -> TableKey:
    """Return the key of the table in which an index keeps the blocks of a store or a removal."""
    return (
        value(event, "group_idx"),
        medium_key(value(event, "medium")) or UNKNOWN_MEDIUM,
        text_of(value(event, "locality")),
        text_of(value(event, "ownership")),
    )


class Layer(MutableMapping[Hash, Chunk]):
    """A mapping that shows the entries of the mapping ``below`` with later changes, without changing ``below`` itself.

    ``below`` must not change while the layer exists.
    """

    __slots__ = ("_gone", "_length", "_new", "below")

    def __init__(self, below: MutableMapping[Hash, Chunk]) -> None:
        self.below = below
        self._new: dict[Hash, Chunk] = {}
        self._gone: set[Hash] = set()
        """Keys of ``below`` whose entries this layer hides: they were removed, or have a new value in ``_new``."""
        self._length = len(below)

    def __getitem__(self, key: Hash) -> Chunk:
        if key in self._new:
            return self._new[key]
        if key in self._gone:
            raise KeyError(key)
        return self.below[key]

    def __contains__(self, key: object) -> bool:
        return key in self._new or (key not in self._gone and key in self.below)

    def __setitem__(self, key: Hash, value: Chunk) -> None:
        if key not in self:
            self._length += 1
        if key in self.below:
            self._gone.add(key)
        self._new[key] = value

    def __delitem__(self, key: Hash) -> None:
        if key in self._new:
            del self._new[key]
        elif key in self._gone or key not in self.below:
            raise KeyError(key)
        else:
            self._gone.add(key)
        self._length -= 1

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Hash]:
        yield from (key for key in self.below if key not in self._gone)
        yield from self._new

    def put_into(self, base: MutableMapping[Hash, Chunk]) -> None:
        """Apply this layer's changes to ``base``, a mapping with the same entries as the mapping under this layer."""
        for key in self._gone:
            base.pop(key, None)
        base.update(self._new)


def merged(top: MutableMapping[Hash, Chunk]) -> MutableMapping[Hash, Chunk]:
    """Merge the changes of all layers of a copy-on-write overlay into the dictionary under them.

    ``top`` is the highest layer, or the dictionary if there is no layer. Return the dictionary.
    """
    if not isinstance(top, Layer):
        return top
    base: MutableMapping[Hash, Chunk] = merged(top.below)
    top.put_into(base)
    return base


class Table:
    """The live blocks of one residency: of one group on one medium, with one locality and one owner.

    ``copies`` has the number of copies that the engine holds of each block besides the first one.
    """

    __slots__ = ("__weakref__", "_copied_below", "_readers", "blocks", "copies", "refs", "sub_blocks")

    def __init__(self, copied_below: int = SMALL) -> None:
        self._copied_below = copied_below
        self._readers: list[ref[Table]] = []
        """Weak references to the frozen copies that share this table's blocks.

        For each of them, :attr:`blocks` has a layer with the changes after the copy was made.
        """
        self.blocks: MutableMapping[Hash, Chunk] = {}
        self.copies: dict[Hash, int] = {}
        self.refs: dict[Hash, int] = {}
        """Number of live blocks that contain each sub-block, by the sub-block's derived hash.

        It is empty if the table has no reblocked chunks.
        """
        self.sub_blocks = 0
        """Number of different sub-blocks in this table, if it is a frozen copy; 0 in every other table.

        A frozen copy needs this number, because it has no :attr:`refs`.
        """

    @property
    def announced(self) -> int:
        """Number of live blocks as routers count them.

        If the table's blocks were cut into sub-blocks, it is the number of different sub-blocks.
        """
        return len(self.refs) or self.sub_blocks or len(self.blocks)

    def announces(self, name: Hash) -> bool:
        """Return whether routers that hash tokens know a live block, or a sub-block of one, by this hash.

        A block with unknown tokens does not count. Do not use this method on a frozen copy with reblocked blocks,
        because a frozen copy lacks their derived hashes.
        """
        chunk = self.blocks.get(name)
        return (chunk is not None and chunk.derived is None and not chunk.hash_only) or name in self.refs

    def freeze(self) -> Table:
        """Return a table with the current blocks, which later changes of this table do not affect.

        A small dictionary is copied. A large dictionary is shared: this table then stores its changes in a layer on top
        of it.
        """
        frozen = Table()
        frozen.sub_blocks = len(self.refs)
        if len(self.blocks) < self._copied_below or len(self._readers) == MAX_LAYERS:
            frozen.blocks = dict(self.blocks)
        else:
            frozen.blocks = self.blocks
            self.blocks = Layer(self.blocks)
            self._readers.append(ref(frozen))
        return frozen

    def merge_overlay(self) -> None:
        """Merge the layers of later changes into the table's dictionary if no frozen copy of the table exists."""
        if self._readers and not any(reader() for reader in self._readers):
            self._readers.clear()
            self.blocks = merged(self.blocks)


_MAX_METAS: Final = 4096

MAX_SHARED: Final = 1024
"""Maximum total length in bytes of the texts in a :class:`Meta` that several chunks share."""


def _weight_of(meta: Meta) -> int:
    """Return the total length in bytes of the texts in a meta. They may be long, because the engine chooses them."""
    texts = (meta.lora_name, meta.kind, meta.locality, meta.ownership, meta.session_id, meta.cache_salt, meta.lookahead)
    return sum(len(text) for text in texts if isinstance(text, (str, bytes)))


class Index:
    """The live blocks of one source, in one table for each residency (group, medium, locality and owner).

    Args:
        copied_below: number of blocks below which a table is copied for a state snapshot. Larger tables are shared with
            the snapshot.

    Attributes:
        tables: the tables, by residency.
        media_names: the media that have a table.
        blocks: number of live blocks that were added by :meth:`put`.
        bytes: approximate memory of the chunks of these blocks, in bytes.
        cut: whether some blocks were cut into sub-blocks. Routers know such a block by other hashes than the engine's.
    """

    def __init__(self, copied_below: int = SMALL) -> None:
        self._copied_below = copied_below
        self._metas: dict[Meta, Meta] = {}
        self._begin()

    def _begin(self) -> None:
        self.tables: dict[TableKey, Table] = {}
        self._of_group: dict[int | None, dict[TableKey, Table]] = {}
        self._of_medium: dict[str, dict[TableKey, Table]] = {}
        self._of_place: dict[tuple[int | None, str], dict[TableKey, Table]] = {}
        self.media_names: AbstractSet[str] = self._of_medium.keys()
        self.blocks = 0
        self.bytes = 0
        self.cut = False

    def __len__(self) -> int:
        """Number of live blocks, as the engine has announced them. Routers may get other blocks (:attr:`announced`)."""
        return sum(len(table.blocks) for table in self.tables.values())

    @property
    def announced(self) -> int:
        """Number of live blocks as routers count them, see :attr:`Table.announced`."""
        return sum(table.announced for table in self.tables.values())

    # -- adding and removing blocks ------------------------------------------------------------------------------------

    def chunk_of(self, event: BlockStored, extras: Mapping[str, Raw | bytes] | None) -> Chunk:
        """Return a new chunk with the blocks of a store. The chunk is not added to a table.

        ``extras`` are the fields of the store that the struct BlockStored does not define.
        """
        meta = self.shared(meta_of(event))
        parent = None if event.parent_block_hash is UNSET else event.parent_block_hash
        chunk = Chunk(event.block_hashes, parent, bytes(event.token_ids), meta, carried_bytes(event.extra_keys))
        if extras or meta.weight:
            chunk.rest = Rest({name: bytes(raw) for name, raw in (extras or {}).items()} or None)
        return chunk

    def shared(self, meta: Meta) -> Meta:
        """Return the one object that chunks share for equal metas, to save memory.

        If the texts of the meta are too long to be shared, return a new object that only one chunk uses.
        """
        known = self._metas.get(meta)
        if known is not None:
            return known
        weight = _weight_of(meta)
        if weight > MAX_SHARED:
            return structs.replace(meta, weight=weight)
        if len(self._metas) >= _MAX_METAS:
            self._metas.clear()
        self._metas[meta] = meta
        return meta

    def put(self, table: Table, chunk: Chunk, a: int, b: int) -> None:
        """Add blocks ``[a, b)`` of a chunk to a table. The table must not hold any of these blocks."""
        table.blocks.update(dict.fromkeys(chunk.hashes[a:b], chunk))
        if not chunk.live:
            self.bytes += chunk.memory
        chunk.live += b - a
        self.blocks += b - a

    def take(self, blocks: MutableMapping[Hash, Chunk], block: Hash) -> Chunk:
        """Remove a block from the ``blocks`` of its table. Return the chunk that held the block."""
        chunk = blocks.pop(block)
        self.blocks -= 1
        chunk.live -= 1
        if not chunk.live:
            self.bytes -= chunk.memory
        return chunk

    def count(self) -> None:
        """Count ``blocks`` and ``bytes`` again, after the tables were changed without :meth:`put` and :meth:`take`."""
        self.blocks = self.bytes = 0
        self.cut = any(table.refs for table in self.tables.values())
        for table in self.tables.values():
            for chunk in chunks_of(table):
                chunk.live = sum(table.blocks.get(block) is chunk for block in chunk.hashes)
                self.blocks += chunk.live
                self.bytes += chunk.memory

    # -- tables ----------------------------------------------------------------------------------------------------

    def table(self, group: int | None, medium: str, locality: str | None = None, owner: str | None = None) -> Table:
        """Return the table of one residency. Create the table if there is none."""
        key = (group, medium, locality, owner)
        table = self.tables.get(key)
        if table is None:
            table = Table(self._copied_below)
            self._add(key, table)
        return table

    def _add(self, key: TableKey, table: Table) -> None:
        group, medium, _, _ = key
        self.tables[key] = table
        self._of_place.setdefault((group, medium), {})[key] = table
        self._of_group.setdefault(group, {})[key] = table
        self._of_medium.setdefault(medium, {})[key] = table

    def _drop(self, key: TableKey) -> None:
        group, medium, _, _ = key
        del self.tables[key], self._of_group[group][key], self._of_medium[medium][key]
        del self._of_place[group, medium][key]
        if not self._of_place[group, medium]:
            del self._of_place[group, medium]
        if not self._of_group[group]:
            del self._of_group[group]
        if not self._of_medium[medium]:
            del self._of_medium[medium]

    def tables_on(self, media: Iterable[str]) -> list[tuple[TableKey, Table]]:
        """Return the keys and tables of all residencies on these media."""
        return [each for medium in media for each in self._of_medium.get(medium, {}).items()]

    def tables_with(self, medium: str, block: Hash) -> list[tuple[TableKey, Table]]:
        """Return the keys and tables of all residencies on this medium that hold this block."""
        return [(key, table) for key, table in self.tables_on((medium,)) if block in table.blocks]

    def tables_at(self, group: int | None, medium: str) -> list[Table]:
        """Return the tables of one group on one medium: one for each locality and owner that the engine names."""
        return [*self._of_place.get((group, medium), {}).values()]

    def siblings(self, key: TableKey, residencies: Residencies) -> list[tuple[TableKey, Table]]:
        """Return the keys and tables of the other residencies that are one with ``key`` for routers."""
        own = filed(key, residencies)
        near = self._of_place.get(key[:2], {})
        return [each for each in near.items() if each[0] != key and filed(each[0], residencies) == own]

    def find(self, group: int | None, block: Hash) -> Chunk | None:
        """Return the chunk that holds a block of this group on any medium; None if no medium holds the block."""
        for table in self._of_group.get(group, {}).values():
            if (chunk := table.blocks.get(block)) is not None:
                return chunk
        return None

    def keep(self, media: AbstractSet[str]) -> None:
        """Remove the blocks on all media that are not in ``media``."""
        for key, table in self.tables_on(self.media_names - media):
            for chunk in chunks_of(table):
                self.blocks -= chunk.live
                self.bytes -= chunk.memory
            self._drop(key)

    def keep_group(self, group: int | None) -> None:
        """Remove the blocks of all groups except ``group``.

        Call this only on a frozen copy, because it does not update the counters ``blocks`` and ``bytes``.
        """
        for key in [key for key in self.tables if key[0] != group]:
            self._drop(key)

    def drop_empty(self, media: Iterable[str]) -> None:
        """Remove the tables on these media that hold no block."""
        for key, table in self.tables_on(media):
            if not table.blocks:
                self._drop(key)

    def clear(self) -> None:
        """Remove all blocks and tables."""
        self._begin()
        self._metas.clear()

    # -- names that routers know ---------------------------------------------------------------------------------------

    def announces(self, group: int | None, medium: str, name: Hash) -> bool:
        """Return whether routers know a block of this group on this medium by this hash: see :meth:`Table.announces`.

        The method is only for the profiles that count a block of several ranks once. Their routers distinguish neither
        localities nor owners.
        """
        near = self._of_place.get((group, medium))
        return near is not None and any(table.announces(name) for table in near.values())

    def names(self) -> Iterator[Hash]:
        """Yield the hashes by which routers know the live blocks.

        A hash that is in several tables is yielded several times.
        """
        for table in self.tables.values():
            yield from table.refs
            for block, chunk in table.blocks.items():
                if chunk.derived is None:
                    yield block

    def media(self) -> dict[str, int]:
        """Return the number of live blocks on each medium."""
        counts: dict[str, int] = {}
        for key, table in self.tables.items():
            counts[key[1]] = counts.get(key[1], 0) + len(table.blocks)
        return counts

    # -- copies ----------------------------------------------------------------------------------------------------

    def copy(self, residencies: Residencies = "named") -> Index:
        """Return a frozen copy of the live blocks, as routers file them. Later changes of this index do not affect it.

        The copy shares the chunks with this index.
        """
        frozen = Index()
        tables = self.tables if residencies == "named" else self.filed(residencies).tables
        for key, table in tables.items():
            frozen._add(key, table.freeze())
        return frozen

    def filed(self, residencies: Residencies) -> Index:
        """Return the live blocks as routers file them: tables that are one table for the routers are joined.

        If there are none, return this index itself. Otherwise the result is a frozen copy.
        """
        if residencies == "named" or not any(self.siblings(key, residencies) for key in self.tables):
            return self
        joined = Index()
        for key, table in self.tables.items():
            own = filed(key, residencies)
            known = joined.tables.get(own)
            if known is None:
                joined._add(own, table.freeze())
            else:
                known.blocks = dict(known.blocks)  # the frozen dictionary may be shared
                _join(known.blocks, table)
                known.sub_blocks += len(table.refs) or table.sub_blocks
        return joined

    def given_up(self) -> Index:
        """Return a second index, which takes over the tables of this index.

        With it, kvbus can read the blocks after this index is cleared. The caller must clear this index next, because
        otherwise both indexes would change the same tables.
        """
        last = Index()
        for key, table in self.tables.items():
            last._add(key, table)
        return last

    def merge_overlays(self) -> None:
        """Merge the layers of every table that has no frozen copies any more, see :meth:`Table.merge_overlay`."""
        for table in self.tables.values():
            table.merge_overlay()


def _join(blocks: dict[Hash, Chunk], table: Table) -> None:
    """Add the blocks of a table to the blocks of another residency, so that routers get each block once."""
    for block, chunk in table.blocks.items():
        known = blocks.get(block)
        if known is None or known.hash_only:
            blocks[block] = chunk
        elif (known.derived or chunk.derived) and _names(known, block) != _names(chunk, block):
            # Routers know the block by other hashes in each residency, because it was cut after different parents. Keep
            # both: one of them as a chunk of its own, under a hash that no engine uses.
            other = known if chunk.derived is None else chunk
            if other is known:
                blocks[block] = chunk
            at, names = other.hashes.index(block), _names(other, block)
            parent = other.reblocked()[0][at * len(names) - 1] if at else other.out_parent
            own = b"sub-blocks of " + repr(names).encode()
            rest = Rest(other.extras, names, parent)
            blocks[own] = Chunk((own,), parent, other.tokens_of(at, at + 1), other.meta, None, rest)


def _names(chunk: Chunk, block: Hash) -> list[Hash]:
    """Return the hashes by which routers know a block of a chunk: its own hash, or those of its sub-blocks."""
    derived, per_block = chunk.reblocked()
    first = chunk.hashes.index(block) * per_block
    return derived[first : first + per_block] or [block]


def chunks_of(table: Table) -> Iterator[Chunk]:
    """Yield each chunk (the blocks of one store event) that has live blocks in the table.

    Each chunk is yielded once. The order is that of the chunks' first live blocks in the table.
    """
    last: Chunk | None = None
    first: Hash | None = None
    for block, chunk in table.blocks.items():
        if chunk is not last:
            last = chunk
            first = next(name for name in chunk.hashes if table.blocks.get(name) is chunk)
        if block == first:
            yield chunk
