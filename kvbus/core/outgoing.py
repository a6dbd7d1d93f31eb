"""The relay's outgoing side: it numbers batches, keeps them on every output's streams, and answers routers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvbus.core import write_ahead_log as wal
from kvbus.core.blocks.announce import announce, removals_of
from kvbus.core.blocks.compaction import ClearsWhere, Part, StateSnapshot
from kvbus.core.blocks.index import Index
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, Command, Publish, SendPart, SendState
from kvbus.core.events import AnswerPulled, ReplayAsked, SnapshotAsked, Subscribed
from kvbus.core.outputs import replay_answer
from kvbus.core.outputs.fitting import Cleared, fit, halves, in_batches
from kvbus.core.outputs.output import Output
from kvbus.core.outputs.snapshot import SnapshotAnswer, SnapshotPart, parse_snapshot_request, reply
from kvbus.core.outputs.spec import NewStream, OutputSpec
from kvbus.core.outputs.state_transfer import StateTransfer
from kvbus.core.source import Source
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.frames import parse_replay_request
from kvbus.core.wire.profiles import CANONICAL, Wire, encode
from kvbus.core.wire.schema import AllBlocksCleared

Asked = TypeVar("Asked")


class Outgoing:
    """Every output's streams.

    Args:
        sources: the relay's, in their places.
        outputs: the relay's.
        do: keeps a record (:mod:`kvbus.core.write_ahead_log`) and has it applied.
    """

    def __init__(self, sources: list[Source], outputs: list[Output], do: Callable[[wal.Record, float], None]) -> None:
        self._sources = sources
        self._outputs = outputs
        self._plain: list[tuple[int, Output]] = []
        self.fitted: list[tuple[int, Output]] = []
        """Outputs whose routers do not take batches as they come: see :mod:`kvbus.core.outputs.fitting`."""
        self.sort_outputs()
        self.names_cleared = any(output.spec.profile.clears != "rank" for output in outputs)
        """Whether a clear has to be said by removals on some output."""
        self._do = do
        self.wall = 0.0
        """The time of day, for the ``ts`` of batches no engine sent; nothing is decided by it."""
        self.follower: Callable[[int, Sequence[AnyEvent]], None] | None = None
        """Gets the events that leave for everybody, with their source's slot."""
        self.commands: list[Command] = []
        """What the shell has to do."""

    # -- streams -----------------------------------------------------------------------------------------------------

    def sort_outputs(self) -> None:
        """Find out which outputs take batches as they come, and which do not."""
        there = [(number, each) for number, each in enumerate(self._outputs) if not each.spec.closed]
        self._plain = [(number, each) for number, each in there if each.as_it_comes]
        self.fitted = [(number, each) for number, each in there if not each.as_it_comes]

    def place(self, number: int, spec: OutputSpec, now: float) -> None:
        """Put an output in place of what is there: it has what the sources hold, and its routers get it as a state."""
        output = Output(spec, [source.rank for source in self._sources])
        self._outputs[number:] = [output, *self._outputs[number + 1 :]]
        self.sort_outputs()
        for i, source in enumerate(self._sources):
            if not output.merged:
                while len(output.streams) <= i:
                    output.add_stream(None, 0, 0, b"")
                output.streams[i].closed = source.gone or i in output.hidden
            if output.view is not None and i not in output.hidden:
                output.view.take(i, list(source.normalizer.announce()), source.normalizer.index)
        if spec.closed:
            for stream in output.streams:
                stream.closed = True
        self._clear_known(number, output, spec.known_slots, now)

    def begin(self, record: wal.Begun, now: float) -> None:
        """Where a numbering goes on from a former process, routers get AllBlocksCleared."""
        self.wall = record.wall
        for number, output in enumerate(self._outputs):
            self._clear_known(number, output, record.slots[number], now)

    def _clear_known(self, number: int, output: Output, slots: int, now: float) -> None:
        for at, stream in output.open_streams.items():
            if not stream.first_seq:
                continue
            for i, source in self._sources_of(output, at):
                if not source.gone:
                    self._publish_clear(number, at, output.rank_of(i, source), now)
            for i in range(slots):
                if i >= len(self._sources) or self._sources[i].gone:
                    self._publish_clear(number, at, i, now)

    def welcome(self, i: int, rank: int, streams: Sequence[NewStream], now: float) -> None:
        """Make streams for the new source in slot ``i``; routers that knew another one there get AllBlocksCleared."""
        for number, (output, new) in enumerate(zip(self._outputs, streams, strict=True)):
            if new.hidden:
                output.hidden.add(i)
            else:
                output.hidden.discard(i)
            if output.spec.merged:
                continue
            while len(output.streams) < i:
                output.add_stream(None, 0, 0, b"").closed = True
            if len(output.streams) == i:
                output.add_stream(new.topic, rank, new.first_seq, new.publisher_id)
            stream = output.streams[i]
            stream.closed = new.hidden
            if output.spec.by_topic and stream.topic != new.topic:
                stream.resume_at(new.first_seq)  # a topic has a numbering of its own
            stream.rank, stream.topic, stream.keeps_topic = rank, new.topic or b"", new.topic is None
            stream.publisher_id = stream.publisher_id or new.publisher_id
            if not stream.next_seq:  # nobody has been here in this process
                stream.next_seq = stream.first_seq = new.first_seq
            if stream.next_seq and not new.hidden and not self._clears_others(output, i):
                self._publish_clear(number, i, rank, now)

    def close(self, i: int, *, closed: bool) -> None:
        """Say whether slot ``i`` is free."""
        for output in self._outputs:
            if output.view is not None:
                output.view.forget(i)
            if not output.spec.merged:
                output.streams[i].closed = closed or i in output.hidden
                output.snapshots.pop(i, None)

    def forget(self, i: int) -> None:
        """Nothing is known of the cache of a source any more."""
        for output in self._outputs:
            if output.view is not None:
                output.view.forget(i)

    def _publish_clear(self, number: int, at: int, rank: int, now: float) -> None:
        stream = self._outputs[number].streams[at]
        payload = encode(stream.profile.wire, [AllBlocksCleared()], self.wall, rank)
        seq = stream.append(payload, now)
        self.commands.append(Publish(number, at, stream.topic, seq, payload, 1, stream.publisher_id))

    def cleared_under(self, i: int, source: Source, now: float) -> None:
        """An engine says another rank than expected: routers may hold blocks of a former process under that one."""
        for number, output in enumerate(self._outputs):
            # a batch 0 that begins with AllBlocksCleared is how readers recognize SGLang
            if (
                not output.merged
                and output.streams[i].next_seq
                and i not in output.hidden
                and not self._clears_others(output, i)
            ):
                self._publish_clear(number, i, source.rank, now)

    # -- batches -----------------------------------------------------------------------------------------------------

    def clear(self, i: int, source: Source, now: float) -> None:
        """Clear a source's blocks downstream; they are still in its index."""
        self.publish(i, source, [AllBlocksCleared()], now)
        for number, output in self._fitted_of(i):
            removals = partial(removals_of, output.index_of(i, source))
            self._publish_fit(number, output, i, source, [AllBlocksCleared()], [removals], now)

    def announce(self, i: int, source: Source, now: float) -> None:
        """Publish a source's blocks to routers that have been cleared."""
        self._publish_batches(i, source, list(source.normalizer.announce()), now)
        for number, output in self._fitted_of(i):
            self._publish_fit(number, output, i, source, list(announce(output.index_of(i, source))), (), now)

    def publish_all(self, i: int, source: Source, events: list[AnyEvent], now: float) -> None:
        """Publish what leaves of a source's last batch in batches that every router takes: it may be a whole cache."""
        self._publish_batches(i, source, events, now)
        if self.fitted:
            self.publish_fitted(i, source, events, now, cleared=source.normalizer.cleared)

    def _publish_batches(self, i: int, source: Source, events: list[AnyEvent], now: float) -> None:
        for batch in in_batches(events, source.normalizer.block_size or 0):
            self.publish(i, source, batch, now)

    def publish(
        self, i: int, source: Source, events: Sequence[AnyEvent], now: float, whole: bytes | None = None
    ) -> None:
        """Number and keep one batch on every output but the :attr:`fitted` ones.

        ``whole`` says it already, in the canonical encoding.
        """
        if self.follower is not None:
            self.follower(i, events)
        payloads: dict[tuple[Wire, int], bytes] | None = None
        for number, output in self._plain:
            at, rank = (0, i) if output.merged else (i, source.rank)
            stream = output.streams[at]
            wire = stream.profile.wire
            payload = whole
            if payload is None or rank != source.rank or not (wire is CANONICAL or source.says(wire)):
                payloads = payloads or {}
                payload = payloads.get((wire, rank))
                if payload is None:
                    payload = payloads[wire, rank] = encode(wire, events, source.ts, rank)
            seq = stream.append(payload, now)
            if stream.keeps_topic:
                stream.topic = source.topic
            self.commands.append(Publish(number, at, stream.topic, seq, payload, len(events), stream.publisher_id))

    def publish_fitted(
        self,
        i: int,
        source: Source,
        events: Sequence[AnyEvent],
        now: float,
        whole: bytes | None = None,
        *,
        cleared: Cleared = (),
    ) -> None:
        """Publish what leaves of a source's last batch on the :attr:`fitted` outputs."""
        for number, output in self._fitted_of(i):
            if output.view is None:
                self._publish_fit(number, output, i, source, events, cleared, now, whole)
            else:
                # encoded anew: by the engine's own spelling routers would know that they got the batch whole
                own = output.view.take(i, events, source.normalizer.index)
                self._publish_fit(number, output, i, source, *own, now)

    def keep(self, i: int, source: Source, events: Sequence[AnyEvent]) -> None:
        """Events that would leave, of a source whose blocks are cleared downstream: views follow its cache."""
        for _, output in self._fitted_of(i):
            if output.view is not None:
                output.view.take(i, events, source.normalizer.index)

    def _fitted_of(self, i: int) -> list[tuple[int, Output]]:
        """The fitted outputs whose routers may read a source."""
        return [(number, output) for number, output in self.fitted if i not in output.hidden]

    def _publish_fit(
        self,
        number: int,
        output: Output,
        i: int,
        source: Source,
        events: Sequence[AnyEvent],
        cleared: Cleared,
        now: float,
        whole: bytes | None = None,
    ) -> None:
        fitted = self._fit(output, i, source, events, cleared)
        for batch in in_batches(fitted, source.normalizer.block_size or 0):
            self._publish_on(number, output, i, source, batch, now, whole if batch is events else None)

    def _fit(
        self, output: Output, i: int, source: Source, events: Sequence[AnyEvent], cleared: Cleared
    ) -> Sequence[AnyEvent]:
        return fit(
            output.spec.profile,
            events,
            cleared,
            self._others(output, i),
            merged=output.merged,
            group=source.normalizer.first_group,
            stats=output.stats,
        )

    def _others(self, output: Output, i: int) -> list[Index]:
        """The blocks of the other ranks of the same pod, as routers know them; empty where each rank is by itself."""
        if output.spec.profile.clears == "rank":
            return []
        return [
            output.index_of(slot, other)
            for slot, other in enumerate(self._sources)
            if slot != i
            and slot not in output.hidden
            and not other.expired
            and len(output.index_of(slot, other))
            and self._pod(output, slot) == self._pod(output, i)
        ]

    def _pod(self, output: Output, i: int) -> bytes:
        """What names the pod of a source to routers: its topic, or the address, which all sources share."""
        if output.spec.profile.topics != "pod and model":
            return b""
        stream = output.streams[0 if output.merged else i]
        return self._sources[i].topic if stream.keeps_topic else stream.topic

    def _clears_others(self, output: Output, i: int) -> bool:
        """Whether AllBlocksCleared on the stream of slot ``i`` would cost routers the blocks of other ranks."""
        return not output.merged and len(self._others(output, i)) > 0

    def _publish_on(
        self,
        number: int,
        output: Output,
        i: int,
        source: Source,
        events: Sequence[AnyEvent],
        now: float,
        whole: bytes | None,
    ) -> None:
        """Number and keep one batch on one output, in several where its routers refuse one so large."""
        at, rank = (0, i) if output.merged else (i, source.rank)
        stream = output.streams[at]
        profile = stream.profile
        if whole is None or rank != source.rank or not source.says(profile.wire):
            whole = encode(profile.wire, events, source.ts, rank)
        if 0 < profile.max_events < len(events) or 0 < profile.max_bytes < len(whole):
            pieces = halves(events)
            if len(pieces) > 1:
                for piece in pieces:
                    self._publish_on(number, output, i, source, piece, now, None)
                return
        seq = stream.append(whole, now)
        if stream.keeps_topic:
            stream.topic = source.topic
        self.commands.append(Publish(number, at, stream.topic, seq, whole, len(events), stream.publisher_id))

    def merge_overlays(self) -> None:
        """Frozen copies of what views hold may have gone."""
        for output in self._outputs:
            if output.view is not None:
                output.view.merge_overlays()

    def heartbeats(self, now: float) -> None:
        """An empty batch on every stream that has been silent for long enough."""
        for number, output in enumerate(self._outputs):
            for at, stream in enumerate(output.streams):
                if stream.heartbeat_due(now):
                    self._do(wal.Heartbeat(number, at, self.wall), now)

    def heartbeat(self, record: wal.Heartbeat, now: float) -> None:
        """An empty batch on one stream."""
        number, at, self.wall = record.output, record.stream, record.wall
        output = self._outputs[number]
        stream = output.streams[at]
        source = self._sources[0 if output.spec.merged else at]
        payload = stream.journal.beat
        if payload is None:
            payload = encode(stream.profile.wire, [], max(self.wall, source.ts), output.rank_of(at, source))
        seq = stream.append(payload, now, empty=True)
        output.stats.heartbeats += 1
        self.commands.append(Publish(number, at, stream.topic, seq, payload, 0, stream.publisher_id))

    # -- answers -----------------------------------------------------------------------------------------------------

    def asked(self, event: ReplayAsked, now: float) -> None:
        """A router asks for a replay."""
        del now
        request = self._parsed(event, parse_replay_request)
        if request is not None:
            stream = self._outputs[event.output].streams[event.stream]
            answer = replay_answer.begin(stream, request, has_state=event.has_state)
            self.commands.append(AnswerReplay(event.output, event.stream, answer))

    def snapshot_asked(self, event: SnapshotAsked, now: float) -> None:
        """A router asks for a snapshot."""
        del now
        request = self._parsed(event, parse_snapshot_request)
        if request is not None:
            stream = self._outputs[event.output].streams[event.stream]
            published = stream.next_seq > stream.first_seq
            answer = SnapshotAnswer(request.envelope, stream.publisher_id, request.valid, published)
            self.commands.append(AnswerSnapshot(event.output, event.stream, answer))

    def pulled(self, event: AnswerPulled, now: float) -> None:
        """A router can take more of its answer."""
        number, at, answer = event.output, event.stream, event.answer
        part: replay_answer.JournalPart | replay_answer.StatePart | replay_answer.EndPart | SnapshotPart
        if isinstance(answer, SnapshotAnswer):
            part = reply(answer, lambda: self._newest_snapshot(number, at))
        else:
            stream = self._outputs[number].streams[at]
            part = replay_answer.next_part(answer, stream, lambda start: self._snapshot_from(number, at, start, now))
            if isinstance(part, replay_answer.StatePart):
                # up to the snapshot's seq the requester's set is not that of the journal at the same seq
                self._incomplete(number, at, part.first + 1, part.end, now)
        self.commands.append(SendPart(number, at, part))

    def _parsed(
        self, event: ReplayAsked | SnapshotAsked, parse: Callable[[Sequence[bytes]], Asked | None]
    ) -> Asked | None:
        request = parse(event.frames)
        if request is None:
            self._outputs[event.output].stats.malformed += 1
        return request

    # -- state -------------------------------------------------------------------------------------------------------

    def subscribed(self, event: Subscribed, now: float) -> None:
        """Routers need the state: it takes the seqs behind the newest one, in which all others get empty batches.

        The seqs between its batches are no cursor: see :mod:`kvbus.core.outputs.incomplete`.
        """
        number, at = event.output, event.stream
        streams = self._outputs[number].streams
        if at >= len(streams) or not self._outputs[number].serves(streams[at]):
            return  # its source is about to be added, or is gone
        stream = streams[at]
        if not stream.next_seq:
            # a batch 0 that begins with AllBlocksCleared is how readers recognize SGLang
            self._publish_empty(number, at, now)
        snapshot = self._newest_snapshot(number, at)
        transfer = StateTransfer(snapshot, stream.next_seq, stream.topic, stream.publisher_id)
        for _ in range(transfer.first_seq, transfer.end_seq):
            self._publish_empty(number, at, now)
        self._incomplete(number, at, transfer.first_seq + 1, transfer.end_seq, now)
        self.commands.append(SendState(number, at, event.routers, transfer))

    def _publish_empty(self, number: int, at: int, now: float) -> None:
        self._do(wal.Heartbeat(number, at, self.wall), now)

    def _newest_snapshot(self, number: int, at: int) -> StateSnapshot:
        """The live state of a stream as of its newest batch."""
        output = self._outputs[number]
        stream = output.streams[at]
        snapshot = self._known_snapshot(output, at)
        if snapshot is None or snapshot.seq < stream.changed_seq:
            snapshot = output.snapshots[at] = self._snapshot_of(output, at)
        return snapshot

    def _snapshot_from(self, number: int, at: int, start: int, now: float) -> StateSnapshot:
        """The live state of a stream, to be sent in the seqs from ``start`` on; a recent one if the journal follows it.

        Where there are too few seqs for it, empty batches make room.
        """
        output = self._outputs[number]
        stream = output.streams[at]
        snapshot = self._known_snapshot(output, at)
        if snapshot is not None and snapshot.seq < stream.next_seq - 1:
            first = stream.journal.first_seq
            if first is None or snapshot.seq + 1 < first:
                snapshot = None
        if snapshot is None or snapshot.seq + 1 - start < snapshot.fewest:
            snapshot = output.snapshots[at] = self._snapshot_of(output, at)
            while stream.next_seq - start < snapshot.fewest:
                self._publish_empty(number, at, now)
            snapshot.seq = stream.next_seq - 1
        return snapshot

    def _incomplete(self, number: int, at: int, first: int, end: int, now: float) -> None:
        if first < end:
            self._do(wal.SeqsIncomplete(number, at, first, end), now)

    def incomplete(self, record: wal.SeqsIncomplete, now: float) -> None:
        """Remember seqs that are no cursor."""
        del now
        self._outputs[record.output].streams[record.stream].incomplete.add(record.first, record.end)

    def _known_snapshot(self, output: Output, at: int) -> StateSnapshot | None:
        snapshot = output.snapshots.get(at)
        return snapshot if snapshot is not None and snapshot.clears == self._clears(output, at) else None

    def _snapshot_of(self, output: Output, at: int) -> StateSnapshot:
        profile = output.spec.profile
        return StateSnapshot(
            output.streams[at].next_seq - 1,
            [self._part(output, i, source) for i, source in self._sources_of(output, at)],
            profile.wire,
            clears=self._clears(output, at),
            one_copy=profile.one_copy,
        )

    def _clears(self, output: Output, at: int) -> ClearsWhere:
        """Where a state of this stream has AllBlocksCleared."""
        if output.spec.profile.clears == "rank":
            return "each"
        return "none" if self._clears_others(output, at) else "first"

    def _part(self, output: Output, i: int, source: Source) -> Part:
        index = Index() if source.expired else output.index_of(i, source).copy()
        if output.spec.profile.one_group:
            index.keep_group(source.normalizer.first_group)
        return Part(index, output.rank_of(i, source), source.ts, source.normalizer.block_size or 0)

    def _sources_of(self, output: Output, at: int) -> list[tuple[int, Source]]:
        """The sources whose blocks a stream announces, with their slots."""
        slots = range(len(self._sources)) if output.spec.merged else (at,)
        return [(i, self._sources[i]) for i in slots if i not in output.hidden]
