"""The live state of a stream at one moment, as batches: for routers that missed more than the journal keeps.

Kafka's guarantees for a compacted log, with blocks for keys: whoever reads from the start sees at least the final state
of every live block; the order holds within the snapshot (parents before children, one medium at a time); a seq never
changes its place; and who keeps up with the head sees every batch as it was sent.

A snapshot copies small tables and shares large ones (:meth:`~kvbus.core.blocks.index.Table.freeze`). The relay goes on
changing its state, in a layer on top, while routers read the snapshot slice by slice at their own pace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

import msgspec

from kvbus.core.blocks.announce import MOST_BLOCKS, Piece, StoreEventBuilder, layout, slices
from kvbus.core.blocks.index import Index
from kvbus.core.blocks.live_order import PAUSE
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.profiles import Wire, encode
from kvbus.core.wire.schema import AllBlocksCleared

BLOCKS_PER_BATCH: Final = 512
"""Blocks of one batch where there are seqs enough: half a millisecond of work, some 40 kB."""

MOST_BYTES: Final = 4 * 1024 * 1024
"""Bytes of one batch that kvbus puts together. SMG's gateway decodes at most 4 MiB (gRPC's default), the vLLM router
0.1.17 refuses more than 16 MiB."""

BYTES_PER_TOKEN: Final = 11
"""The widest token of a batch: an EAGLE pair of two 32-bit ids."""

BYTES_PER_BLOCK: Final = 300
"""What a block that is an event of its own adds to its tokens: its hash, its parent's, the names of the fields."""

BYTES_PER_PLAIN_TOKEN: Final = 5
BYTES_PER_EVENT: Final = 50
"""An ordinary token, and what an ordinary block adds to its tokens."""

