"""How large an index is, in blocks and in bytes, counted as blocks come and go.

The blocks of a chunk share its tokens, so its bytes are held until the last of them has gone. Nearly always they leave
from the end of a chunk to its first one: nothing has to be remembered of a chunk before its first block goes. Of one
whose first block went before the others, the number of those left is kept.

Bytes are what the fields hold, with a fixed part for each chunk and each block: about what a process grows by.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final

from kvbus.core.types import Hash

if TYPE_CHECKING:
    from kvbus.core.blocks.chunk import Chunk
    from kvbus.core.blocks.index import Table

ITEM_BYTES: Final = 140
"""What each chunk and each of its blocks takes beside what its fields hold: objects, a hash, its place in a table."""

MANY: Final = 256
"""Chunks whose first blocks have gone are looked at together: one by one it would show."""

_chunks: Final = itemgetter(1)
_hashes: Final = attrgetter("hashes")
_tokens: Final = attrgetter("tokens")
_keys: Final = attrgetter("extra_keys")
_rest: Final = attrgetter("rest")


def chunk_bytes(chunk: Chunk) -> int:
    """About what a chunk holds."""
    count: int = ITEM_BYTES * (1 + len(chunk.hashes)) + len(chunk.tokens)
    if chunk.extra_keys is not None:
        count += len(chunk.extra_keys)
    if chunk.rest is not None:
        count += chunk.meta.weight
        count += ITEM_BYTES * len(chunk.derived or ())
        count += sum(len(name) + len(value) for name, value in (chunk.extras or {}).items())
    return count


def _bytes_of(chunks: list[Chunk]) -> int:
    """The same of many."""
    if any(map(_rest, chunks)):
        return sum(map(chunk_bytes, chunks))
    return (
        ITEM_BYTES * (len(chunks) + sum(map(len, map(_hashes, chunks))))
        + sum(map(len, map(_tokens, chunks)))
        + sum(map(len, filter(None, map(_keys, chunks))))
    )


class Size:
    """The blocks and bytes of one index."""

    __slots__ = ("at_most", "blocks", "firsts_gone", "left")

    def __init__(self) -> None:
        self.blocks = 0
        self.at_most = 0
        """The bytes, with those of chunks that are still to be looked at."""
        self.firsts_gone: list[tuple[Table, Chunk]] = []
        """Chunks to be looked at, with their tables: the first block has gone, and perhaps all others before it."""
        self.left: dict[int, int] = {}
        """Of each chunk (by identity) whose first block is not live and another one is: how many are."""

    @property
    def bytes(self) -> int:
        """About what all chunks with a live block hold."""
        if self.firsts_gone:
            self.settle()
        return self.at_most

    def count(self, table: Table, chunk: Chunk) -> None:
        """Count a chunk of which some blocks are live already."""
        self.add(chunk, _live(table, chunk), chunk_bytes(chunk), first=table.blocks.get(chunk.hashes[0]) is chunk)

    def add(self, chunk: Chunk, blocks: int, held: int, *, first: bool) -> None:
        """So many blocks of a new chunk are live now, which holds so many bytes: the ``first`` block is, or is not."""
        self.blocks += blocks
        self.at_most += held
        if not first:
            self.left[id(chunk)] = blocks

    def remove(self, table: Table, block: Hash, chunk: Chunk) -> None:
        """A block has just left its table."""
        self.blocks -= 1
        if not self.one_less(chunk) and block == chunk.hashes[0]:
            self._without_first(table, chunk)

    def drop(self, table: Table, chunk: Chunk) -> None:
        """All that is live of a chunk is given up."""
        self.blocks -= _live(table, chunk)
        self._give_up(chunk)

    def run_gone(self, table: Table, chunk: Chunk, start: int, end: int) -> None:
        """The blocks from one place of a chunk to another one before or behind it have just left, in this order.

        What has gone as a whole is not looked for in the table: in a large one that is a cache miss for each block.
        """
        if start and end:
            return
        if start + end + 1 == len(chunk.hashes):
            self.at_most -= chunk_bytes(chunk)
        else:
            self.firsts_gone.append((table, chunk))
            if len(self.firsts_gone) > MANY:
                self.settle()

    def settle(self) -> None:
        """Look at the chunks whose first blocks have gone, if there are any."""
        pending = self.firsts_gone
        if not pending:
            return
        self.firsts_gone = []
        chunks = list(map(_chunks, pending))
        blocks = pending[0][0].blocks.keys()
        one_table = len(set(map(id, map(itemgetter(0), pending)))) == 1
        if one_table and blocks.isdisjoint(chain.from_iterable(map(_hashes, chunks))):
            self.at_most -= _bytes_of(chunks)
            return
        for table, chunk in pending:
            self._without_first(table, chunk)

    def one_less(self, chunk: Chunk) -> bool:
        """Whether the chunk is one that is watched."""
        left = self.left.get(id(chunk)) if self.left else None
        if left is None:
            return False
        if left == 1:
            self._give_up(chunk)
        else:
            self.left[id(chunk)] = left - 1
        return True

    def _without_first(self, table: Table, chunk: Chunk) -> None:
        """The first block has gone: usually it was the last one that was left."""
        left = 0 if table.blocks.keys().isdisjoint(chunk.hashes) else _live(table, chunk)
        if left:
            self.left[id(chunk)] = left
        else:
            self._give_up(chunk)

    def _give_up(self, chunk: Chunk) -> None:
        self.at_most -= chunk_bytes(chunk)
        self.left.pop(id(chunk), None)


def _live(table: Table, chunk: Chunk) -> int:
    return sum(table.blocks.get(block) is chunk for block in chunk.hashes)
