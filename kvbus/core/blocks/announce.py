"""Build the events that announce the live blocks of an index to routers that do not know them yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from msgspec import Raw, UnsetType

from kvbus.core.blocks.chunk import Chunk, name_bytes, raw_or_unset
from kvbus.core.blocks.index import MAX_RUN, Index, TableKey, chunks_of
from kvbus.core.blocks.live_order import PAUSE, Run, chains, in_order, keys_of, live_runs, tokens_of
from kvbus.core.types import Hash
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.encoding import extras_of, with_extras
from kvbus.core.wire.schema import PER_BLOCK, BlockRemoved, BlockStored, HashOnlyRemoved
from kvbus.core.wire.tokens import divide, joined, slice_array

MOST_BLOCKS: Final = 4095
"""Maximum number of blocks in a batch that kvbus builds.

If each block has its own event, and AllBlocksCleared comes first, such a batch has 4,096 events. The vLLM router 0.1.17
refuses more.
"""

Piece = Chunk | tuple[Any, ...]
"""The blocks that one store event announces.

A piece has one of three forms. A chunk stands for all its blocks. A tuple ``(chunk, first, end)`` stands for a range of
the blocks, or of the sub-blocks, of one chunk. A tuple of chunks, each with one block, stands for blocks that follow
each other. The first form is the cheapest: it is only a pointer, so the garbage collector has no further object to
track.
"""


def announce(index: Index) -> Iterator[AnyEvent]:
    """Yield the stores that announce all live blocks of an index to a router that has no blocks.

    The blocks are announced in as few events as possible. Parents come before their children, and the blocks of one
    medium before the blocks of the next medium.
    """
    for events in slices(index, MOST_BLOCKS):
        yield from events


def slices(index: Index, size: int, known: Sequence[Index] = ()) -> Iterator[list[AnyEvent]]:
    """Yield the stores that announce all live blocks of an index, in lists.

    All stores of a list together have ``size`` blocks; the last list may have fewer. :func:`layout` decides the order
    and the division. Blocks that are in one of the indexes ``known`` are left out. An empty list is a pause: the
    caller may do other work before it asks for the next list.
    """
    stores = StoreEventBuilder(index)
    for pieces in layout(index, size, known):
        yield stores.of(pieces)


def layout(index: Index, size: int, known: Sequence[Index] = ()) -> Iterator[Sequence[Piece]]:
    """Divide the live blocks of an index into pieces, and yield the pieces in lists of exactly ``size`` blocks.

    Each piece becomes one store event. Blocks are counted as routers count them, so a reblocked block counts as its
    sub-blocks. The last list may be shorter. If several stored runs have one block each, and each block is the parent
    of the next one, they become one piece (:func:`~kvbus.core.blocks.live_order.chains`). A piece that does not fit
    into the rest of a list continues in the next list. Blocks that are in one of the indexes ``known`` are left out. An
    empty list is a pause, because a large list takes tens of milliseconds, and the caller has other work.
    """
    pieces: list[Piece] = []
    room = size
    pause = size - PAUSE
    for chain in chains(index, runs(index, known)):
        if not chain:
            yield ()
            continue
        _, chunk, start, end = chain[0]
        single, length = len(chain) == 1, len(chunk.derived or chunk.hashes)
        if not single:
            start, end = 0, len(chain)
        while start < end:
            stop = min(end, start + room, start + MAX_RUN)
            if not single:
                pieces.append(tuple([each for _, each, _, _ in chain[start:stop]]))
            elif start == 0 and stop == length:
                pieces.append(chunk)
            else:
                pieces.append((chunk, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield tuple(pieces)
                pieces, room, pause = [], size, size - PAUSE
            elif room <= pause:
                yield ()
                pause = room - PAUSE
    if pieces:
        yield tuple(pieces)


class StoreEventBuilder:
    """A builder of store events. It turns pieces (blocks of one index, see :data:`Piece`) into events."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._divided: tuple[Chunk, list[bytes]] | None = None
        """The reblocked chunk of the last piece that came from one, and the tokens of each of its sub-blocks.

        The next piece is often of the same chunk, so its tokens need not be divided again. None before the first such
        piece.
        """

    def of(self, pieces: Iterable[Piece]) -> list[AnyEvent]:
        """Return one store event for each piece, which announces the blocks of the piece (see :data:`Piece`)."""
        events: list[AnyEvent] = []
        for piece in pieces:
            self.put(events, piece)
        return events

    def put(self, events: list[AnyEvent], piece: Piece) -> int:
        """Append the store event of a piece to ``events``. Return the number of blocks in the piece."""
        if isinstance(piece, Chunk):
            chunk, a, b = piece, 0, len(piece.derived or piece.hashes)
        elif isinstance(piece[-1], Chunk):
            events.append(_chain_store(self._index, piece))
            return len(piece)
        else:
            chunk, a, b = piece
        if chunk.derived is None:
            events.append(store_of(self._index, chunk, a, b))
        else:
            if self._divided is None or self._divided[0] is not chunk:
                self._divided = chunk, _sub_blocks(chunk)
            events.append(_sub_block_store(chunk, a, b, self._divided[1]))
        return b - a


