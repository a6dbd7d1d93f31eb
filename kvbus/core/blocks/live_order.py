"""The order in which live blocks are announced to routers: device first, one medium at a time, parents before children.

The index holds blocks in the order in which the engine stored them. A parent that was stored again comes after its
children in the index. :func:`in_order` finds the right order when it reads the index, so the index need not keep it.

A decoding engine stores block after block for many requests in parallel. So a block rarely follows its parent directly.
:func:`chains` joins blocks of one chain that were stored one by one into one event. For this, a run of blocks waits in
a window until the next block of its chain comes. The runs leave the window in the order of their first blocks, so
parents are sent first.
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
"""Maximum number of blocks in the window of :func:`chains`.

A run of blocks waits there for the next block of its chain. If there are more blocks, the oldest runs leave the window.
"""

PAUSE: Final = 512
"""Number of blocks or runs of blocks after which a generator pauses, so that its caller can do other work."""

FEW: Final = 64
"""Number of blocks in a table that kvbus needs to announce blocks together that the engine stored one by one.

Routers treat the block size of an event with several blocks as certain. While the table has fewer blocks than this
number, kvbus may not know the engine's block size yet, and so announces such blocks one by one, too.
"""

_NO_LOOKAHEAD: Final = (None, b"\xc0")
_ONE_KEY: Final = 0x91
_KEYS: Final = (0xC0, 0x90, _ONE_KEY)
"""First byte of the msgpack ``extra_keys`` of a block that may be joined with others into one event.

It is the byte of null, of an empty array, or of an array with one entry.
"""

Run = tuple[TableKey, Chunk, int, int]
"""Consecutive blocks ``[first, end)`` of one chunk, with the key of their table: ``(key, chunk, first, end)``."""

_Part = tuple[Chunk, int, int]


def in_order(index: Index) -> Iterator[Run]:
    """Yield every run of live blocks of an index, in the order in which blocks are announced to routers."""
    for key in sorted(index.tables, key=_table_order):
        for part in _Walk(index.tables[key]).parts():
            yield key, *part


def _table_order(key: TableKey) -> tuple[bool, str, int, str, str]:
    group, medium, locality, owner = key
    return (medium != DEVICE_MEDIUM, medium, -1 if group is None else group, locality or "", owner or "")


class _Walk:
    """An iteration over the runs of live blocks in one table, parents before children."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._done: set[Hash] = set()
        """The hashes of the blocks in all runs visited so far."""
        self._block_of: dict[Hash, Hash] = {}
        """The engine's block that contains each live sub-block, by the sub-block's derived hash."""
        for chunk in chunks_of(table) if table.sub_blocks or table.refs else ():
            derived, per_block = chunk.reblocked()
            for first, end in live_runs(table, chunk) if derived else ():
                parts = range(first * per_block, end * per_block)
                self._block_of.update((derived[at], chunk.hashes[at // per_block]) for at in parts)

    def parts(self) -> Iterator[_Part]:
        """Yield each run of live blocks of the table once, after the run that holds its parent."""
        for chunk in chunks_of(self._table):
            for first, end in live_runs(self._table, chunk):
                if chunk.hashes[first] not in self._done:
                    yield from self._with_ancestors((chunk, first, end))

    def _with_ancestors(self, part: _Part) -> list[_Part]:
        """Return a run after those of its ancestors that were not visited before, and mark all of them as visited.

        The function also ends if the parents form a cycle.
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
        """Return the run that holds the parent of a chunk's block ``first``.

        Return None if no live run holds it, or if that run was visited before.
        """
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
    """Yield the ranges ``[first, end)`` of a chunk's blocks that are still live in the table.

    A block that was removed, or stored again in another chunk, is left out. Each range is as long as possible.
    """
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
    """Join runs of one block each into chains, in which each block is the parent of the next one.

    Yield lists of runs. The blocks of a list fit into one event. A list has either one run of any length, or the runs
    of a chain. An empty list is a pause, in which the caller may do other work.
    """
    # Join no blocks if some are reblocked: routers know the parent of such a block by another hash than the engine's,
    # so the parents' hashes do not show the chains.
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
    """The runs of blocks of one residency that wait for the next block of their chain.

    They wait in lists, one for each chain. The lists are in the order in which they were begun.
    """

    def __init__(self) -> None:
        self.waits: deque[list[Run]] = deque()
        self._blocks = 0
        self._ends: dict[Hash, list[Run]] = {}
        """The lists in ``waits`` to which the next block of the chain can be added, by the hash of their last block."""

    def add(self, run: Run) -> list[Run]:
        """Add a new list, which has only this run of blocks, to the waiting lists of the window.

        Return the new list.
        """
        chain = [run]
        self.waits.append(chain)
        self._blocks += run[3] - run[2]
        return chain

    def join(self, run: Run) -> None:
        """Append a run of one block to the waiting list that ends with the block's parent.

        If there is no such list, begin a new list with the block.
        """
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
        """Remove the oldest lists of runs and yield them, until at most :data:`WINDOW` blocks wait in the window."""
        while self._blocks > WINDOW:
            oldest = self.waits.popleft()
            self._ends.pop(oldest[-1][1].hashes[-1], None)
            self._blocks -= sum(end - first for _, _, first, end in oldest)
            yield oldest

    def flush(self) -> Iterator[list[Run]]:
        """Yield all lists of runs that wait in the window, and empty the window."""
        yield from self.waits
        self.waits.clear()
        self._ends.clear()
        self._blocks = 0


def _joins(chunk: Chunk) -> bool:
    """Return whether a chunk of one block may share an event with the blocks before and after it in its chain.

    It may if its extra keys are missing, null or at most one entry, if it has no lookahead tokens, and if its block
    size is known. Otherwise its fields cannot be joined with those of another block.
    """
    meta, keys = chunk.meta, chunk.extra_keys
    return (keys is None or keys[0] in _KEYS) and meta.lookahead in _NO_LOOKAHEAD and meta.block_size > 0


def _alike(one: Chunk, other: Chunk) -> bool:
    """Return whether two chunks of one block each may share an event.

    They may if the fields in their ``meta`` (medium, adapter, …) are equal, if their extra keys begin with the same
    byte, and if the tokens of both or of neither are pairs.
    """
    return (
        (one.meta is other.meta or one.meta == other.meta)
        and (one.extra_keys or b"")[:1] == (other.extra_keys or b"")[:1]
        and are_pairs(one.tokens) == are_pairs(other.tokens)
    )


def tokens_of(chain: Sequence[Chunk]) -> Raw:
    """Return the tokens of a chain of blocks as one msgpack array. Each block has its own chunk."""
    return Raw(joined([chunk.tokens for chunk in chain], len(chain) * chain[0].block_size))


def keys_of(chain: Sequence[Chunk]) -> bytes | None:
    """Return the ``extra_keys`` of a chain of blocks as one msgpack array. Each block has its own chunk.

    Either all blocks must have one entry of keys, or all must have none in the same form. If they have none, return
    this form: a msgpack null, an empty msgpack array, or None if the field is absent.
    """
    keys = [chunk.extra_keys for chunk in chain if chunk.extra_keys is not None]
    if not keys or keys[0][0] != _ONE_KEY:
        return keys[0] if keys else None
    return joined(keys, len(keys))
