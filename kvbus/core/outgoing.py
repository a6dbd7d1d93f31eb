"""The relay's outgoing side: it encodes and numbers batches, and keeps them in the streams' journals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvbus.core import write_ahead_log as wal
from kvbus.core.blocks.announce import announce, removals_of
from kvbus.core.blocks.index import Index
from kvbus.core.commands import Command, Publish
from kvbus.core.outputs.fitting import Cleared, fit, halves, in_batches
from kvbus.core.outputs.output import Output
from kvbus.core.outputs.spec import NewStream, OutputSpec
from kvbus.core.source import Source
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.profiles import Wire, encode
from kvbus.core.wire.schema import AllBlocksCleared


class Outgoing:
    """The streams of all outputs, and the methods that publish batches on them.

    Args:
        sources: the relay's sources, by slot.
        outputs: the relay's outputs.
        do: function that keeps a record for the write-ahead log (:mod:`kvbus.core.write_ahead_log`) and applies it.
    """

    def __init__(self, sources: list[Source], outputs: list[Output], do: Callable[[wal.Record, float], None]) -> None:
        self._sources = sources
        self._outputs = outputs
        self.needs_tokens = False
        """Whether some output's routers need the tokens of every block, because they compute hashes from tokens."""
        self._plain: list[tuple[int, Output]] = []
        self.fitted: list[tuple[int, Output]] = []
        """The outputs whose routers cannot read every batch unchanged, each with its number.

        :mod:`kvbus.core.outputs.fitting` adapts batches for them.
        """
        self.sort_outputs()
        self.names_cleared = any(output.spec.profile.clears != "rank" for output in outputs)
        """Whether the routers of some output drop more at an AllBlocksCleared than the blocks of its rank.

        kvbus may then send them removals of single blocks instead.
        """
        self._do = do
        self.wall = 0.0
        """The time of day in seconds. It becomes the ``ts`` of batches that no engine sent.

        No decision of the relay depends on it.
        """
        self.now = 0.0
        """The time of the relay's newest input (a batch, a timer, …), in seconds on the relay's monotonic clock."""
        self.commands: list[Command] = []
        """The commands that the daemon has to carry out, in order."""

    # -- streams -----------------------------------------------------------------------------------------------------

    def sort_outputs(self) -> None:
        """Divide the outputs by whether their routers read every batch unchanged or need adapted batches."""
        open_outputs = [(output_id, each) for output_id, each in enumerate(self._outputs) if not each.spec.closed]
        self.needs_tokens = any(each.spec.profile.hashes_tokens for _, each in open_outputs)
        for source in self._sources:
            source.needs_tokens = self.needs_tokens
        self._plain = [(output_id, each) for output_id, each in open_outputs if each.as_it_comes]
        self.fitted = [(output_id, each) for output_id, each in open_outputs if not each.as_it_comes]

    def set_output(self, output_id: int, spec: OutputSpec, now: float) -> None:
        """Replace the output with this number by a new one, or add an output.

        The routers of the output get the current blocks of all sources as a state.
        """
        output = Output(spec, [source.rank for source in self._sources])
        self._outputs[output_id:] = [output, *self._outputs[output_id + 1 :]]
        self.sort_outputs()
        for source_slot, source in enumerate(self._sources):
            if not output.merged:
                while len(output.streams) <= source_slot:
                    output.add_stream(None, 0, 0, b"")
                output.streams[source_slot].closed = source.gone or source_slot in output.hidden
            if output.view is not None and source_slot not in output.hidden:
                events = list(announce(source.normalizer.index.filed(spec.profile.residencies)))
                output.view.take(source_slot, events, source.normalizer.index)
        if spec.closed:
            for stream in output.streams:
                stream.closed = True
        self._clear_known(output_id, output, spec.known_slots, now)

    def begin(self, record: wal.Begun, now: float) -> None:
        """Send AllBlocksCleared on each stream that continues the numbering of a previous process.

        Its routers may still hold blocks that the previous process announced.
        """
        self.wall = record.wall
        for output_id, output in enumerate(self._outputs):
            self._clear_known(output_id, output, record.slots[output_id], now)

    def _clear_known(self, output_id: int, output: Output, slots: int, now: float) -> None:
        for stream_slot, stream in output.open_streams.items():
            if not stream.first_seq or stream.numbered:
                continue
            ranks = [
                output.rank_of(source_slot, source)
                for source_slot, source in self.sources_of(output, stream_slot)
                if not source.gone
            ]
            ranks += [
                0 if output.spec.profile.one_rank else source_slot
                for source_slot in range(slots)
                if source_slot >= len(self._sources) or self._sources[source_slot].gone
            ]
            for rank in dict.fromkeys(ranks):
                self._publish_clear(output_id, stream_slot, rank, now)

    def welcome(self, source_slot: int, rank: int, streams: Sequence[NewStream], now: float) -> None:
        """Create or update the stream of ``source_slot`` on each output, because a new source gets the slot.

        Send AllBlocksCleared to routers that may still hold blocks of the slot's previous source.
        """
        for output_id, (output, new) in enumerate(zip(self._outputs, streams, strict=True)):
            if new.hidden:
                output.hidden.add(source_slot)
            else:
                output.hidden.discard(source_slot)
            if output.spec.merged:
                continue
            while len(output.streams) < source_slot:
                output.add_stream(None, 0, 0, b"").closed = True
            if len(output.streams) == source_slot:
                output.add_stream(new.topic, rank, new.first_seq, new.publisher_id)
            stream = output.streams[source_slot]
            stream.closed = new.hidden
            another = output.spec.by_topic and stream.topic != new.topic
            if another:
                stream.resume_at(new.first_seq)  # a new topic begins a new numbering
            if another or not stream.numbered:
                stream.rank = rank
            stream.keeps_topic = new.topic is None
            if not stream.publisher_id:
                stream.publisher_id = new.publisher_id
            stream.topic = new.topic or b""
            if not stream.next_seq:  # this process has sent no batch on the stream yet
                stream.next_seq = stream.first_seq = new.first_seq
            if stream.numbered:
                continue
            if stream.next_seq and not new.hidden and not self.clears_others(output, source_slot):
                self._publish_clear(output_id, source_slot, rank, now)

    def close(self, source_slot: int, *, closed: bool) -> None:
        """Delete the view indexes and the snapshots of the source that had ``source_slot`` before.

        If each source has its own stream, also record whether this slot's stream is closed: ``closed`` is False if the
        slot has a source now.
        """
        for output in self._outputs:
            if output.view is not None:
                output.view.forget(source_slot)
            if not output.spec.merged:
                output.streams[source_slot].closed = closed or source_slot in output.hidden
                output.snapshots.pop(source_slot, None)

    def forget(self, source_slot: int) -> None:
        """Delete a source's blocks from every output's view, because the content of the engine's cache is unknown.

        A view has a separate index, for routers whose keys have restricted rights.
        """
        for output in self._outputs:
            if output.view is not None:
                output.view.forget(source_slot)

    def _publish_clear(self, output_id: int, stream_slot: int, rank: int, now: float) -> None:
        stream = self._outputs[output_id].streams[stream_slot]
        payload = encode(stream.wire, [AllBlocksCleared()], self.wall, rank)
        self._send(output_id, stream_slot, payload, 1, now)

    def _send(self, output_id: int, stream_slot: int, payload: bytes, events: int, now: float) -> None:
        """Append one batch of ``events`` events to an output's stream, and send it to the routers.

        Raises:
            AssertionError: the stream is read from a log, so kvbus must not number a batch of its own.
        """
        stream = self._outputs[output_id].streams[stream_slot]
        if stream.numbered:
            raise AssertionError("the stream repeats the records of a log, so kvbus cannot append a batch of its own")
        seq = stream.append(payload, now, empty=not events)
        self.commands.append(Publish(output_id, stream_slot, stream.topic, seq, payload, events, stream.publisher_id))

    def change_rank(self, source_slot: int, source: Source, rank: int, now: float) -> None:
        """Give a source the rank that its engine has just named, and move its blocks to that rank at routers.

        Routers file blocks by rank. They may hold blocks of this source under the rank that kvbus has assumed so far,
        and under the new rank, if a previous kvbus process announced them. A merged stream names no engine's rank.
        """
        outputs = [
            (output_id, output)
            for output_id, output in [*self._plain, *self.fitted]
            # routers recognize SGLang by a batch 0 that begins with AllBlocksCleared, so batch 0 must not be a clear
            if not output.merged and source_slot not in output.hidden and output.streams[source_slot].next_seq
        ]
        if source.announced:
            for output_id, output in outputs:
                removals = partial(removals_of, output.filed(source_slot, source))
                self._publish_fit(output_id, output, source_slot, source, [AllBlocksCleared()], [removals], now)
        source.see_rank(rank)
        for output_id, output in outputs:
            if not self.clears_others(output, source_slot):
                self._publish_on(output_id, output, source_slot, source, [AllBlocksCleared()], now)
        if source.announced:
            source.begin_announcing()
            for output_id, output in outputs:
                events = list(announce(output.filed(source_slot, source)))
                self._publish_fit(output_id, output, source_slot, source, events, (), now)

    # -- batches -----------------------------------------------------------------------------------------------------

    def clear(self, source_slot: int, source: Source, now: float) -> None:
        """Clear a source's blocks at all routers. Call it before the blocks are removed from the source's index."""
        self.publish(source_slot, source, [AllBlocksCleared()], now)
        for output_id, output in self._fitted_of(source_slot):
            removals = partial(removals_of, output.filed(source_slot, source))
            self._publish_fit(output_id, output, source_slot, source, [AllBlocksCleared()], [removals], now)

    def announce(self, source_slot: int, source: Source, now: float) -> None:
        """Publish all blocks of a source again, for routers whose blocks of this source were cleared."""
        for each in self._plain:
            events = list(announce(each[1].filed(source_slot, source)))
            self._publish_own(source_slot, source, events, each, now)
        for output_id, output in self._fitted_of(source_slot):
            events = list(announce(output.filed(source_slot, source)))
            self._publish_fit(output_id, output, source_slot, source, events, (), now)

    def publish_all(self, source_slot: int, source: Source, events: list[AnyEvent], now: float) -> None:
        """Publish the events that result from a source's newest batch on all outputs.

        Divide the events into batches that every router accepts, because there may be very many: an engine can announce
        a complete cache in one batch.
        """
        filed = source.normalizer.filed
        if not filed:
            for batch in in_batches(events, source.normalizer.most_blocks):
                self.publish(source_slot, source, batch, now)
        for each in self._plain if filed else ():
            self._publish_own(source_slot, source, filed.get(each[1].spec.profile.residencies, events), each, now)
        if self.fitted:
            self._publish_fitted(source_slot, source, events, now)

    def _publish_own(
        self, source_slot: int, source: Source, events: list[AnyEvent], output: tuple[int, Output], now: float
    ) -> None:
        """Publish events on one output, because its routers may get other events than the routers of other outputs."""
        for batch in in_batches(events, source.normalizer.most_blocks):
            self.publish(source_slot, source, batch, now, (output,))

    def publish(
        self,
        source_slot: int,
        source: Source,
        events: Sequence[AnyEvent],
        now: float,
        outputs: Sequence[tuple[int, Output]] | None = None,
    ) -> None:
        """Publish one batch, with the next seq, on every output whose routers read batches unchanged.

        The batch is encoded once for all outputs with the same encoding and rank. If ``outputs`` is given, only these
        outputs get the batch.
        """
        payloads: dict[tuple[Wire, int], bytes] = {}
        for output_id, output in self._plain if outputs is None else outputs:
            stream_slot, rank = 0 if output.merged else source_slot, output.rank_of(source_slot, source)
            stream = output.streams[stream_slot]
            payload = payloads.get((stream.wire, rank))
            if payload is None:
                payload = payloads[stream.wire, rank] = encode(stream.wire, events, source.ts, rank)
            if stream.keeps_topic:
                stream.topic = source.topic
            self._send(output_id, stream_slot, payload, len(events), now)

    def _publish_fitted(self, source_slot: int, source: Source, events: list[AnyEvent], now: float) -> None:
        """Publish the events of a source's newest batch on the outputs whose routers need adapted batches."""
        for output_id, output in self._fitted_of(source_slot):
            residencies = output.spec.profile.residencies
            own = source.normalizer.filed.get(residencies, events)
            cleared: Cleared = [partial(removals, residencies) for removals in source.normalizer.cleared]
            if output.view is not None:
                own, cleared = output.view.take(source_slot, own, source.normalizer.index)
            self._publish_fit(output_id, output, source_slot, source, own, cleared, now)

    def keep(self, source_slot: int, source: Source, events: list[AnyEvent]) -> None:
        """Apply the events of an expired source's newest batch to the outputs' views without publishing them.

        The source's blocks are cleared at the routers, because its engine is gone. A view is the separate index for
        routers whose keys have restricted rights. It stays up to date in case the engine comes back.
        """
        for _, output in self._fitted_of(source_slot):
            if output.view is not None:
                own = source.normalizer.filed.get(output.spec.profile.residencies, events)
                output.view.take(source_slot, own, source.normalizer.index)

    def _fitted_of(self, source_slot: int) -> list[tuple[int, Output]]:
        """Return the outputs that may show the source in ``source_slot``, and whose routers need adapted batches.

        These routers cannot read every batch unchanged; see :attr:`fitted`.
        """
        return [(output_id, output) for output_id, output in self.fitted if source_slot not in output.hidden]

    def _publish_fit(
        self,
        output_id: int,
        output: Output,
        source_slot: int,
        source: Source,
        events: list[AnyEvent],
        cleared: Cleared,
        now: float,
    ) -> None:
        fitted = self._fit(output, source_slot, source, events, cleared)
        for batch in in_batches(fitted, source.normalizer.most_blocks):
            self._publish_on(output_id, output, source_slot, source, batch, now)

    def _fit(
        self, output: Output, source_slot: int, source: Source, events: list[AnyEvent], cleared: Cleared
    ) -> list[AnyEvent]:
        return fit(
            output.spec.profile,
            events,
            cleared,
            self._others(output, source_slot),
            merged=output.merged,
            group=source.normalizer.first_group,
            stats=output.stats,
        )

    def _others(self, output: Output, source_slot: int) -> list[tuple[Index, int | None]]:
        """Return the index and the first announced group of each other rank in the pod of ``source_slot``.

        Routers of some profiles clear all ranks of a pod at the AllBlocksCleared of one rank. The list is empty if the
        output's routers clear only that rank. An index has the blocks that these routers may know.
        """
        clears = output.spec.profile.clears
        if clears == "rank" or (clears == "connection" and not output.merged):
            return []
        return [
            (output.index_of(slot, other), other.normalizer.first_group)
            for slot, other in enumerate(self._sources)
            if slot != source_slot
            and slot not in output.hidden
            and not other.expired
            and len(output.index_of(slot, other))
            and self._pod(output, slot) == self._pod(output, source_slot)
        ]

    def _pod(self, output: Output, source_slot: int) -> bytes:
        """Return the name by which routers identify the pod (machine) of a source.

        The name is the stream's topic. It is empty if routers identify a pod by its address, because all sources then
        have the same address, the one of kvbus.
        """
        if output.spec.profile.topics != "pod and model":
            return b""
        stream = output.streams[0 if output.merged else source_slot]
        return self._sources[source_slot].topic if stream.keeps_topic else stream.topic

    def clears_others(self, output: Output, source_slot: int) -> bool:
        """Return whether AllBlocksCleared of ``source_slot`` would make routers drop other ranks' blocks."""
        return not output.merged and len(self._others(output, source_slot)) > 0

    def _publish_on(
        self,
        output_id: int,
        output: Output,
        source_slot: int,
        source: Source,
        events: list[AnyEvent],
        now: float,
    ) -> None:
        """Publish one batch on one output. Divide the batch if it is too large for the routers of the output."""
        stream_slot, rank = 0 if output.merged else source_slot, output.rank_of(source_slot, source)
        stream = output.streams[stream_slot]
        profile = stream.profile
        payload = encode(profile.wire, events, source.ts, rank)
        if 0 < profile.max_events < len(events) or 0 < profile.max_bytes < len(payload):
            pieces = halves(events)
            if len(pieces) > 1:
                for piece in pieces:
                    self._publish_on(output_id, output, source_slot, source, piece, now)
                return
        if stream.keeps_topic:
            stream.topic = source.topic
        self._send(output_id, stream_slot, payload, len(events), now)

    def merge_overlays(self) -> None:
        """Merge each view's copy-on-write overlay into its index, unless a snapshot still needs the frozen state."""
        for output in self._outputs:
            if output.view is not None:
                output.view.merge_overlays()

    def heartbeats(self, now: float) -> None:
        """Send an empty batch on every stream that was silent for the output's ``heartbeat`` seconds."""
        for output_id, output in enumerate(self._outputs):
            for stream_slot, stream in enumerate(output.streams):
                if stream.heartbeat_due(now):
                    self.publish_empty(output_id, stream_slot, now)

    def publish_empty(self, output_id: int, stream_slot: int, now: float) -> None:
        """Send an empty batch on the stream in ``stream_slot``.

        If the stream's newest batch is empty, repeat its ``ts``, because both share an entry of the journal.
        """
        output = self._outputs[output_id]
        stream, source = output.streams[stream_slot], self._source_of(output, stream_slot)
        if stream.journal.beat is not None:
            ts = stream.beat_ts
        else:
            ts = self.wall if source is None else max(self.wall, source.ts)
        self._do(wal.Heartbeat(output_id, stream_slot, ts), now)

    def heartbeat(self, record: wal.Heartbeat, now: float) -> None:
        """Send an empty batch on the stream that a heartbeat record of the write-ahead log names."""
        output_id, stream_slot = record.output, record.stream
        output = self._outputs[output_id]
        stream = output.streams[stream_slot]
        payload = stream.journal.beat
        if payload is None:
            source = self._source_of(output, stream_slot)
            payload = encode(stream.wire, [], record.ts, 0 if source is None else output.rank_of(stream_slot, source))
            stream.beat_ts = record.ts
        output.stats.heartbeats += 1
        self._send(output_id, stream_slot, payload, 0, now)

    def _source_of(self, output: Output, stream_slot: int) -> Source | None:
        """Return the source of a stream. The stream for all sources of an output has the first source, or none yet."""
        if output.spec.merged:
            return self._sources[0] if self._sources else None
        return self._sources[stream_slot]

    def incomplete(self, record: wal.SeqsIncomplete, now: float) -> None:
        """Mark seqs at which a router may hold only a part of a state.

        A record of the write-ahead log names the seqs.
        """
        del now
        self._outputs[record.output].streams[record.stream].incomplete.add(record.first, record.end)

    def sources_of(self, output: Output, stream_slot: int) -> list[tuple[int, Source]]:
        """Return the sources whose blocks are announced on the stream in ``stream_slot``, each with its slot."""
        slots = range(len(self._sources)) if output.spec.merged else (stream_slot,)
        return [(source_slot, self._sources[source_slot]) for source_slot in slots if source_slot not in output.hidden]
