"""Build the live state of a stream as batches, for routers that missed more than the journal keeps.

The snapshot gives Kafka's guarantees for a compacted log, with block hashes as keys:

* A reader that starts at the beginning sees at least the final state of every live block.
* Order holds within the snapshot: parents before children, one medium at a time.
* The seq of a batch never changes.
* A reader that keeps up with the head sees every batch as it was sent.

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
"""Blocks per batch if there are enough seqs: half a millisecond of work, about 40 kB."""

MOST_BYTES: Final = 4 * 1024 * 1024
"""Maximum number of bytes of a batch that kvbus builds.

SMG's gateway decodes at most 4 MiB (gRPC's default). The vLLM router 0.1.17 refuses more than 16 MiB.
"""

BYTES_PER_TOKEN: Final = 11
"""Size of the widest token in bytes: an EAGLE pair of two 32-bit ids."""

BYTES_PER_BLOCK: Final = 300
"""Bytes that a block in a separate event needs besides its tokens: its hash, its parent's hash, the field names."""

BYTES_PER_PLAIN_TOKEN: Final = 5
"""Bytes of a token id below 2^32."""

BYTES_PER_EVENT: Final = 50
"""Bytes that a block needs besides its tokens if it shares an event with other blocks."""

SMALL_BLOCK: Final = (MOST_BYTES // MOST_BLOCKS - BYTES_PER_BLOCK) // BYTES_PER_TOKEN
"""The largest block size, in tokens, at which a batch can hold the :data:`MOST_BLOCKS` blocks that routers accept."""

KEPT_BYTES: Final = 4 * 1024 * 1024
"""Bytes of a snapshot's encoded batches that are kept for other readers."""


def most_blocks(block_size: int) -> int:
    """Return the maximum number of blocks of ``block_size`` tokens (0: unknown) in one batch."""
    if block_size <= SMALL_BLOCK:
        return MOST_BLOCKS
    return max(1, min(MOST_BLOCKS, MOST_BYTES // (block_size * BYTES_PER_TOKEN + BYTES_PER_BLOCK)))


ClearsWhere = Literal["each", "first", "none"]
"""Where AllBlocksCleared is sent.

``each``: before each source's blocks. ``first``: for every source, before the first block, for routers that apply it to
all sources. ``none``: nowhere.
"""


Plan = tuple[int, bool, Sequence[Piece]]
"""The content of a batch: the position of its source, whether AllBlocksCleared comes first, and its pieces."""


class Part(msgspec.Struct):
    """One source's part of a snapshot: its index at that moment, and the rank and timestamp of its batches.

    ``block_size`` is the largest block size that routers know for this source, in tokens; 0 if unknown.
    """

    index: Index
    rank: int
    ts: float
    block_size: int = 0


class _Contents:
    """The content of a snapshot.

    Its batches refer to this object and not to the snapshot: a reference cycle would keep a large index frozen after
    its last reader is gone.
    """

    def __init__(self, parts: list[Part], wire: Wire, clears: ClearsWhere, one_copy: bool) -> None:
        self.parts = parts
        self.sizes = [part.index.announced for part in parts]
        self.clears = clears
        self._wire = wire
        self._one_copy = one_copy
        self._stores = [StoreEventBuilder(part.index) for part in parts]

    def plans(self, per_batch: int) -> Iterator[Plan | None]:
        """Yield the plan of every batch; None is a pause."""
        # routers may hold blocks from before: the snapshot replaces them and does not add to them
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
        """Yield a batch. Each ``b""`` before it is a pause."""
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
        """Return how many batches of ``per_batch`` blocks the snapshot needs."""
        clears = len(self.parts[1:]) if self.clears == "first" else 0
        return clears + sum(self._batches_of(at, per_batch) for at in range(len(self.parts)))

    def _batches_of(self, at: int, per_batch: int) -> int:
        """Return how many batches one source needs. It needs at least one if it is cleared before its blocks."""
        needed = -(-self.sizes[at] // per_batch)
        return max(1, needed) if self.clears == "each" or not at else needed


class StateSnapshot:
    """The state of a stream as of batch ``seq``, shared by every answer that can use it.

    Args:
        seq: the newest batch it includes.
        parts: one part for each source.
        wire: the encoding of batches.
        clears: where AllBlocksCleared is sent.
        one_copy: whether a block in several parts is announced only by the first of them.
        max_blocks: maximum number of blocks in a batch; None: as many as routers accept.
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
        """Number of seqs that an answer needs if its batches have as many blocks as routers accept."""

    def stores(self) -> Iterator[list[AnyEvent]]:
        """Yield the stores of every block in slices; an empty list is a pause."""
        for part in self._contents.parts:
            yield from slices(part.index, BLOCKS_PER_BATCH)

    def chunks(self, room: int, batch_bytes: int = MOST_BYTES) -> SnapshotChunks:
        """Return the complete snapshot in at most ``room`` batches, or in one per source if there is less room.

        The caller provides room for at least ``fewest`` batches: then no batch has more blocks than routers accept. If
        there is enough room, batches have about ``batch_bytes`` bytes.
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
    """The batches of a snapshot. A batch is built when the first reader asks for it. The newest ones are kept.

    The plan of every batch is kept as well: finding a plan takes three times as long as building its batch. A reader
    that falls behind, or starts late, has its batches built again from the plans.

    Args:
        plans: the plans of the batches, in order; None is a pause.
        make: builds a batch from its plan. Each ``b""`` before the batch is a pause.
        count: the number of batches.
    """

    def __init__(self, plans: Iterator[Plan | None], make: Callable[[Plan], Iterator[bytes]], count: int) -> None:
        self.count = count
        self._found = plans
        self._make = make
        self._plans: list[Plan] = []
        self._making: Iterator[bytes] | None = None
        """The batch of the newest plan, while it is being built."""
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._first = 0
        """Position of the oldest batch that is kept."""

    def reader(self) -> ChunkReader:
        """Return a new reader that starts at the first batch."""
        return ChunkReader(self)

    def get(self, i: int) -> bytes | None:
        """Return batch ``i``; ``b""`` while it is being built, None after the last batch. Readers ask in order.

        Raises:
            LookupError: the batch is not kept any more.
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
        """Build batch ``i``, which was built before, again. Each ``b""`` before the batch is a pause."""
        return self._make(self._plans[i])


class ChunkReader:
    """A reader of shared batches. It has batches built again that are not kept any more."""

    def __init__(self, chunks: SnapshotChunks) -> None:
        self._chunks = chunks
        self._next = 0
        self._own: Iterator[bytes] | None = None

    def next_payload(self) -> bytes | None:
        """Return the next batch; ``b""`` while it is being built (call again), None after the last batch."""
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
