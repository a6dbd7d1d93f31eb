"""Apply records of the write-ahead log to indexes, numberings and journals.

A record has the same effect whether the relay has just made the decision or a previous process made it. This module
does not need the reasons of a decision, which the sequencer has made. After a restart,
:meth:`~kvbus.core.relay.Relay.apply_record` also restores the epoch and the next seq of each sequencer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbus.core import write_ahead_log as wal
from kvbus.core.outgoing import Outgoing
from kvbus.core.source import Source
from kvbus.core.types import Reason
from kvbus.core.wire.codec import MAX_UNKNOWN, AnyEvent, decode


class Applier:
    """The handlers of write-ahead-log records: one method for each type of record.

    Args:
        sources: the relay's sources, by slot.
        out: the relay's outgoing side, which publishes the resulting batches.
        max_events: maximum number of events in a batch of an engine.
    """

    def __init__(self, sources: list[Source], out: Outgoing, max_events: int) -> None:
        self._sources = sources
        self._out = out
        self._max_events = max_events
        self._by_type: dict[type, Callable[[Any, float], None]] = {
            wal.Delivered: self.deliver,
            wal.Continued: self._continued,
            wal.EpochBegun: self._epoch_begun,
            wal.BatchesLost: self._batches_lost,
            wal.Expired: self._expired,
            wal.Reannounced: self._reannounced,
            wal.Heartbeat: out.heartbeat,
            wal.Begun: out.begin,
            wal.SnapshotTaken: self._snapshot_taken,
            wal.SeqsIncomplete: out.incomplete,
            wal.PartialSince: self._partial_since,
            wal.PublisherKnown: self._publisher_known,
            wal.CacheEmptied: self._cache_emptied,
            wal.BlocksOutlived: self._blocks_outlived,
        }

    def apply(self, record: wal.Record, now: float) -> None:
        """Apply one record of the write-ahead log: call the handler for its type."""
        self._by_type[type(record)](record, now)

    def deliver(self, record: wal.Delivered, now: float) -> None:
        """Decode and normalize one batch of a source, update the index, and publish the resulting events.

        If the batch stores or removes very many blocks, do this for its first part. A record :class:`Continued` or
        :meth:`finish` does it for the next part.
        """
        slot, payload = record.source, record.payload
        source = self._sources[slot]
        source.topic = record.topic
        batch = decode(payload, self._max_events)
        if isinstance(batch, Reason):
            source.normalizer.missed(batch)
            source.keep_example(record.seq, payload, batch)
            return
        source.stats.last_batch = source.ts = batch.ts
        rank = batch.rank
        if rank is not None and (rank != source.rank or not source.ranked):
            if source.ranked or rank == source.rank:
                source.see_rank(rank)
            else:
                self._out.change_rank(slot, source, rank, now)
        source.applying = record.seq, payload, batch
        self._applied(slot, source, source.normalizer.apply(batch, first_of_epoch=record.seq == 0), now)

    def _continued(self, record: wal.Continued, now: float) -> None:
        source = self._sources[record.source]
        self._applied(record.source, source, source.normalizer.go_on(), now)

    def finish(self, slot: int, now: float) -> None:
        """Apply all remaining parts of a source's last batch."""
        while self._sources[slot].normalizer.parts:
            self._continued(wal.Continued(slot), now)

    def _applied(self, slot: int, source: Source, events: list[AnyEvent], now: float) -> None:
        """Publish the events that result from a part of a batch. After the last part, finish the batch."""
        normalizer, stats = source.normalizer, source.stats
        if source.applying is not None and not normalizer.parts:
            (seq, payload, batch), source.applying = source.applying, None
            if source.lifetimes is not None:
                source.lifetimes.see(batch.events, now)
            if len(stats.rejected) + len(stats.filtered) != source.reasons:
                source.keep_example(seq, payload, batch)
            source.dialect.see(payload)
            if batch.unknown:
                room = MAX_UNKNOWN - len(source.unknown)
                source.unknown.update(sorted(batch.unknown - source.unknown)[:room])
            if normalizer.emptied and source.sequencer.partial:
                source.lost = 0
                source.sequencer.complete(certain=normalizer.clears.take_for_empty())
        if source.expired:
            self._out.keep(slot, source, events)
            return
        if not events:
            return
        if not source.announced:
            source.begin_announcing()
        self._out.publish_all(slot, source, events, now)

    def clear(self, slot: int, source: Source, now: float) -> None:
        """Send AllBlocksCleared for a source to all routers, if any of its blocks were announced."""
        if source.announced:
            source.announced = False
            self._out.clear(slot, source, now)

    def _epoch_begun(self, record: wal.EpochBegun, now: float) -> None:
        self._sources[record.source].publisher_id = record.publisher_id
        self._forget(record.source, now)

    def _batches_lost(self, record: wal.BatchesLost, now: float) -> None:
        source = self._sources[record.source]
        source.lost += record.count
        if source.spec.on_lost == "clear":
            self._forget(record.source, now, same_epoch=True)

    def _expired(self, record: wal.Expired, now: float) -> None:
        source = self._sources[record.source]
        source.expired = True
        source.stats.timeouts += 1
        source.sequencer.expire()
        self.clear(record.source, source, now)

    def _reannounced(self, record: wal.Reannounced, now: float) -> None:
        source = self._sources[record.source]
        source.expired = False
        self._out.announce(record.source, source, now)
        if len(source.normalizer.index) > 0:
            source.begin_announcing()

    def _snapshot_taken(self, record: wal.SnapshotTaken, now: float) -> None:
        source = self._sources[record.source]
        self._forget(record.source, now)
        for chunk in record.chunks:  # a chunk of a snapshot is one batch
            # seq -1 means: not the first batch of an epoch
            self.deliver(wal.Delivered(record.source, -1, source.topic, 0, chunk), now)
            self.finish(record.source, now)

    def _partial_since(self, record: wal.PartialSince, now: float) -> None:
        del now
        self._sources[record.source].partial_since = record.wall

    def _publisher_known(self, record: wal.PublisherKnown, now: float) -> None:
        del now
        self._sources[record.source].publisher_id = record.publisher_id

    def _cache_emptied(self, record: wal.CacheEmptied, now: float) -> None:
        self._forget(record.source, now, same_epoch=True)

    def _blocks_outlived(self, record: wal.BlocksOutlived, now: float) -> None:
        source = self._sources[record.source]
        events = source.normalizer.outlived(record.blocks)
        if source.expired:
            self._out.keep(record.source, source, events)
        else:
            self._out.publish_all(record.source, source, events, now)

    def _forget(self, slot: int, now: float, *, same_epoch: bool = False) -> None:
        """Clear a source's blocks at the routers and empty its index.

        Call this when the known blocks may differ from the blocks in the engine's cache. ``same_epoch`` says that the
        publisher has not restarted.
        """
        source = self._sources[slot]
        self.clear(slot, source, now)
        source.normalizer.reset(same_epoch=same_epoch)
        source.applying = None
        self._out.forget(slot)
        if source.lifetimes is not None:
            source.lifetimes.forget()
        source.ranked = source.ranked and same_epoch
        if not same_epoch:
            source.lost, source.partial_since = 0, None
