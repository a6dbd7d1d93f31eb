"""Stores without tokens: blocks that vLLM has moved to another medium, and names by their hashes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from msgspec import UNSET, Raw

from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import Index
from kvbus.core.normalizing.removal_order import leaf_first
from kvbus.core.normalizing.removals import Removals
from kvbus.core.types import Hash
from kvbus.core.wire.encoding import decode_value, encode_value
from kvbus.core.wire.parts import parts
from kvbus.core.wire.schema import BlockStored
from kvbus.core.wire.tokens import divide, joined


def offloaded(event: BlockStored, group: int | None, index: Index, removals: Removals) -> list[BlockStored]:
    """Give a store without tokens those that its hashes have on another medium.

    With them come adapter, salt and session, without which they would be another prompt's blocks.
    Nothing if not all of them are known, with one block size. Blocks that do not follow each other leave as several
    stores, parents first.
    """
    found: list[bytes] = []
    parents: list[Hash | None] = []
    chunks: dict[Hash, Chunk] = {}
    first: Chunk | None = None
    last: Chunk | None = None
    divided: list[bytes] = []
    for block in event.block_hashes:
        chunk = index.find(group, block) or removals.just_removed(group, block)
        if chunk is not None and chunk.hash_only:
            event.block_size = chunk.block_size
        if chunk is None or chunk.hash_only or (first is not None and chunk.block_size != first.block_size):
            return []
        first = first or chunk
        if chunk is not last:
            last, divided = chunk, divide(chunk.tokens, chunk.block_size)
        at = chunk.hashes.index(block)
        found.append(divided[at])
        parents.append(chunk.parent_of(at))
        chunks[block] = chunk
    if first is None:
        return []
    if event.parent_block_hash is None:
        event.parent_block_hash = parents[0]
    event.block_size = first.block_size
    event.token_ids = Raw(joined(found, first.block_size))
    runs = _chains(event, parents)
    for run in runs:
        _complete(run, chunks)
    return runs


def _complete(run: BlockStored, chunks: dict[Hash, Chunk]) -> None:
    """Give a store of blocks that follow each other what they have on another medium, and it does not say itself."""
    meta = chunks[run.block_hashes[0]].meta
    if run.lora_id is None and run.lora_name is None:
        run.lora_id, run.lora_name = meta.lora_id, meta.lora_name
    sent: Any = run  # a field of raw msgpack may be UNSET
    if sent.cache_salt is UNSET and meta.cache_salt is not None:
        run.cache_salt = Raw(meta.cache_salt)
    if sent.session_id is UNSET and meta.session_id is not None:
        run.session_id = Raw(meta.session_id)
    if sent.extra_keys is UNSET:
        run.extra_keys = _entries(run.block_hashes, chunks, lookahead=False)
    if sent.lookahead_token_ids is UNSET:
        run.lookahead_token_ids = _entries(run.block_hashes, chunks, lookahead=True)


def _entries(hashes: Sequence[Hash], chunks: dict[Hash, Chunk], *, lookahead: bool) -> Any:
    """The entries that blocks have in the lists of their chunks; nothing if there is none."""
    found: list[Any] = []
    last: Chunk | None = None
    entries: list[Any] | None = None
    for block in hashes:
        chunk = chunks[block]
        if chunk is not last:
            raw = chunk.meta.lookahead if lookahead else chunk.extra_keys
            last, entries = chunk, None if raw is None else decode_value(raw)
        found.append(entries[chunk.hashes.index(block)] if entries else None)
    return encode_value(found) if any(found) else UNSET


def _chains(event: BlockStored, parents: Sequence[Hash | None]) -> list[BlockStored]:
    """A store as one for each run of blocks that follow each other, parents first."""
    hashes = event.block_hashes
    starts = [at for at, parent in enumerate(parents) if not at or parent != hashes[at - 1]]
    if len(starts) == 1:
        return [event]
    runs = cast("list[BlockStored]", parts(event, list(zip(starts, [*starts[1:], len(hashes)], strict=True))))
    for start, run in zip(starts[1:], runs[1:], strict=True):
        run.parent_block_hash = parents[start]
    order = {block: at for at, block in enumerate(leaf_first(list(zip(hashes, parents, strict=True))[::-1]))}
    return sorted(runs, key=lambda run: -order[run.block_hashes[0]])
