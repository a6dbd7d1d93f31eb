"""The order in which live blocks are announced: device first, one medium at a time, parents before children.

:func:`in_order` walks over the index to find this order, so no state has to be kept for it. The index holds blocks in
the order in which they were stored. There, a parent that was stored again comes after its children.

A decoding engine stores block after block for many requests in parallel, so a block's parent is rarely the block
announced just before it. :func:`chains` joins single blocks of one chain into one event. A run waits in a window until
the next block of its chain comes. Runs are sent in the order of their first blocks, so parents are sent first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec import Raw

from kvbus.core.blocks.chunk import Chunk
from kvbus.core.blocks.index import MAX_RUN, Index, Table, TableKey, chunks_of
from kvbus.core.types import DEVICE_MEDIUM, Hash
from kvbus.core.wire.tokens import are_pairs, joined

WINDOW: Final = 4096
"""Maximum number of blocks that wait for the next block of their chain."""

PAUSE: Final = 512
"""Number of blocks, or of runs read, after which a reader pauses."""

FEW: Final = 64
"""Single blocks are not joined if their table has fewer blocks than this.

Readers take the block size of an event with several blocks as proven. After so few blocks, kvbus may not yet know the
engine's block size.
"""

_NO_LOOKAHEAD: Final = (None, b"\xc0")
_ONE_KEY: Final = 0x91
_KEYS: Final = (0xC0, 0x90, _ONE_KEY)
"""First bytes of ``extra_keys`` of one block: null, an empty list, a list with an entry."""

Run = tuple[TableKey, Chunk, int, int]
"""A table's key, and blocks ``[first, end)`` of one of its chunks."""

_Part = tuple[Chunk, int, int]


def in_order(index: Index) -> Iterator[Run]:
    """Yield every live run of blocks."""
    for key in sorted(index.tables, key=_table_order):
        for part in _Walk(index.tables[key]).parts():
            yield key, *part


def _table_order(key: TableKey) -> tuple[bool, str, int]:
    return (key[1] != DEVICE_MEDIUM, key[1], -1 if key[0] is None else key[0])


class _Walk:
    """A walk over the runs of one table."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._done: set[Hash] = set()
        """The blocks of all runs visited so far."""
        self._block_of: dict[Hash, Hash] = {}
        """The live block that contains each sub-block, by derived hash."""
        for chunk in chunks_of(table) if table.sub_blocks or table.refs else ():
            derived, per_block = chunk.reblocked()
            for first, end in live_runs(table, chunk) if derived else ():
                parts = range(first * per_block, end * per_block)
                self._block_of.update((derived[at], chunk.hashes[at // per_block]) for at in parts)

    def parts(self) -> Iterator[_Part]:
        """Yield every run once, after the run with its parent."""
        for chunk in chunks_of(self._table):
            for first, end in live_runs(self._table, chunk):
                if chunk.hashes[first] not in self._done:
                    yield from self._with_ancestors((chunk, first, end))

    def _with_ancestors(self, part: _Part) -> list[_Part]:
        """Mark a run and its unvisited ancestors as visited; return them, ancestors first.

        The walk ends even if the parents form a cycle.
        """
        path: list[_Part] = []
        step: _Part | None = part
        while step is not None:
            chunk, first, end = step
            self._done.update(chunk.hashes[first:end])
            path.append(step)
            step = self._parent_of(chunk, first)
        return path[::-1]

    def _parent_of(self, chunk: Chunk, first: int) -> _Part | None:
        """Return the run with the parent of block ``first``; None if there is no such run or it was visited."""
        parent: Hash | None
        if chunk.derived is not None and first == 0 and chunk.out_parent is not None:
            parent = self._block_of.get(chunk.out_parent)
        else:
            parent = chunk.parent_of(first)
        holder = None if parent is None or parent in self._done else self._table.blocks.get(parent)
        if parent is None or holder is None:
            return None
        at = holder.hashes.index(parent)
        return next((holder, a, b) for a, b in live_runs(self._table, holder) if a <= at < b)


def live_runs(table: Table, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Yield the maximal ranges of a chunk's blocks that are still live through this chunk."""
    first = None
    for i, block in enumerate(chunk.hashes):
        alive = table.blocks.get(block) is chunk
        if alive and first is None:
            first = i
        elif not alive and first is not None:
            yield first, i
            first = None
    if first is not None:
        yield first, len(chunk.hashes)


