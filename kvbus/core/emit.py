"""Chunks of the index, said as events: what a router is told of blocks it does not know yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Raw, UnsetType

from kvbus.core.codec import with_extras
from kvbus.core.index import Chunk, Index, raw_or_unset, slice_array
from kvbus.core.schema import BlockStored, Event
from kvbus.core.types import Hash

OutEvent = Event | dict[str, Any]
"""An event ready to be encoded; a plain map where it carries fields no struct knows."""


def announce(index: Index) -> Iterator[OutEvent]:
    """The shortest list of stores that builds the live set from nothing: parents first, one medium at a time."""
    for _, chunk, a, b in index.snapshot():
        yield from stores_of(index, chunk, a, b)


def stores_of(index: Index, chunk: Chunk, a: int, b: int) -> Iterable[OutEvent]:
    """Stores that announce blocks ``[a, b)`` of a chunk as a router sees them."""
    if chunk.out is not None:
        base = len(chunk.token_list()) // len(chunk.out)
        pieces = chunk.block_size // base
        return recut_stores(index, chunk, list(range(a * pieces, b * pieces)), base)
    whole = a == 0 and b == len(chunk.hashes)
    size = chunk.block_size
    tokens = Raw(chunk.tokens) if whole else slice_array(chunk.tokens, a * size, b * size)
    keys = chunk.extra_keys
    if keys is not None and not whole and keys[0] != 0xC0:
        keys = bytes(slice_array(keys, a, b))
    parent = out_parent(index, group_of(chunk), chunk.parent_of(a))
    return [_as_event(chunk, chunk.hashes[a:b], parent, tokens, size, keys)]


def recut_stores(index: Index, chunk: Chunk, positions: list[int], base: int) -> Iterator[OutEvent]:
    """Stores of the derived pieces at these positions of a re-cut chunk, one per run."""
    out = chunk.out or []
    start = 0
    while start < len(positions):
        end = start + 1
        while end < len(positions) and positions[end] == positions[end - 1] + 1:
            end += 1
        a, b = positions[start], positions[end - 1] + 1
        parent = out[a - 1] if a else out_parent(index, group_of(chunk), chunk.parent)
        tokens = slice_array(chunk.tokens, a * base, b * base)
        yield _as_event(chunk, out[a:b], parent, tokens, base, None)
        start = end


def group_of(chunk: Chunk) -> int | None:
    """The group a chunk was stored in."""
    return None if isinstance(chunk.meta.group_idx, UnsetType) else chunk.meta.group_idx


def out_parent(index: Index, group: int | None, parent: Hash | None) -> Hash | None:
    """The name a router knows an engine's block by: the last piece of it where it was re-cut."""
    if parent is None:
        return None
    holder = index.find(group, parent)
    if holder is None or holder.out is None:
        return parent
    pieces = len(holder.out) // len(holder.hashes)
    return holder.out[(holder.hashes.index(parent) + 1) * pieces - 1]


def _as_event(
    chunk: Chunk, hashes: list[Hash], parent: Hash | None, tokens: Raw, block_size: int, keys: bytes | None
) -> OutEvent:
    meta = chunk.meta
    event = BlockStored(
        hashes,
        parent,
        tokens,
        block_size,
        meta.lora_id,
        meta.medium,
        meta.lora_name,
        meta.group_idx,
        meta.kind,
        meta.window,
        raw_or_unset(keys),
        raw_or_unset(meta.locality),
        raw_or_unset(meta.ownership),
        raw_or_unset(meta.session_id),
        raw_or_unset(meta.cache_salt),
        raw_or_unset(meta.lookahead),
    )
    if chunk.extras:
        return with_extras(event, {name: Raw(value) for name, value in chunk.extras.items()})
    return event
