"""Build the state snapshot of a stream: batches that announce its live blocks to a router that missed too many batches.

A router needs a snapshot if the journal does not reach back to the batches that the router missed. The snapshot gives
Kafka's guarantees for a compacted log, with block hashes as keys:

* A reader that starts at the beginning sees at least the final state of every live block.
* The blocks of a snapshot are in order: parents come before children, and the blocks of one medium stay together.
* The seq of a batch never changes.
* A reader that keeps up with the newest batch sees every batch as it was sent.

A snapshot copies small tables and shares large tables (:meth:`~kvbus.core.blocks.index.Table.freeze`). While routers
read the snapshot slice by slice, each at its own pace, the relay changes its own state in a layer on top of the table.
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
"""Number of blocks in each batch of a snapshot. If the snapshot has too few seqs for that, its batches are larger.

Such a batch has about 40 kB and is built in 0.5 ms.
"""

MOST_BYTES: Final = 4 * 1024 * 1024
"""Maximum size in bytes of a batch that kvbus builds.

SMG's gateway decodes at most 4 MiB (gRPC's default). The vLLM router 0.1.17 refuses more than 16 MiB.
"""

BYTES_PER_TOKEN: Final = 11
"""Maximum encoded size of one token, in bytes. The largest token is an EAGLE pair of two 32-bit ids."""

BYTES_PER_BLOCK: Final = 300
"""Encoded size in bytes of a store event with one block, without its tokens: two hashes and the names of the fields."""

BYTES_PER_PLAIN_TOKEN: Final = 5
"""Maximum encoded size in bytes of a token that is a single id below 2^32."""

BYTES_PER_EVENT: Final = 50
"""Encoded size in bytes of one block of a store event with several blocks, without the block's tokens."""

