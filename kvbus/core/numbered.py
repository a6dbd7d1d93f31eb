"""Sources that are read from a log: routers get each record under the log's number.

So two kvbus that read the same log publish the same under the same number, and a router may switch between them.
Nothing else uses numbers of such a stream: the state for a router is the log from its newest state on, a lease is the
heartbeat, and a source whose stream has not ended is not removed. docs/decisions/log.md explains why that is exact.
"""

from __future__ import annotations

from typing import Final

from kvbus.core.commands import Publish
from kvbus.core.events import RecordReceived
from kvbus.core.outgoing import Outgoing
from kvbus.core.outputs.output import Output
from kvbus.core.sequencing.phases import Phase
from kvbus.core.source import Source
from kvbus.core.types import Reason
from kvbus.core.wire import codec
from kvbus.core.wire.carried import set_aside
from kvbus.core.wire.profiles import CANONICAL, Wire, encode
from kvbus.core.wire.schema import AllBlocksCleared, Batch, BlockStored

EPOCH_BITS: Final = 26
"""Number of low bits of a seq on the wire that hold the record's seq. The higher bits hold the epoch's turn.

67 million records are 15 days at 50 records a second. Then the writer begins another epoch.
"""

LAST: Final = (1 << EPOCH_BITS) - 1
"""The seq that ends an abandoned epoch. No record has it."""


class Numbered:
    """The relay of log records: applies and publishes them.

    Args:
        sources: the relay's sources, by slot.
        outputs: the relay's outputs.
        out: the relay's outgoing side.
        max_events: maximum number of events in a batch.
    """

    def __init__(self, sources: list[Source], outputs: list[Output], out: Outgoing, max_events: int) -> None:
        self._sources = sources
        self._outputs = outputs
        self._out = out
        self._max_events = max_events

    def received(self, event: RecordReceived, now: float) -> None:
        """Apply the record to the index, and publish it under its number."""
        slot = event.source
        source = self._sources[slot]
        source.stats.batches += 1
        source.stats.bytes += len(event.payload)
        whole = event.payload
        if event.begins:
            source.ranked = False  # a state names the rank again, for readers that begin with it
            if not whole:  # the state has no blocks
                whole = encode(CANONICAL, [AllBlocksCleared()], source.ts, source.rank)
        batch = codec.decode(whole, self._max_events) if whole else None
        if isinstance(batch, Reason):
            source.normalizer.missed(batch)
            source.keep_example(event.seq, whole, batch)
            batch = None
        if batch is not None:
            source.stats.last_batch = source.ts = batch.ts
            if batch.rank is not None:
                self._see_rank(slot, source, batch.rank)
        # encode before the index fills in missing fields, so that the result does not depend on whether the record is
        # applied
        leaving = [
            (number, output.streams[slot], self._encoded(output.spec.profile.wire, source, whole, batch))
            for number, output in enumerate(self._outputs)
            if not output.spec.closed and output.view is None and slot not in output.hidden
        ]
        if batch is not None and not event.known:
            self._apply(slot, source, batch, begins=event.begins)
        for number, stream, (payload, empty) in leaving:
            live = stream.take(event.seq, payload, empty, now, begins=event.begins, ends=event.ends, known=event.known)
            count = 0 if live is empty or batch is None else len(batch.events)
            self._out.commands.append(Publish(number, slot, stream.topic, event.seq, live, count, stream.publisher_id))
        phase = Phase.SYNC if event.more and not event.known else Phase.LIVE
        epoch = event.seq >> EPOCH_BITS
        if source.sequencer.epoch not in (0, epoch):
            source.stats.restarts += 1
        source.sequencer.stand_at(phase, epoch, (event.seq & LAST) + 1)

    def _encoded(self, wire: Wire, source: Source, whole: bytes, batch: Batch | None) -> tuple[bytes, bytes]:
        """Return the record as routers read it, and an empty batch for routers that already know its content."""
        empty = encode(wire, [], source.ts, source.rank)
        if batch is None or not batch.events:
            return empty, empty
        if wire is CANONICAL:
            return whole, empty
        for event in batch.events if wire.strict else ():
            if isinstance(event, BlockStored):
                set_aside(event)  # no normalizer has done it
        return encode(wire, batch.events, source.ts, source.rank), empty

    def _apply(self, slot: int, source: Source, batch: Batch, *, begins: bool) -> None:
        """Apply a batch to the index. The record itself is published, so it is the same on every kvbus."""
        if begins:
            source.normalizer.reset()
            self._out.forget(slot)
        source.normalizer.apply(batch, first_of_epoch=False)

    def _see_rank(self, slot: int, source: Source, rank: int) -> None:
        if not source.ranked:
            for output in self._outputs:
                output.streams[slot].rank = rank
        source.see_rank(rank)

    def placed(self, slot: int) -> None:
        """Set the rank of a new source to the last rank on its stream, until the source names its own."""
        for output in self._outputs:
            self._sources[slot].rank = output.streams[slot].rank
