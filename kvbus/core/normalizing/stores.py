"""Apply the stores of one source to its index.

This includes copies of live blocks, blocks with an unknown parent, blocks that have to be cut, and stores without
tokens. vLLM sends a store without tokens when it has moved blocks to another medium. Such a store has only the blocks'
hashes (:func:`tokens_elsewhere`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from msgspec import UNSET, Raw

from kvbus.core.blocks.announce import consecutive, reblocked_stores, store_of
from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import Index, Table, TableKey
from kvbus.core.normalizing.admission import Checked, Step
from kvbus.core.normalizing.block_size import Treatment
from kvbus.core.normalizing.cache import EngineCache
from kvbus.core.normalizing.filing import Filing
from kvbus.core.normalizing.reblocking import Reblocking
from kvbus.core.normalizing.removals import Removals, leaf_first
from kvbus.core.types import Filtered, Hash, Reason
from kvbus.core.wire.encoding import decode_value, encode_value, extras_of, parts
from kvbus.core.wire.schema import BlockStored
from kvbus.core.wire.tokens import divide, joined


class StoreApplier:
    """The rules for one source's unusual stores. ``Normalizer._put`` applies the usual stores itself."""

    def __init__(self, cache: EngineCache, removals: Removals, reblocking: Reblocking, filing: Filing) -> None:
        self._cache = cache
        self._removals = removals
        self._reblocking = reblocking
        self._filing = filing

    def apply(self, step: Checked) -> None:
        """Apply a store that is not a usual one of its lane."""
        if step.chunk is not None:
            self.apply_chunk(step.key, step.chunk)
        else:
            self._apply_without_tokens(step)

    def _apply_without_tokens(self, step: Checked) -> None:
        """Apply a store without tokens.

        Use the tokens that its blocks have on another medium. If no medium has them, apply the store without tokens. If
        the store has no block size either, only count it.
        """
        cache, event, extras = self._cache, step.event, step.extras
        group, medium = step.key[:2]
        runs = tokens_elsewhere(event, group, cache.index, self._removals)
        if not runs and event.block_size:
            cache.note(Filtered.HASH_ONLY, medium)
            self.apply_chunk(step.key, cache.index.chunk_of(event, extras))
        elif not runs:
            cache.note(Filtered.TOKENLESS, medium)
        hashes = event.block_hashes
        for run in runs:
            first = hashes.index(run.block_hashes[0])
            own = extras and extras_of(extras, len(hashes), first, first + len(run.block_hashes))
            self.apply_chunk(step.key, cache.index.chunk_of(run, own))

    def apply_chunk(self, key: TableKey, chunk: Chunk) -> None:
        """Apply a store: add its new blocks to the index, or leave it out because of its block size or its parent."""
        cache, (group, medium, _, _) = self._cache, key
        treatment = cache.stream.sizes.treatment(key, chunk)
        if treatment is Treatment.REJECT:
            cache.refuse(Reason.BLOCK_SIZE, medium)
        elif treatment is Treatment.COARSE or treatment is Treatment.TAIL:
            self._leave_out(key, chunk, treatment)
        else:
            table = cache.index.table(*key)
            if treatment is Treatment.NATIVE:
                cache.stream.sizes.groups[group].fine.add(medium)
            if self.parent_ok(key, chunk.parent, chunk.hashes, table):
                self.put(key, table, chunk, treatment)

    def put(self, key: TableKey, table: Table, chunk: Chunk, treatment: Treatment) -> None:
        """Add the new blocks of a store to the index, and count copies of its live blocks.

        The order matters: a live block without tokens must be gone before the new blocks are counted, because this
        store replaces it. The copies of such a block are added at the end, when the block is live again.
        """
        cache = self._cache
        holder = None if chunk.parent is None else cache.index.find(key[0], chunk.parent)
        if holder is not None and holder.hashes[-1] == chunk.parent:
            # Keep the hash object of the index, not an equal one. If an engine stores the blocks of a chain one by one,
            # each hash is then in memory once.
            chunk.parent = holder.hashes[-1]
        copies = self._take_without_tokens(key, table, chunk)
        if treatment is Treatment.REBLOCK:
            self._reblocking.cut(key, chunk)
        new = [at for at, block in enumerate(chunk.hashes) if block not in table.blocks]
        if new and not cache.has_room(len(new), chunk.memory):
            cache.refused.add((key[1], Reason.INDEX_FULL))
            return
        if len(new) < len(chunk.hashes):
            cache.copies.store(table, chunk)
        for a, b in consecutive(new):
            cache.index.put(table, chunk, a, b)
            self._announce(key, chunk, a, b)
        for block, further in copies.items():
            cache.copies.add(table, block, further)

    def _leave_out(self, key: TableKey, chunk: Chunk, treatment: Treatment) -> None:
        """Remember the blocks of a store that kvbus does not announce to routers.

        So kvbus recognizes the engine's removals of these blocks later.
        """
        cache, medium = self._cache, key[1]
        if chunk.hash_only:
            cache.refused.add((medium, Filtered.TOKENLESS))
        new = cache.left_out.new(key, chunk, treatment)
        if not new or cache.has_room(new, chunk.memory):
            cache.left_out.store(key, chunk, treatment)
        elif treatment is Treatment.COARSE:
            # This large block, whose tokens are also announced in smaller blocks, has no room in kvbus's memory. So
            # when the engine removes it, kvbus may remove a smaller block with the same hash instead. Record that the
            # blocks on this medium are uncertain.
            cache.refused.add((medium, Reason.INDEX_FULL))

    def parent_ok(self, key: TableKey, parent: Hash | None, hashes: Sequence[Hash], table: Table) -> bool:
        """Return whether the parent of a store of ``hashes`` allows to apply the store. If not, count the reason.

        A store whose parent is unknown is applied unless the operator has configured that it is dropped.
        """
        cache, (group, medium, _, _) = self._cache, key
        if parent is None:
            return True
        if parent in hashes and parent not in table.blocks:
            cache.refuse(Reason.SELF_PARENT, medium)
            return False
        if cache.index.find(group, parent) is None:
            if cache.spec.orphans == "drop":
                cache.stats.filtered[Filtered.ORPHAN_DROPPED] += 1
                # Record for this medium the reasons for which any store of the source was refused. The parent may be
                # unknown because its store was refused on another medium.
                cache.refused.update([(medium, reason) for _, reason in cache.refused])
                return False
            cache.stats.filtered[Filtered.ORPHAN_PASSED] += 1
        return True

    def _take_without_tokens(self, key: TableKey, table: Table, chunk: Chunk) -> dict[Hash, int]:
        """Remove live blocks with unknown tokens from the index if this store has their tokens.

        The caller then stores and announces these blocks with tokens.

        Returns:
            For each removed block, how many copies of it the engine held before this store.
        """
        copies: dict[Hash, int] = {}
        live = [] if chunk.hash_only else [block for block in chunk.hashes if block in table.blocks]
        for block in live:
            if table.blocks[block].hash_only:
                copies[block] = 1 + table.copies.get(block, 0)
                self._removals.replace(key, table, block)
        return copies

    def _announce(self, key: TableKey, chunk: Chunk, a: int, b: int) -> None:
        """Append the stores of the chunk's new blocks ``[a, b)`` to the outgoing events, after all queued removals."""
        if chunk.derived is None:
            stores = [store_of(self._cache.index, chunk, a, b)]
        else:
            stores = list(reblocked_stores(chunk, self._reblocking.add(key, chunk, a, b)))
        if stores:
            self._removals.flush()
            self._cache.leaving.extend(stores)
            if self._cache.filed:
                self._filing.store(key, stores)


