"""The relay: the sequencers and normalizers of all sources, and the streams of all outputs.

It receives events and returns commands. Invariants:

* A batch is decoded only when it is the next one of its source.
* The seqs of an output's stream are dense and never go back. A batch is in the journal before it is sent.
* Routers get an AllBlocksCleared before any batch of a new epoch, and before any batch after lost batches.
* A block is in the index of a live source if and only if it was announced to routers.

For sources that are read from a log, kvbus publishes each record under the seq that it has in the log, and indexes only
records with tokens (:mod:`kvbus.core.log_relay`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from kvbus.core import write_ahead_log as wal
from kvbus.core.answering import RouterRequests
from kvbus.core.applying import Applier
from kvbus.core.commands import CancelReplay, Command, RequestReplay, RequestSnapshot
from kvbus.core.events import (
    BatchReceived,
    EngineEmptied,
    FurtherRankFound,
    HandshakeFailed,
    LogReached,
    OutputPlaced,
    RecordReceived,
    RelayEvent,
    ReplayAborted,
    ReplayAsked,
    ReplayReceived,
    RequestSent,
    RequestWaits,
    SnapshotAsked,
    SnapshotReceived,
    SourceDown,
    SourcePlaced,
    SourceRemoved,
    SourcesNamed,
    SourceUnreachable,
    SourceUp,
    Started,
    StreamBroken,
    Subscribed,
    Tick,
    Unread,
)
from kvbus.core.log_relay import LogRelay
from kvbus.core.outgoing import Outgoing
from kvbus.core.outputs.output import Output
from kvbus.core.outputs.snapshot import parse_snapshot
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.sequencing.actions import Ask, AskSnapshot, Deliver, Lost, NewEpoch, Stop, Synced
from kvbus.core.sequencing.phases import Phase
from kvbus.core.sequencing.topics import SeqBatch
from kvbus.core.source import Source
from kvbus.core.source_spec import SourceSpec
from kvbus.core.types import Reason
from kvbus.core.wire.codec import begins_with_clear, note
from kvbus.core.wire.frames import FrameLimits, ReplayEnd, parse_live, parse_replay
from kvbus.core.write_ahead_log import Records

SLICE: Final = 256
"""Maximum number of a source's batches that kvbus delivers in one call of the relay.

If more batches are ready, for example after a long replay, kvbus delivers them in later calls. So the event loop can
serve other connections in between.
"""

SLICE_BYTES: Final = 1024 * 1024
"""Size in bytes of the delivered batches after which kvbus delivers a source's next batches in a later call."""

MAX_WAITING: Final = 64 * 1024 * 1024
"""Maximum size in bytes of a source's batches that wait for a later call while further batches arrive.

If more bytes wait, the engine sends batches faster than kvbus can handle them. kvbus then handles them at once, and so
reads the next message later.
"""


