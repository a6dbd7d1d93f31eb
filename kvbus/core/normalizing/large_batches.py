"""Divide the events of a batch whose removals name very many blocks, so that kvbus can serve others between the parts.

A removed block costs several microseconds, and a stored block about one. A batch of 16 MiB can name millions of blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Raw, structs

from kvbus.core.normalizing.admission import Step
from kvbus.core.normalizing.copies import counts_left
from kvbus.core.types import Hash
from kvbus.core.wire.encoding import encode_value
from kvbus.core.wire.schema import BlockRemoved, BlockStored

PART: Final = 32_768
"""Number of blocks that kvbus stores or removes before it serves other connections.

The write-ahead log counts parts: a change of this number needs a new ``VERSION`` of the state.
"""


def in_parts(steps: Sequence[Step]) -> deque[list[Step]]:
    """Divide the checked events of a batch into parts that store or remove about :data:`PART` blocks each.

    Almost every batch is one part. Parts have the order of the events. Only two kinds of events are divided:

    * Removals. The blocks in an earlier part are removed first, even if they are parents of blocks in a later part.
    * One sequence of blocks, which admission has divided into consecutive stores. Other stores stay in one part,
      because the parent of a store may come later in the batch.
    """
    parts: deque[list[Step]] = deque([[]])
    room = PART
    last: Hash | None = None  # the last block of the newest stores, if these are one sequence
    for step in steps:
        event, way = step
        if isinstance(event, BlockRemoved):
            for removal in _divided(event, room):
                if len(removal.block_hashes) > room:
                    parts.append([])
                    room = PART
                parts[-1].append((removal, way))
                room -= len(removal.block_hashes)
            continue
        if isinstance(event, BlockStored):
            hashes, parent = event.block_hashes, event.parent_block_hash
            follows = parent == last is not None
            if room <= 0 and follows:
                parts.append([])
                room = PART
            alone = not parts[-1] or not isinstance(parts[-1][-1][0], BlockStored)
            last = hashes[-1] if follows or alone else None
            room -= len(hashes)
        parts[-1].append(step)
    return parts


def _divided(event: BlockRemoved, room: int) -> Iterator[BlockRemoved]:
    """Yield a removal as one event of up to ``room`` blocks, and further events of up to :data:`PART` blocks."""
    hashes = event.block_hashes
    if len(hashes) <= room:
        yield event
        return
    counts = counts_left(event)
    first, end = 0, room if room > 0 else PART
    while first < len(hashes):
        part = structs.replace(event, block_hashes=hashes[first:end])
        if counts is not None:
            part.remaining_copy_counts = Raw(encode_value(counts[first:end]))
        yield part
        first, end = end, end + PART