SMALL_BLOCK: Final = (MOST_BYTES // MOST_BLOCKS - BYTES_PER_BLOCK) // BYTES_PER_TOKEN
"""Tokens of the largest block of which a batch holds as many as routers take."""

KEPT_BYTES: Final = 4 * 1024 * 1024
"""Encoded batches of a snapshot that are kept for other readers."""


def most_blocks(block_size: int) -> int:
    """The blocks of ``block_size`` tokens (0: unknown) that one batch may hold."""
    if block_size <= SMALL_BLOCK:
        return MOST_BLOCKS
    return max(1, min(MOST_BLOCKS, MOST_BYTES // (block_size * BYTES_PER_TOKEN + BYTES_PER_BLOCK)))


ClearsWhere = Literal["each", "first", "none"]
"""AllBlocksCleared before each source's blocks; that of every source before the first block, for routers to which it
speaks of all of them; or nowhere."""


Plan = tuple[int, bool, Sequence[Piece]]
"""What a batch holds: whose blocks, whether AllBlocksCleared comes first, and which."""


class Part(msgspec.Struct):
    """One source's share of a snapshot: its index at that moment, and what its batches are stamped with.

    ``block_size`` is the largest that routers know of this source, in tokens; 0 if that is unknown.
    """

    index: Index
    rank: int
    ts: float
    block_size: int = 0


class _Contents:
    """What a snapshot holds.

    Its batches refer to this and not to the snapshot: a cycle would keep a large index frozen after its last reader.
    """

    def __init__(self, parts: list[Part], wire: Wire, clears: ClearsWhere, one_copy: bool) -> None:
        self.parts = parts
        self.sizes = [part.index.announced for part in parts]
        self.clears = clears
        self._wire = wire
        self._one_copy = one_copy
        self._stores = [StoreEventBuilder(part.index) for part in parts]

    def plans(self, per_batch: int) -> Iterator[Plan | None]:
        """What every batch holds, one by one; None is a pause."""
        # a router may hold blocks from before: this is the whole truth, not an addition to what it has
        if self.clears == "first":
            for at in range(1, len(self.parts)):
                yield at, True, ()
        for at, part in enumerate(self.parts):
            cleared = self.clears == "each" or (self.clears == "first" and not at)
            left = self._batches_of(at, per_batch)
            known = [other.index for other in self.parts[:at]] if self._one_copy else []
            for pieces in layout(part.index, per_batch, known):
                if not pieces:
                    yield None
                    continue
                yield at, cleared, pieces
                cleared = False
                left -= 1
            for _ in range(left):
                yield at, cleared, ()
                cleared = False

    def make(self, plan: Plan) -> Iterator[bytes]:
        """A batch; ``b""`` before it is a pause."""
        at, cleared, pieces = plan
        part, stores = self.parts[at], self._stores[at]
        events: list[AnyEvent] = [AllBlocksCleared()] if cleared else []
        left = PAUSE
        for piece in pieces:
            if left <= 0:
                yield b""
                left = PAUSE
            left -= stores.put(events, piece)
        yield encode(self._wire, events, part.ts, part.rank)

    def batches(self, per_batch: int) -> int:
        """How many batches of ``per_batch`` blocks hold it all."""
        clears = len(self.parts[1:]) if self.clears == "first" else 0
        return clears + sum(self._batches_of(at, per_batch) for at in range(len(self.parts)))

    def _batches_of(self, at: int, per_batch: int) -> int:
        """How many of them are one source's. One that is cleared here has one at least."""
        needed = -(-self.sizes[at] // per_batch)
        return max(1, needed) if self.clears == "each" or not at else needed


class StateSnapshot:
    """The state of a stream as of batch ``seq``, shared by every answer that can use it.

    Args:
        seq: the newest batch it includes.
        parts: each source's share.
        wire: how batches are written.
        clears: where AllBlocksCleared stands.
        one_copy: a block that several parts have is announced by the first of them alone.
        max_blocks: maximum number of blocks in a batch; None: as many as routers take.
    """

    def __init__(
        self,
        seq: int,
        parts: list[Part],
        wire: Wire,
        *,
        clears: ClearsWhere = "each",
        one_copy: bool = False,
        max_blocks: int | None = None,
    ) -> None:
        self.seq = seq
        self.clears = clears
        self._contents = _Contents(parts, wire, clears, one_copy)
        self._chunks_by_size: dict[int, SnapshotChunks] = {}
        self._most = min(max_blocks or MOST_BLOCKS, *(most_blocks(part.block_size) for part in parts), MOST_BLOCKS)
        largest = max((part.block_size for part in parts), default=0)
        self._block_bytes = BYTES_PER_EVENT + BYTES_PER_PLAIN_TOKEN * largest
        self.fewest = self._contents.batches(self._most)
        """The seqs that an answer needs, at as many blocks a batch as routers take."""

    def stores(self) -> Iterator[list[AnyEvent]]:
        """Every block by what stores it, some at a time; an empty list is a pause."""
        for part in self._contents.parts:
            yield from slices(part.index, BLOCKS_PER_BATCH)

    def chunks(self, room: int, batch_bytes: int = MOST_BYTES) -> SnapshotChunks:
        """Return the whole snapshot in at most ``room`` batches, or in one for each source if there is less room.

        The caller makes room for the ``fewest``: then no batch holds more than routers take. Where there is room,
        batches have about ``batch_bytes``.
        """
        contents, most = self._contents, self._most
        per_batch = min(BLOCKS_PER_BATCH, most, max(1, batch_bytes // self._block_bytes))
        while contents.batches(per_batch) > room and per_batch < max(contents.sizes):
            per_batch = most if per_batch < most < 2 * per_batch else 2 * per_batch
        chunks = self._chunks_by_size.get(per_batch)
        if chunks is None:
            plans, count = contents.plans(per_batch), contents.batches(per_batch)
            chunks = self._chunks_by_size[per_batch] = SnapshotChunks(plans, contents.make, count)
        return chunks


class SnapshotChunks:
    """The batches of a snapshot. They are made when the first reader wants them, and others find the newest ones kept.

    What each of them holds is remembered, since to find that takes three times as long as to make it: a reader that
    falls behind, or comes late, has its batches made anew from this.

    Args:
        plans: what each holds, one by one; None is a pause.
        make: makes one; ``b""`` before it is a pause.
        count: how many there are.
    """

    def __init__(self, plans: Iterator[Plan | None], make: Callable[[Plan], Iterator[bytes]], count: int) -> None:
        self.count = count
        self._found = plans
        self._make = make
        self._plans: list[Plan] = []
        self._making: Iterator[bytes] | None = None
        """The batch of the newest plan, until it is made."""
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._first = 0
        """Position of the oldest one that is kept."""

    def reader(self) -> ChunkReader:
        """One reader's way through them."""
        return ChunkReader(self)

    def get(self, i: int) -> bytes | None:
        """Return the ``i``-th batch; ``b""`` while it is being made, None past the last. Readers ask in order.

        Raises:
            LookupError: it is not kept any more.
        """
        kept = self._kept
        while i >= self._first + len(kept):
            if self._making is None:
                try:
                    plan = next(self._found)
                except StopIteration:
                    return None
                if plan is None:
                    return b""
                self._plans.append(plan)
                self._making = self._make(plan)
            payload = next(self._making)
            if not payload:
                return b""
            self._making = None
            kept.append(payload)
            self._kept_bytes += len(payload)
        at = i - self._first
        if at < 0:
            raise LookupError(i)
        payload = kept[at]
        while self._kept_bytes > KEPT_BYTES and len(kept) > 1 and self._first < i:
            self._kept_bytes -= len(kept.popleft())
            self._first += 1
        return payload

    def again(self, i: int) -> Iterator[bytes]:
        """The ``i``-th batch, which was made before, anew; ``b""`` before it is a pause."""
        return self._make(self._plans[i])


class ChunkReader:
    """Reads shared batches for as long as they are kept. A reader that falls behind has its own made."""

    def __init__(self, chunks: SnapshotChunks) -> None:
        self._chunks = chunks
        self._next = 0
        self._own: Iterator[bytes] | None = None

    def next_payload(self) -> bytes | None:
        """Return the next batch; ``b""`` while it is being made (call again), None past the last."""
        payload: bytes | None
        if self._own is None:
            try:
                payload = self._chunks.get(self._next)
            except LookupError:
                self._own = self._chunks.again(self._next)
        if self._own is not None:
            payload = next(self._own)
        if payload:
            self._own = None
            self._next += 1
        return payload