def removals_of(index: Index) -> list[AnyEvent]:
    """Return the events that remove all blocks of an index from a router: children before their parents."""
    events: list[AnyEvent] = []
    last: BlockRemoved | None = None
    spelled: tuple[Any, ...] = ()
    for _, chunk, first, end in reversed(list(runs(index))):
        names = chunk.hashes if chunk.derived is None else chunk.derived
        for stop in range(end, first, -MAX_RUN):
            gone = tuple(reversed(names[max(first, stop - MAX_RUN) : stop]))
            if last is not None and spelled == spelling(chunk) and len(last.block_hashes) + len(gone) <= MAX_RUN:
                last.block_hashes += gone
            else:
                spelled = spelling(chunk)
                last = removal_of(spelled, gone)
                events.append(last)
    return events


def spelling(chunk: Chunk) -> tuple[Any, ...]:
    """Return what determines the form of a removal of a chunk's blocks.

    It is the medium, the group, the locality and the owner as the engine named them, and whether the engine announced
    the blocks without tokens.
    """
    meta = chunk.meta
    return meta.medium, meta.group_idx, name_bytes(meta.locality), name_bytes(meta.ownership), chunk.hash_only


def removal_of(spelled: tuple[Any, ...], names: tuple[Hash, ...]) -> BlockRemoved:
    """Return the removal of blocks by these names, in the form that :func:`spelling` returned for their chunk."""
    medium, group_idx, locality, ownership, hash_only = spelled
    kind: type[BlockRemoved] = HashOnlyRemoved if hash_only else BlockRemoved
    return kind(names, medium, group_idx, raw_or_unset(locality), raw_or_unset(ownership))


def runs(index: Index, known: Sequence[Index] = ()) -> Iterator[Run]:
    """Yield the live blocks of an index as runs.

    A chunk has the blocks of one store event. A run is a range ``[first, end)`` of a chunk's blocks, or of its
    sub-blocks if the chunk is reblocked. Each run has the key of its table. Blocks that routers know already, because
    an index in ``known`` has them, are left out.
    """
    announced = {(key, name) for other in known for key, name in _derived_names(other)}
    for key, chunk, a, b in in_order(index):
        if chunk.derived is None:
            if known:
                fresh = [
                    at for at in range(a, b) if not any(other.announces(*key[:2], chunk.hashes[at]) for other in known)
                ]
                yield from ((key, chunk, *run) for run in consecutive(fresh))
            else:
                yield key, chunk, a, b
            continue
        derived, per_block = chunk.reblocked()
        # Announce a sub-block only once: two chunks (runs of stored blocks) may contain the same sub-block, because an
        # engine may divide a prefix into blocks in two ways.
        fresh = [at for at in range(a * per_block, b * per_block) if (key, derived[at]) not in announced]
        announced.update((key, derived[at]) for at in fresh)
        yield from ((key, chunk, *run) for run in consecutive(fresh))


def _derived_names(index: Index) -> Iterator[tuple[TableKey, Hash]]:
    """Yield the table key and the derived hash of each live sub-block of an index. A sub-block may be repeated."""
    for key, table in index.tables.items():
        if table.refs or table.sub_blocks:
            for chunk in chunks_of(table):
                derived, per_block = chunk.reblocked()
                for a, b in live_runs(table, chunk):
                    yield from ((key, name) for name in derived[a * per_block : b * per_block])


def store_of(index: Index, chunk: Chunk, a: int, b: int) -> AnyEvent:
    """Return the store that announces blocks ``[a, b)`` of a chunk that is not reblocked."""
    tokens, keys, lookahead = _part(chunk, a, b)
    parent = out_parent(index, group_of(chunk), chunk.parent_of(a))
    extras = extras_of(chunk.extras, len(chunk.hashes), a, b) if chunk.extras else None
    return _as_event(chunk, chunk.hashes[a:b], parent, tokens, chunk.block_size, keys, lookahead, extras)


def _part(chunk: Chunk, a: int, b: int) -> tuple[Raw, bytes | None, bytes | None]:
    """Return the tokens, the extra keys and the lookahead tokens of blocks ``[a, b)`` of a chunk, each as msgpack."""
    keys, lookahead = chunk.extra_keys, chunk.meta.lookahead
    if a == 0 and b == len(chunk.hashes):
        return Raw(chunk.tokens), keys, lookahead
    return Raw(chunk.tokens_of(a, b)), _entries(keys, a, b), _entries(lookahead, a, b)