class Relay:
    """The core of kvbus, without I/O.

    Call :meth:`handle` for every event, and carry out the returned commands in order.
    """

    def __init__(
        self, sources: Sequence[SourceSpec], outputs: Sequence[OutputSpec], limits: FrameLimits | None = None
    ) -> None:
        self.limits = limits or FrameLimits()
        self.sources: list[Source] = []
        """The sources, by slot.

        Streams, ports and records of the write-ahead log use the same slot numbers. A source keeps its slot when other
        sources are removed. A free slot holds a source whose ``gone`` is True.
        """
        ranks = [spec.rank for spec in sources]
        self.outputs = [Output(spec, ranks) for spec in outputs]
        self._out = Outgoing(self.sources, self.outputs, self._do)
        self._requests = RouterRequests(self._out, self.outputs, self._do)
        self._applier = Applier(self.sources, self._out, self.limits.max_events)
        self._numbered = LogRelay(self.sources, self.outputs, self._out, self.limits.max_events)
        self.sources.extend(map(self._make_source, sources))
        for slot, source in enumerate(self.sources):
            self._out.close(slot, closed=source.gone)

        # The daemon reads the following attributes.
        self.backlog = False
        """Whether the relay has postponed work to keep the event loop responsive.

        The daemon then sends a :class:`~kvbus.core.events.Tick` without delay.
        """
        self.records: Records | None = None
        """The records for the write-ahead log that are not on disk yet (:mod:`kvbus.core.write_ahead_log`).

        None if kvbus keeps no state on disk.
        """

        self._handlers: dict[type, Callable[..., None]] = {
            Started: self._started,
            SourcePlaced: self._source_placed,
            SourceRemoved: self._source_removed,
            OutputPlaced: self._output_placed,
            RecordReceived: self._numbered.received,
            LogReached: self._log_reached,
            StreamBroken: self._stream_broken,
            ReplayReceived: self._replayed,
            ReplayAborted: self._replay_aborted,
            SnapshotReceived: self._snapshot_received,
            RequestSent: self._request_sent,
            RequestWaits: self._request_waits,
            Unread: self._unread,
            SourceUp: self._up,
            SourceDown: self._down,
            SourceUnreachable: self._unreachable,
            FurtherRankFound: self._further_rank_found,
            SourcesNamed: self._named,
            HandshakeFailed: self._handshake_failed,
            ReplayAsked: self._requests.asked_replay,
            SnapshotAsked: self._requests.asked_snapshot,
            Subscribed: self._requests.subscribed,
            EngineEmptied: self._engine_emptied,
            Tick: self._tick,
        }

    def handle(self, event: RelayEvent, now: float) -> list[Command]:
        """Handle one event and return the resulting commands. ``now`` is the time in seconds on a monotonic clock."""
        self._out.now = now
        if type(event) is BatchReceived:
            self._batch(event, now)
        else:
            self._handlers[type(event)](event, now)
        return self.take_commands()

    def take_commands(self) -> list[Command]:
        """Return the collected commands and empty the list.

        The list may also have commands that were added while an answer to a router was read.
        """
        out = self._out
        commands, out.commands = out.commands, []
        return commands

    @property
    def present(self) -> list[Source]:
        """The sources in occupied slots of :attr:`sources`."""
        return [source for source in self.sources if not source.gone]

    def keep_records(self, *, keep: bool) -> None:
        """Start or stop keeping records of the write-ahead log in :attr:`records`."""
        self.records = Records() if keep else None

    # -- decisions -------------------------------------------------------------------------------------------------

    def _do(self, record: wal.Record, now: float) -> None:
        """Keep the record of a decision for the write-ahead log, and apply the record."""
        if self.records is not None:
            self.records.heads.append(record)
        self._applier.apply(record, now)

    def apply_record(self, record: wal.Record, now: float) -> None:
        """Apply one record of the write-ahead log after a restart.

        Drop the resulting commands, because the previous process has carried them out.

        Raises:
            StateError: the record does not belong to this relay.
        """
        try:
            self._follow(record)
            self._applier.apply(record, now)
        except (LookupError, TypeError, ValueError) as error:
            raise wal.StateError(f"record: {error}") from error
        self._out.commands.clear()

    def _follow(self, record: wal.Record) -> None:
        """Restore the epoch and the next seq that the source's sequencer had after the decision in this record."""
        if isinstance(record, wal.Delivered):
            self.sources[record.source].sequencer.current.restore_batch(record.seq, record.payload)
        elif isinstance(record, wal.EpochBegun):
            self.sources[record.source].sequencer.restore_epoch(partial=record.partial)
        elif isinstance(record, wal.BatchesLost):
            self.sources[record.source].sequencer.current.restore_loss(record.count)
        elif isinstance(record, wal.SnapshotTaken):
            self.sources[record.source].sequencer.current.restore_snapshot(record.seq)

    def resume_at(self, first_seq: Callable[[int, int], int]) -> None:
        """Continue all streams at later seqs after a restart from the saved state.

        Routers may have received batches that are not in the saved state, so their seqs are skipped. Mark every source
        as expired, so that kvbus announces its blocks again once the engine is in sync.

        Args:
            first_seq: function that returns the seq at which a stream continues. Its arguments are the output's number
                and the stream's slot.
        """
        for number, output in enumerate(self.outputs):
            for at, stream in output.served_streams.items():
                stream.resume_at(first_seq(number, at))
        for source in self.present:
            source.expired, source.announced = True, False
            source.sequencer.expire()

    def recovery_finished(self, now: float) -> bool:
        """Finish the recovery of the saved state.

        Every source counts as disconnected until the daemon reports its connection. If the previous process ended
        within a batch, apply the remaining parts of the batch. Return whether there were any: the state on disk then
        lacks them.
        """
        cut_off = any(bool(source.normalizer.parts) for source in self.sources)
        for slot, source in enumerate(self.sources):
            self._applier.finish(slot, now)
            source.sequencer.recovery_finished()
            if source.sequencer.next or len(source.normalizer.index):
                source.down_since = now
            if source.lifetimes is not None:
                source.lifetimes.begin(now)
        self._out.commands.clear()
        return cut_off

    # -- adding and removing sources and outputs -----------------------------------------------------------------------

    def _started(self, event: Started, now: float) -> None:
        self._do(wal.Begun(event.wall, [output.spec.known_slots for output in self.outputs]), now)

    def _source_placed(self, event: SourcePlaced, now: float) -> None:
        """Put a new source into a slot. If the slot has a source, remove that source first."""
        slot = event.source
        if slot < len(self.sources):
            self._free(slot, now)
        while len(self.sources) <= slot:
            self.sources.append(self._make_source(SourceSpec()))
        self.sources[slot] = self._make_source(event.spec)
        self._out.welcome(slot, event.spec.rank, event.streams, now)
        if event.spec.numbered:
            self._numbered.placed(slot)

    def _source_removed(self, event: SourceRemoved, now: float) -> None:
        self._free(event.source, now)

    def _make_source(self, spec: SourceSpec) -> Source:
        source = Source(spec)
        source.normalizer.names_cleared = self._out.names_cleared
        source.needs_tokens = self._out.needs_tokens
        return source

    def _free(self, slot: int, now: float) -> None:
        """Remove the source of a slot, and clear its blocks at the routers."""
        source = self.sources[slot]
        if not source.gone:
            self._applier.clear(slot, source, now)
        self.sources[slot] = self._make_source(SourceSpec(rank=source.rank))
        self._out.close(slot, closed=True)

    def _output_placed(self, event: OutputPlaced, now: float) -> None:
        self._out.set_output(event.output, event.spec, now)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _batch(self, event: BatchReceived, now: float) -> None:
        """Handle a message of a source's live stream: a batch, which is usually the expected one."""
        slot, frames = event.source, event.frames
        source = self.sources[slot]
        stats, sequencer, topics = source.stats, source.sequencer, source.topics
        message = parse_live(frames, self.limits)
        if isinstance(message, Reason):
            stats.batches += 1
            source.refuse_message(message, frames)
            return
        topic, seq, payload = message.topic, message.seq, message.payload
        if len(frames) > 3:
            note(source.unknown, "frame", "number 4")
        alone = topics.is_alone(topic)
        taken = [] if alone else topics.of_live(topic, seq, payload, now)
        if topic != topics.own:
            sequencer.up(now)
            self._take_in(slot, source, taken, now)
            return
        stats.batches += 1
        stats.bytes += len(payload)
        source.topic = topic
        if message.publisher_id != source.publisher_id:
            if source.publisher_id is None or message.publisher_id is None:
                self._do(wal.PublisherKnown(slot, message.publisher_id), now)
            else:
                # The new id needs no write-ahead record, because the record EpochBegun contains it.
                source.publisher_id = message.publisher_id
                sequencer.publisher_changed(now)
        source.down_since = None
        normalizer = source.normalizer
        fingerprint = sequencer.expected(seq, payload, now) if alone and not normalizer.parts else None
        if fingerprint is not None:
            self._deliver(slot, source, seq, fingerprint, payload, now)
            self.backlog |= bool(normalizer.parts)
        else:
            self._take_in(slot, source, [(seq, payload)] if alone else taken, now)

    def _take_in(self, slot: int, source: Source, taken: list[SeqBatch], now: float) -> None:
        for seq, payload in taken:
            source.sequencer.live(seq, payload, now)
        self._run(slot, source, now)

    def _deliver(self, slot: int, source: Source, seq: int, fingerprint: int, payload: bytes, now: float) -> None:
        """Keep the record of the next batch of a source for the write-ahead log, and apply the batch."""
        record = wal.Delivered(slot, seq, source.topic, fingerprint, payload)
        if self.records is not None:
            self.records.heads.append(record)
        self._applier.deliver(record, now)

    def _replayed(self, event: ReplayReceived, now: float) -> None:
        source = self.sources[event.source]
        message = parse_replay(event.frames, self.limits)
        if isinstance(message, Reason):
            source.refuse_message(message, event.frames)
            return
        if isinstance(message, ReplayEnd):
            source.sequencer.replay_ended(event.request, now)
            source.answer_ended()
        else:
            sequencer, topics = source.sequencer, source.topics
            taken = topics.of_answer(event.request, message.topic, message.seq, message.payload, now)
            source.topic = source.topic if topics.own is None else topics.own
            # A batch that begins with a clear may be the first of a state, which replaces all earlier batches. In a
            # backfill, kvbus takes it for a state only if the publisher's clears leave no block in any tier. If the
            # publisher is another kvbus, the operator configures whether they do.
            for seq, payload in taken:
                may_be_state = (
                    sequencer.state_may_begin(seq, payload)
                    and (source.normalizer.clears.empty or sequencer.phase is not Phase.BACKFILL)
                    and begins_with_clear(payload, self.limits.max_events)
                )
                sequencer.replayed(event.request, seq, payload, now, may_be_state=may_be_state)
        self._run(event.source, source, now)

    def _stream_broken(self, event: StreamBroken, now: float) -> None:
        del now
        stats = self.sources[event.source].stats
        stats.batches += 1
        stats.rejected[event.reason] += 1

    def _replay_aborted(self, event: ReplayAborted, now: float) -> None:
        source = self.sources[event.source]
        source.stats.rejected[Reason.FRAME_SIZE] += 1
        source.sequencer.replay_aborted(event.request, now)
        self._run(event.source, source, now)

    def _request_sent(self, event: RequestSent, now: float) -> None:
        source = self.sources[event.source]
        source.stats.requests_failed += not event.sent
        source.sequencer.sent(event.request, now if event.sent else inf)

    def _request_waits(self, event: RequestWaits, now: float) -> None:
        del now
        source = self.sources[event.source]
        source.stats.requests_waited += 1
        source.sequencer.sent(event.request, inf)

    def _unread(self, event: Unread, now: float) -> None:
        self.sources[event.source].sequencer.unread(event.request, now)

    def _snapshot_received(self, event: SnapshotReceived, now: float) -> None:
        source = self.sources[event.source]
        snapshot = parse_snapshot(event.frames)
        if snapshot is None:
            source.stats.rejected[Reason.FRAME_COUNT] += 1
            return
        if source.sequencer.snapshot(event.request, snapshot.seq, now):
            self._do(wal.PublisherKnown(event.source, snapshot.publisher_id), now)
            self._do(wal.SnapshotTaken(event.source, snapshot.seq, snapshot.chunks), now)
            source.sequencer.snapshot_applied(now)
        self._run(event.source, source, now)

    def _up(self, event: SourceUp, now: float) -> None:
        source = self.sources[event.source]
        source.down_since = None
        source.unreachable = None
        source.sequencer.up(now)
        self._run(event.source, source, now)

    def _down(self, event: SourceDown, now: float) -> None:
        source = self.sources[event.source]
        if source.down_since is None:
            source.down_since = now
        source.unreachable = source.further_rank = None
        source.topics.disconnected()
        source.answers_alone = 0
        source.sequencer.down(now)
        self._run(event.source, source, now)

    def _log_reached(self, event: LogReached, now: float) -> None:
        del now
        source = self.sources[event.source]
        sequencer = source.sequencer
        if event.reached:
            source.down_since, source.expired = None, False
        if event.reached != sequencer.connected:
            sequencer.stand_at(Phase.SYNC if event.reached else Phase.AWAY, sequencer.epoch, sequencer.next)

    def _unreachable(self, event: SourceUnreachable, now: float) -> None:
        del now
        self.sources[event.source].unreachable = event.why

    def _further_rank_found(self, event: FurtherRankFound, now: float) -> None:
        del now
        self.sources[event.source].further_rank = event.finding

    def _named(self, event: SourcesNamed, now: float) -> None:
        del now
        for slot, location in event.locations.items():
            self.sources[slot].location = location

    def _handshake_failed(self, event: HandshakeFailed, now: float) -> None:
        del now
        self.sources[event.source].stats.refused[event.reason] += 1

    def _tick(self, event: Tick, now: float) -> None:
        self.backlog = False
        self._out.wall = max(self._out.wall, event.wall)
        for slot, source in enumerate(self.sources):
            if source.gone:
                continue
            source.look_at_clock(event.wall)
            source.look_at_counts(now)
            source.normalizer.merge_overlays()
            if source.lifetimes is not None and (due := source.lifetimes.due(now)):
                self._do(wal.BlocksOutlived(slot, due), now)
            if event.stood:
                source.sequencer.stood_still(event.stood, now)
            source.sequencer.tick(now)
            self._run(slot, source, now)
            gone = source.down_since is not None and now - source.down_since >= source.spec.source_timeout
            if gone and not source.expired:
                self._do(wal.Expired(slot), now)
            if source.partial != (source.partial_since is not None):
                self._do(wal.PartialSince(slot, event.wall if source.partial else None), now)
        self._out.merge_overlays()
        self._out.heartbeats(now)

    def _engine_emptied(self, event: EngineEmptied, now: float) -> None:
        self._do(wal.CacheEmptied(event.source), now)

    def _run(self, slot: int, source: Source, now: float) -> None:
        """Carry out a slice of the actions of the source's sequencer.

        If actions or parts of a batch remain, set :attr:`backlog`. If too many bytes wait, go on with the next slice.
        """
        actions, normalizer = source.sequencer.actions, source.normalizer
        while True:
            size = 0
            if normalizer.parts:
                self._do(wal.Continued(slot), now)
                size = SLICE_BYTES
            for _ in range(min(len(actions), SLICE)):
                if size >= SLICE_BYTES or normalizer.parts:
                    break
                action = actions.popleft()
                if isinstance(action, Deliver):
                    size += len(action.payload)
                    self._deliver(slot, source, action.seq, action.fingerprint, action.payload, now)
                elif isinstance(action, AskSnapshot):
                    source.sequencer.sent(action.request, now)
                    self._out.commands.append(RequestSnapshot(slot, action.request))
                elif isinstance(action, Ask):
                    source.sequencer.sent(action.request, now)
                    self._out.commands.append(RequestReplay(slot, action.request, action.start))
                elif isinstance(action, Stop):
                    self._out.commands.append(CancelReplay(slot, action.request))
                elif isinstance(action, NewEpoch):
                    self._do(wal.EpochBegun(slot, source.sequencer.partial, source.publisher_id), now)
                elif isinstance(action, Lost):
                    self._do(wal.BatchesLost(slot, action.count), now)
                elif isinstance(action, Synced) and source.expired:
                    self._do(wal.Reannounced(slot), now)
            if not actions and not normalizer.parts:
                return
            self.backlog = True
            if sum(len(action.payload) for action in actions if isinstance(action, Deliver)) <= MAX_WAITING:
                return