def first_stores(steps: Sequence[Step], at: int) -> dict[tuple[int | None, Hash], int]:
    """Return, for each block of consecutive stores of a batch, the position of the first store that has the block.

    The stores are those around position ``at``, up to the next event of another type on each side. A block is named by
    its group and hash.
    """
    begin, end = at, at + 1
    while begin and type(steps[begin - 1][0]) is BlockStored:
        begin -= 1
    while end < len(steps) and type(steps[end][0]) is BlockStored:
        end += 1
    first: dict[tuple[int | None, Hash], int] = {}
    for position in range(begin, end):
        event, way = steps[position]
        for block in event.block_hashes:
            first.setdefault((way.key[0], block), position)
    return first


def ancestors(
    steps: Sequence[Step], at: int, first: dict[tuple[int | None, Hash], int], taken: set[int], index: Index
) -> list[Step]:
    """Return the later stores that have the unknown ancestors of the store at position ``at``, parents first.

    Add their positions to ``taken``. Stores whose positions are in ``taken`` already are left out. ``first`` is the
    result of :func:`first_stores`.
    """
    found: list[Step] = []
    position = at
    while True:
        event, way = steps[position]
        group, parent = way.key[0], event.parent_block_hash
        position = first.get((group, parent), 0)
        if position <= at or position in taken or index.find(group, parent) is not None:
            return found[::-1]
        taken.add(position)
        found.append(steps[position])


# -- stores without tokens -------------------------------------------------------------------------------------------