def _chain_store(index: Index, chain: Sequence[Chunk]) -> AnyEvent:
    """Return one store event for a chain of blocks.

    Each block has its own chunk, and is the parent of the next block.
    """
    first = chain[0]
    hashes = [chunk.hashes[0] for chunk in chain]
    parent = out_parent(index, group_of(first), first.parent)
    keys, lookahead = keys_of(chain), first.meta.lookahead
    return _as_event(first, hashes, parent, tokens_of(chain), first.block_size, keys, lookahead, None)


def _entries(raw: bytes | None, a: int, b: int) -> bytes | None:
    """Return the entries of blocks ``[a, b)`` from a msgpack array that has one entry for each block.

    If ``raw`` is a msgpack null or None, return it unchanged.
    """
    return raw if raw is None or raw[0] == 0xC0 else slice_array(raw, a, b)


def reblocked_stores(chunk: Chunk, positions: list[int]) -> Iterator[AnyEvent]:
    """Yield store events for the sub-blocks of a reblocked chunk at the given positions, in ascending order.

    Consecutive sub-blocks share an event of at most :data:`~kvbus.core.blocks.index.MAX_RUN` sub-blocks.
    """
    tokens = _sub_blocks(chunk) if positions else []
    for first, end in consecutive(positions):
        for start in range(first, end, MAX_RUN):
            yield _sub_block_store(chunk, start, min(end, start + MAX_RUN), tokens)


def _sub_blocks(chunk: Chunk) -> list[bytes]:
    """Return the tokens of each sub-block of a reblocked chunk, as one msgpack array per sub-block."""
    return divide(chunk.tokens, chunk.block_size // chunk.reblocked()[1])


def _sub_block_store(chunk: Chunk, a: int, b: int, tokens: list[bytes]) -> AnyEvent:
    """Return one store event for the sub-blocks ``[a, b)`` of a reblocked chunk.

    ``tokens`` has the tokens of every sub-block of the chunk, see :func:`_sub_blocks`.
    """
    derived, per_block = chunk.reblocked()
    base = chunk.block_size // per_block
    parent = derived[a - 1] if a else chunk.out_parent
    extras = {name: Raw(value) for name, value in (chunk.extras or {}).items() if name not in PER_BLOCK}
    return _as_event(chunk, derived[a:b], parent, Raw(joined(tokens[a:b], (b - a) * base)), base, None, None, extras)


def consecutive(positions: list[int]) -> Iterator[tuple[int, int]]:
    """Group ascending positions into runs of consecutive positions. Yield each run as a range ``[first, end)``."""
    start = 0
    while start < len(positions):
        end = start + 1
        while end < len(positions) and positions[end] == positions[end - 1] + 1:
            end += 1
        yield positions[start], positions[end - 1] + 1
        start = end


def blocks_in(events: list[AnyEvent]) -> int:
    """Return the total number of block hashes in the stores and removals among the events."""
    count = 0
    for event in events:
        if type(event) is BlockStored or isinstance(event, BlockRemoved):
            count += len(event.block_hashes)
        elif type(event) is dict:
            count += len(event["block_hashes"])
    return count


def group_of(chunk: Chunk) -> int | None:
    """Return the group in which the blocks of a chunk were stored; None if the engine named no group."""
    return None if isinstance(chunk.meta.group_idx, UnsetType) else chunk.meta.group_idx


def out_parent(index: Index, group: int | None, parent: Hash | None) -> Hash | None:
    """Return the hash by which routers know a parent block that the engine named.

    For a reblocked block, it is the derived hash of the block's last sub-block.
    """
    if parent is None:
        return None
    holder = index.find(group, parent)
    if holder is None or holder.derived is None:
        return parent
    derived, per_block = holder.reblocked()
    return derived[(holder.hashes.index(parent) + 1) * per_block - 1]


def _as_event(
    chunk: Chunk,
    hashes: Sequence[Hash],
    parent: Hash | None,
    tokens: Raw,
    block_size: int,
    keys: bytes | None,
    lookahead: bytes | None,
    extras: dict[str, Raw] | None,
) -> AnyEvent:
    event = _as_store(chunk, hashes, parent, tokens, block_size, keys, lookahead)
    return with_extras(event, extras) if extras else event


def _as_store(
    chunk: Chunk,
    hashes: Sequence[Hash],
    parent: Hash | None,
    tokens: Raw,
    block_size: int,
    keys: bytes | None,
    lookahead: bytes | None,
) -> BlockStored:
    meta = chunk.meta
    return BlockStored(
        tuple(hashes),
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
        raw_or_unset(lookahead),
    )