# -- chains of single blocks -----------------------------------------------------------------------------------------


def chains(index: Index, runs: Iterable[Run]) -> Iterator[list[Run]]:
    """Yield lists of runs: a single run, or single blocks of one chain that fit into one event.

    An empty list is a pause.
    """
    # routers know the parents of reblocked blocks by other hashes, so chains cannot be followed
    reblocked = any(table.refs or table.sub_blocks for table in index.tables.values())
    window = _Window()
    last: TableKey | None = None
    joins = False
    for read, run in enumerate(runs, 1):
        key, chunk, _, _ = run
        if key != last:
            yield from window.flush()
            last, joins = key, not reblocked and len(index.tables[key].blocks) >= FEW
        if read % PAUSE == 0:
            yield []
        if joins and len(chunk.hashes) == 1 and chunk.rest is None and not chunk.hash_only:
            window.join(run)
        elif window.waits:
            window.add(run)
        else:
            yield [run]
        yield from window.overdue()
    yield from window.flush()


class _Window:
    """Runs of one table that wait for the next block of their chain, in the order of their first blocks."""

    def __init__(self) -> None:
        self.waits: deque[list[Run]] = deque()
        self._blocks = 0
        self._ends: dict[Hash, list[Run]] = {}
        """Chains that the next block can extend, by their last block."""

    def add(self, run: Run) -> list[Run]:
        """Add a run to the window, in a new list; return the list."""
        chain = [run]
        self.waits.append(chain)
        self._blocks += run[3] - run[2]
        return chain

    def join(self, run: Run) -> None:
        """Add a single block to the list that ends with its parent, or to a new list."""
        chunk = run[1]
        chain = self._ends.pop(chunk.parent, None) if chunk.parent is not None else None
        if chain is not None and len(chain) < MAX_RUN and _alike(chain[-1][1], chunk):
            chain.append(run)
            self._blocks += 1
        else:
            chain = self.add(run)
        if len(chain) > 1 or _joins(chunk):
            self._ends[chunk.hashes[0]] = chain

    def overdue(self) -> Iterator[list[Run]]:
        """Yield the oldest lists until at most :data:`WINDOW` blocks wait."""
        while self._blocks > WINDOW:
            oldest = self.waits.popleft()
            self._ends.pop(oldest[-1][1].hashes[-1], None)
            self._blocks -= sum(end - first for _, _, first, end in oldest)
            yield oldest

    def flush(self) -> Iterator[list[Run]]:
        """Yield all lists."""
        yield from self.waits
        self.waits.clear()
        self._ends.clear()
        self._blocks = 0


def _joins(chunk: Chunk) -> bool:
    """Return whether a single block may be joined to others."""
    meta, keys = chunk.meta, chunk.extra_keys
    return (keys is None or keys[0] in _KEYS) and meta.lookahead in _NO_LOOKAHEAD and meta.block_size > 0


def _alike(one: Chunk, other: Chunk) -> bool:
    """Return whether two single blocks fit into one event."""
    return (
        (one.meta is other.meta or one.meta == other.meta)
        and (one.extra_keys or b"")[:1] == (other.extra_keys or b"")[:1]
        and are_pairs(one.tokens) == are_pairs(other.tokens)
    )


def tokens_of(chain: Sequence[Chunk]) -> Raw:
    """Return the tokens of single blocks that follow each other."""
    return Raw(joined([chunk.tokens for chunk in chain], len(chain) * chain[0].block_size))


def keys_of(chain: Sequence[Chunk]) -> bytes | None:
    """Return the ``extra_keys`` of single blocks whose ``extra_keys`` have the same form."""
    keys = [chunk.extra_keys for chunk in chain if chunk.extra_keys is not None]
    if not keys or keys[0][0] != _ONE_KEY:
        return keys[0] if keys else None
    return joined(keys, len(keys))