def tokens_elsewhere(event: BlockStored, group: int | None, index: Index, removals: Removals) -> list[BlockStored]:
    """Give a store without tokens the tokens that its blocks have on another medium. Split the store where necessary.

    The adapter, the cache salt and the session are copied with the tokens: without them, the blocks would belong to
    another prompt. Blocks that do not follow each other get separate stores, parents first. If a block is known, but
    without tokens there too, copy only its block size to the store.

    Returns:
        The stores. The list is empty unless all blocks have known tokens and the same block size.
    """
    chunks: dict[Hash, Chunk] = {}
    for block in event.block_hashes:
        chunk = index.find(group, block) or removals.just_removed(group, block)
        if chunk is None:
            return []
        if chunk.hash_only:
            event.block_size = chunk.block_size
            return []
        chunks[block] = chunk
        if chunk.block_size != chunks[event.block_hashes[0]].block_size:
            return []
    parents = [chunk.parent_of(chunk.hashes.index(block)) for block, chunk in chunks.items()]
    if event.parent_block_hash is None or event.parent_block_hash is UNSET:
        event.parent_block_hash = parents[0]
    event.block_size = chunks[event.block_hashes[0]].block_size
    event.token_ids = Raw(joined(_tokens(chunks), len(chunks) * event.block_size))
    runs = _runs(event, parents)
    for run in runs:
        _complete(run, chunks)
    return runs


def _tokens(chunks: dict[Hash, Chunk]) -> list[bytes]:
    """Return the encoded tokens of each block, in the order of ``chunks``."""
    divided = {id(chunk): divide(chunk.tokens, chunk.block_size) for chunk in _distinct(chunks)}
    return [divided[id(chunk)][chunk.hashes.index(block)] for block, chunk in chunks.items()]


def _distinct(chunks: dict[Hash, Chunk]) -> list[Chunk]:
    return list({id(chunk): chunk for chunk in chunks.values()}.values())


def _complete(run: BlockStored, chunks: dict[Hash, Chunk]) -> None:
    """Fill in the missing fields of a store of consecutive blocks. Take them from the same blocks on another medium."""
    meta = chunks[run.block_hashes[0]].meta
    sent: Any = run  # typed as Any: fields declared as Raw are UNSET if the engine left them out
    if sent.lora_id in (None, UNSET) and sent.lora_name in (None, UNSET):
        run.lora_id, run.lora_name = meta.lora_id, meta.lora_name
    if sent.cache_salt is UNSET and meta.cache_salt is not None:
        run.cache_salt = Raw(meta.cache_salt)
    if sent.session_id is UNSET and meta.session_id is not None:
        run.session_id = Raw(meta.session_id)
    if sent.extra_keys is UNSET:
        run.extra_keys = _entries(run.block_hashes, chunks, lookahead=False)
    if sent.lookahead_token_ids is UNSET:
        run.lookahead_token_ids = _entries(run.block_hashes, chunks, lookahead=True)


def _entries(hashes: Sequence[Hash], chunks: dict[Hash, Chunk], *, lookahead: bool) -> Any:
    """Build the value of a store's list field from the chunks that hold its blocks, with one entry for each block.

    The field is ``lookahead_token_ids`` if ``lookahead`` is True, otherwise ``extra_keys``. Return UNSET if no block
    has an entry.
    """
    lists: dict[int, list[Any] | None] = {}
    for chunk in _distinct({block: chunks[block] for block in hashes}):
        raw = chunk.meta.lookahead if lookahead else chunk.extra_keys
        lists[id(chunk)] = None if raw is None else decode_value(raw)
    found: list[Any] = []
    for block in hashes:
        entries = lists[id(chunks[block])]
        found.append(entries[chunks[block].hashes.index(block)] if entries else None)
    return encode_value(found) if any(found) else UNSET


def _runs(event: BlockStored, parents: Sequence[Hash | None]) -> list[BlockStored]:
    """Split a store into one store for each sequence of blocks that follow each other.

    Return parents before children.
    """
    hashes = event.block_hashes
    starts = [at for at, parent in enumerate(parents) if not at or parent != hashes[at - 1]]
    if len(starts) == 1:
        return [event]
    runs = cast("list[BlockStored]", parts(event, list(zip(starts, [*starts[1:], len(hashes)], strict=True))))
    for start, run in zip(starts[1:], runs[1:], strict=True):
        run.parent_block_hash = parents[start]
    order = {block: at for at, block in enumerate(leaf_first(list(zip(hashes, parents, strict=True))[::-1]))}
    return sorted(runs, key=lambda run: -order[run.block_hashes[0]])
