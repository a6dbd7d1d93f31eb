"""Chunks in an index, as a store puts them there."""

from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.live_order import in_order
from kvbus.core.blocks.size import chunk_bytes
from kvbus.core.wire.schema import BlockStored
from tests.doubles.payloads import payload, store
from tests.typed import well_formed


def stored(said):
    (event,) = well_formed(payload(said)).events
    assert isinstance(event, BlockStored)
    return event


def put(index, hashes, parent=None, *, group=None, medium="GPU", size=16):
    event = stored(store(hashes, parent, group=group, medium=medium, block_size=size))
    chunk = Chunk(tuple(event.block_hashes), event.parent_block_hash, bytes(event.token_ids), index.meta(event))
    table = index.table(group, medium)
    table.blocks.update(dict.fromkeys(hashes, chunk))
    index.size.add(chunk, len(hashes), chunk_bytes(chunk), first=True)
    return chunk


def announced(index):
    return [(key, list(chunk.hashes[a:b])) for key, chunk, a, b in in_order(index)]
