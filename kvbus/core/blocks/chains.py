"""Chains of single blocks as one event each: a state of blocks that came one by one costs what any other state costs.

An engine that decodes stores block after block, many requests side by side. So a block's parent is rarely the one
announced just before it. Runs wait in a window until the next block of their chain comes, and leave in the order in
which their first ones came: a parent waits before its children, or has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec import Raw

from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import MAX_RUN, Index, TableKey
from kvbus.core.blocks.live_order import Run
from kvbus.core.types import Hash
from kvbus.core.wire.tokens import are_pairs, joined

WINDOW: Final = 4096
"""Blocks that wait for the next one of their chain."""

PAUSE: Final = 512
"""Blocks, or runs read, after which a list in the making pauses."""

FEW: Final = 64
"""Tables of fewer blocks leave as they came. An event of several blocks tells readers that these have a real size, and
of an engine that has sent so few the size may not be known yet."""

_NO_LOOKAHEAD: Final = (None, b"\xc0")
_ONE_KEY: Final = 0x91
_KEYS: Final = (0xC0, 0x90, _ONE_KEY)
"""First bytes of ``extra_keys`` of one block: null, an empty list, a list with an entry."""


def chains(index: Index, runs: Iterable[Run]) -> Iterator[list[Run]]:
    """The runs in lists: one alone, or single blocks that follow one another and are alike. An empty one is a pause."""
    reblocked = any(table.refs or table.sub_blocks for table in index.tables.values())
    waiting: deque[list[Run]] = deque()
    blocks = 0
    read = 0
    """Runs since a pause."""
    ends: dict[Hash, list[Run]] = {}
    """Lists that may grow, by their last block."""
    last: TableKey | None = None
    joins = False
    for run in runs:
        key, chunk, first, end = run
        if key != last:
            yield from waiting
            waiting.clear()
            ends.clear()
            blocks, last = 0, key
            # where blocks have other names on any medium, parents have to be looked up one by one
            joins = not reblocked and len(index.tables[key].blocks) >= FEW
        read += 1
        if read == PAUSE:
            read = 0
            yield []
        if joins and len(chunk.hashes) == 1 and chunk.rest is None and not chunk.hash_only:
            chain = ends.pop(chunk.parent, None) if chunk.parent is not None else None
            if chain is not None and len(chain) < MAX_RUN and _alike(chain[-1][1], chunk):
                chain.append(run)
            else:
                chain = [run]
                waiting.append(chain)
            if len(chain) > 1 or _joins(chunk):
                ends[chunk.hashes[0]] = chain
        elif waiting:
            waiting.append([run])
        else:
            yield [run]
            continue
        blocks += end - first
        while blocks > WINDOW:
            oldest = waiting.popleft()
            ends.pop(oldest[-1][1].hashes[-1], None)
            blocks -= sum(stop - start for _, _, start, stop in oldest)
            yield oldest
    yield from waiting


def _joins(chunk: Chunk) -> bool:
    """Whether a single block may be joined to others."""
    meta, keys = chunk.meta, chunk.extra_keys
    return (keys is None or keys[0] in _KEYS) and meta.lookahead in _NO_LOOKAHEAD and meta.block_size > 0


def _alike(one: Chunk, other: Chunk) -> bool:
    """Whether two single blocks fit into one event."""
    return (
        (one.meta is other.meta or one.meta == other.meta)
        and (one.extra_keys or b"")[:1] == (other.extra_keys or b"")[:1]
        and are_pairs(one.tokens) == are_pairs(other.tokens)
    )


def tokens_of(chain: Sequence[Chunk]) -> Raw:
    """Return the tokens of single blocks that follow one another."""
    return Raw(joined([chunk.tokens for chunk in chain], len(chain) * chain[0].block_size))


def keys_of(chain: Sequence[Chunk]) -> bytes | None:
    """Return the ``extra_keys`` of single blocks that are alike."""
    keys = [chunk.extra_keys for chunk in chain if chunk.extra_keys is not None]
    if not keys or keys[0][0] != _ONE_KEY:
        return keys[0] if keys else None
    return joined(keys, len(keys))
