"""Stores without tokens: vLLM has moved blocks to another medium, and names their hashes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from msgspec import UNSET, Raw

from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import Index
from kvbus.core.normalizing.removals import Removals, leaf_first
from kvbus.core.types import Hash
from kvbus.core.wire.encoding import decode_value, encode_value, parts
from kvbus.core.wire.schema import BlockStored
from kvbus.core.wire.tokens import divide, joined


def offloaded(event: BlockStored, group: int | None, index: Index, removals: Removals) -> list[BlockStored]:
    """Give a store without tokens the tokens that its blocks have on another medium.

    Adapter, salt and session come with the tokens: without these the blocks would be another prompt's. Blocks that do
    not follow each other leave as several stores, parents first. A block that is known by its hash alone gives the
    store its block size and nothing else.

    Returns:
        The stores, none unless all blocks are known with tokens and have one block size.
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
    """Return the tokens of each block."""
    divided = {id(chunk): divide(chunk.tokens, chunk.block_size) for chunk in _distinct(chunks)}
    return [divided[id(chunk)][chunk.hashes.index(block)] for block, chunk in chunks.items()]


def _distinct(chunks: dict[Hash, Chunk]) -> list[Chunk]:
    return list({id(chunk): chunk for chunk in chunks.values()}.values())


def _complete(run: BlockStored, chunks: dict[Hash, Chunk]) -> None:
    """Give a store of blocks that follow each other the fields of these blocks on another medium, if it has none."""
    meta = chunks[run.block_hashes[0]].meta
    sent: Any = run  # a field may be UNSET
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
    """Return the entries that blocks have in the lists of their chunks; UNSET if there is none."""
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
    """Return a store as one store for each run of blocks that follow each other, parents first."""
    hashes = event.block_hashes
    starts = [at for at, parent in enumerate(parents) if not at or parent != hashes[at - 1]]
    if len(starts) == 1:
        return [event]
    runs = cast("list[BlockStored]", parts(event, list(zip(starts, [*starts[1:], len(hashes)], strict=True))))
    for start, run in zip(starts[1:], runs[1:], strict=True):
        run.parent_block_hash = parents[start]
    order = {block: at for at, block in enumerate(leaf_first(list(zip(hashes, parents, strict=True))[::-1]))}
    return sorted(runs, key=lambda run: -order[run.block_hashes[0]])