SMALL_BLOCK: Final = (MOST_BYTES // MOST_BLOCKS - BYTES_PER_BLOCK) // BYTES_PER_TOKEN
"""The largest block size, in tokens, at which a batch of :data:`MOST_BLOCKS` blocks fits into :data:`MOST_BYTES`."""

KEPT_BYTES: Final = 4 * 1024 * 1024
"""Maximum total size in bytes of the encoded batches that a snapshot keeps, so that further readers can use them."""


def most_blocks(block_size: int) -> int:
    """Return the maximum number of blocks of ``block_size`` tokens in a batch that every router accepts.

    A ``block_size`` of 0 means that the block size is unknown.
    """
    if block_size <= SMALL_BLOCK:
        return MOST_BLOCKS
    return max(1, min(MOST_BLOCKS, MOST_BYTES // (block_size * BYTES_PER_TOKEN + BYTES_PER_BLOCK)))


ClearsWhere = Literal["each", "first", "none"]
"""The positions in a snapshot at which it has an AllBlocksCleared.

``each``: before the blocks of each source. ``first``: one for each source, and all of them before the first block, for
routers that apply a clear to all sources. ``none``: nowhere.
"""


Plan = tuple[int, bool, Sequence[Piece]]
"""The content of one batch of a snapshot: the index of its source in the snapshot's list of sources (:class:`Part`),
whether the batch begins with AllBlocksCleared, and the pieces, which are its blocks.
"""


class Part(msgspec.Struct):
    """One source's part of a snapshot: its frozen index, and the rank and timestamp of its batches.

    ``block_size`` is the largest block size that routers know for this source, in tokens. It is 0 if the size is
    unknown.
    """

    index: Index
    rank: int
    ts: float
    block_size: int = 0


class _Contents:
    """The content of a snapshot, and the methods that build its batches.

    The batches refer to this object, not to the snapshot. Otherwise there would be a reference cycle, which would keep
    a large index frozen after its last reader has gone.
    """

    def __init__(self, parts: list[Part], wire: Wire, clears: ClearsWhere, one_copy: bool) -> None:
        self.parts = parts
        self.sizes = [part.index.announced for part in parts]
        self.clears = clears
        self._wire = wire
        self._one_copy = one_copy
        self._stores = [StoreEventBuilder(part.index) for part in parts]

    def plans(self, per_batch: int) -> Iterator[Plan | None]:
        """Yield the plan (the content) of every batch of the snapshot, with ``per_batch`` blocks per batch.

        None is a pause, in which the caller may do other work.
        """
        # Begin with a clear, so that the snapshot replaces all blocks that a router may hold from an earlier time.
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
        """Yield one batch of the snapshot, encoded. ``plan`` is the batch's content, from :meth:`plans`.

        Each ``b""`` before the batch is a pause, in which the caller may do other work.
        """
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
        """Return the number of batches in the snapshot if each batch has up to ``per_batch`` blocks."""
        clears = len(self.parts[1:]) if self.clears == "first" else 0
        return clears + sum(self._batches_of(at, per_batch) for at in range(len(self.parts)))

    def _batches_of(self, at: int, per_batch: int) -> int:
        """Return the number of batches that the snapshot needs for one source, with up to ``per_batch`` blocks each.

        ``at`` is the position of the source's part in the snapshot. A source that is cleared has at least one batch,
        for the clear.
        """
        needed = -(-self.sizes[at] // per_batch)
        return max(1, needed) if self.clears == "each" or not at else needed


class StateSnapshot:
    """The live blocks of a stream as of batch ``seq``, as batches.

    All answers to routers that can use the snapshot share it.

    Args:
        seq: seq of the newest batch that the snapshot includes.
        parts: one part for each source of the stream.
        wire: the encoding of batches.
        clears: the positions at which the snapshot has an AllBlocksCleared.
        one_copy: whether a block in several parts is announced only in the first of these parts.
        max_blocks: maximum number of blocks in a batch. None means as many as routers accept.
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
        """Minimum number of seqs that an answer to a router needs for the batches of this snapshot.

        If it has only this number, each batch has the maximum number of blocks that routers accept.
        """

    def stores(self) -> Iterator[list[AnyEvent]]:
        """Yield the store events that announce all blocks of the snapshot, in lists.

        An empty list is a pause, in which the caller may do other work.
        """
        for part in self._contents.parts:
            yield from slices(part.index, BLOCKS_PER_BATCH)

    def chunks(self, room: int, batch_bytes: int = MOST_BYTES) -> SnapshotChunks:
        """Divide the snapshot into at most ``room`` batches.

        ``room`` must be at least ``fewest``. Otherwise each source gets one batch with all its blocks, which may be
        more than routers accept. If ``room`` is large enough, each batch has about ``batch_bytes`` bytes.
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
    """The batches of a snapshot, shared by its readers. A batch is built when the first reader needs it.

    Only the newest batches are kept, up to :data:`KEPT_BYTES`. The plan of every batch is kept, too, because finding a
    plan takes three times as long as building the batch from it. For a reader that is slow or starts late, the dropped
    batches are built again from their plans.

    Args:
        plans: the plans of the batches, in order. None is a pause, in which the caller may do other work.
        make: builds a batch from its plan. Each ``b""`` that it yields before the batch is such a pause, too.
        count: the number of batches.
    """

    def __init__(self, plans: Iterator[Plan | None], make: Callable[[Plan], Iterator[bytes]], count: int) -> None:
        self.count = count
        self._found = plans
        self._make = make
        self._plans: list[Plan] = []
        self._making: Iterator[bytes] | None = None
        """The iterator that is building the newest batch from its plan; None if this batch is complete."""
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._first = 0
        """Number of dropped batches. It is the position, in the snapshot, of the oldest batch that is kept."""

    def reader(self) -> ChunkReader:
        """Return a new reader of the batches. It starts at the first batch."""
        return ChunkReader(self)

    def get(self, i: int) -> bytes | None:
        """Return batch ``i``. Return ``b""`` if the batch is not complete yet, and None after the last batch.

        A reader must ask for the batches in order.

        Raises:
            LookupError: the batch was built, but is not kept any more.
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
        """Build batch ``i`` again, for a reader that needs it after it was dropped.

        Only the newest batches are kept. Each ``b""`` before the batch is a pause, in which the caller may do other
        work.
        """
        return self._make(self._plans[i])


class ChunkReader:
    """A reader of the shared batches of a snapshot.

    A batch that is not kept any more is built again for this reader.
    """

    def __init__(self, chunks: SnapshotChunks) -> None:
        self._chunks = chunks
        self._next = 0
        self._own: Iterator[bytes] | None = None

    def next_payload(self) -> bytes | None:
        """Return the next batch.

        Return ``b""`` if it is not complete yet (call again), and None after the last batch.
        """
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
