"""Relay sources whose stream is read from a log (Kafka, NATS, Redis). Each record keeps the seq that it has in the log.

Two kvbus that read the same log publish the same batches under the same seqs, so a router may switch between them.
Therefore kvbus never uses a seq of such a stream for a batch that is not in the log. If a router needs the state, it
gets the log's records from the log's newest state on. A lease record serves as the heartbeat. A source is removed only
after its stream has ended. docs/decisions/log.md explains the design of the log.
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
"""Number of low bits of an outgoing seq that hold the seq of the record. The higher bits hold the log's writer epoch.

The low bits can count 67 million records, which last 15 days at 50 records a second. Then the writer begins another
epoch.
"""

LAST: Final = (1 << EPOCH_BITS) - 1
"""The highest seq in an epoch of a log's writer. No record has it.

If a writer is gone, kvbus clears the blocks of the writer's stream under this seq.
"""


class LogRelay:
    """The relay of log records: it applies each record to the index, and publishes it on every output.

    Args:
        sources: the relay's sources, by slot.
        outputs: the relay's outputs.
        out: the relay's outgoing side, which collects the commands.
        max_events: maximum number of events in a batch.
    """

    def __init__(self, sources: list[Source], outputs: list[Output], out: Outgoing, max_events: int) -> None:
        self._sources = sources
        self._outputs = outputs
        self._out = out
        self._max_events = max_events

    def received(self, event: RecordReceived, now: float) -> None:
        """Apply a record of a log to the source's index, and publish it under the seq that it has in the log."""
        slot = event.source
        source = self._sources[slot]
        source.stats.batches += 1
        source.stats.bytes += len(event.payload)
        content = event.payload
        if event.begins:
            source.ranked = False  # until a batch of the new state names the rank
            if not content:  # the state has no blocks
                content = encode(CANONICAL, [AllBlocksCleared()], source.ts, source.rank)
        batch = codec.decode(content, self._max_events) if content else None
        if isinstance(batch, Reason):
            source.normalizer.missed(batch)
            source.keep_example(event.seq, content, batch)
            batch = None
        if batch is not None:
            source.stats.last_batch = source.ts = batch.ts
            if batch.rank is not None:
                self._see_rank(slot, source, batch.rank)
        # Encode before the index fills in missing fields of the events. Every kvbus must publish the same bytes, and a
        # kvbus that already knows the record's content does not apply it to its index.
        leaving = [
            (output_id, output.streams[slot], self._encoded(output.spec.profile.wire, source, content, batch))
            for output_id, output in enumerate(self._outputs)
            if not output.spec.closed and output.view is None and slot not in output.hidden
        ]
        if batch is not None and not event.known:
            self._apply(slot, source, batch, begins=event.begins)
        for output_id, stream, (payload, empty) in leaving:
            live = stream.take(event.seq, payload, empty, now, begins=event.begins, ends=event.ends, known=event.known)
            count = 0 if live is empty or batch is None else len(batch.events)
            self._out.commands.append(
                Publish(output_id, slot, stream.topic, event.seq, live, count, stream.publisher_id)
            )
        phase = Phase.SYNC if event.more and not event.known else Phase.LIVE
        epoch = event.seq >> EPOCH_BITS
        if source.sequencer.epoch not in (0, epoch):
            source.stats.restarts += 1
        source.sequencer.stand_at(phase, epoch, (event.seq & LAST) + 1)

    def _encoded(self, wire: Wire, source: Source, payload: bytes, batch: Batch | None) -> tuple[bytes, bytes]:
        """Return a record's batch in an output's encoding, and an empty batch for routers that know its content."""
        empty = encode(wire, [], source.ts, source.rank)
        if batch is None or not batch.events:
            return empty, empty
        if wire is CANONICAL:
            return payload, empty
        for event in batch.events if wire.strict else ():
            if isinstance(event, BlockStored):
                # Replace values that routers cannot read. The normalizer does it only for sources not read from a log.
                set_aside(event)
        return encode(wire, batch.events, source.ts, source.rank), empty

    def _apply(self, slot: int, source: Source, batch: Batch, *, begins: bool) -> None:
        """Apply the batch of a log record to the source's index.

        If the record ``begins`` a state, empty the index first.

        The events that the normalizer returns are not published, because kvbus publishes the record's own batch.
        """
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
        """Give a new source the last rank of its slot's stream.

        kvbus encodes the source's batches with this rank until a record of the log names a rank.
        """
        for output in self._outputs:
            self._sources[slot].rank = output.streams[slot].rank
