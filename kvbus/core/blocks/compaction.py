"""The live state at one cut, told as batches: what a replay that reaches behind the journal is answered with.

Kafka's guarantees for a compacted log, with blocks for keys: whoever reads from the start sees at least the final state
of every live block; order is kept within what is told (parents before children, one medium at a time); a seq never
changes its place; and who keeps up with the head sees every batch as it was sent.

A cut copies a small index and holds a large one still (:mod:`kvbus.core.blocks.overlay`): the relay goes on changing
its state, in a layer on top, while a cut is being told, slice by slice, to several routers at their own pace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from kvbus.core.blocks.announce import MOST_BLOCKS, slices
from kvbus.core.blocks.index import Index
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.profiles import Wire, encode
from kvbus.core.wire.schema import AllBlocksCleared

BLOCKS_PER_BATCH: Final = 512
"""Blocks told in one batch: half a millisecond of work, some 40 kB."""


class Part(msgspec.Struct):
    """One source's share of a cut: its index at that moment, and what its batches are stamped with."""

    index: Index
    rank: int
    ts: float


class StateSnapshot:
    """The state of a stream as of batch ``seq``, shared by every answer that can use it."""

    def __init__(self, seq: int, parts: list[Part], wire: Wire) -> None:
        self.seq = seq
        self._parts = parts
        self._sizes = [part.index.announced for part in parts]
        self._wire = wire
        self._chunks_by_size: dict[int, SnapshotChunks] = {}
        self.fewest = batches(self._sizes, MOST_BLOCKS)
        """The numbers an answer needs, at as many blocks a batch as routers take."""

    def chunks(self, room: int) -> SnapshotChunks:
        """The whole cut in at most ``room`` batches, or in one for each source where there is no room for these.

        Whoever asks sees to it that there is room for the ``fewest``: then no batch holds more than ``MOST_BLOCKS``.
        """
        per_batch = BLOCKS_PER_BATCH
        while batches(self._sizes, per_batch) > room and per_batch < max(self._sizes):
            per_batch *= 2
        telling = self._chunks_by_size.get(per_batch)
        if telling is None:
            count = batches(self._sizes, per_batch)
            telling = self._chunks_by_size[per_batch] = SnapshotChunks(self._payloads(per_batch), count)
        return telling

    def _payloads(self, per_batch: int) -> Iterator[bytes]:
        for part in self._parts:
            # whoever asks may hold blocks from before: this is the whole truth, not an addition to theirs
            first: list[AnyEvent] = [AllBlocksCleared()]
            for events in slices(part.index, per_batch):
                yield encode(self._wire, first + events, part.ts, part.rank)
                first = []
            if first:
                yield encode(self._wire, first, part.ts, part.rank)


def batches(sizes: list[int], per_batch: int) -> int:
    """How many batches of ``per_batch`` blocks tell sources of these sizes: each source has one at least."""
    return sum(max(1, -(-size // per_batch)) for size in sizes)


class SnapshotChunks:
    """Batches of a cut, made when they are first wanted and kept for the next one who wants them."""

    def __init__(self, source: Iterator[bytes], count: int) -> None:
        self.count = count
        """How many batches it is."""
        self._source = source
        self._made: list[bytes] = []

    def get(self, i: int) -> bytes | None:
        """The i-th batch, None past the last. To be asked in order."""
        while len(self._made) <= i:
            payload = next(self._source, None)
            if payload is None:
                return None
            self._made.append(payload)
        return self._made[i]
