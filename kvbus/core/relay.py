"""The relay: every source's sequencer and normalizer, every output's streams. Events in, commands out.

Invariants:

* a batch is decoded only when it is the next one of its source;
* an output's seq is dense and never goes back; each number is in the journal before it is sent;
* an AllBlocksCleared reaches routers before anything of a new epoch does, or anything behind a hole;
* a block is in a live source's index if and only if it was announced to routers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from kvbus.core import write_ahead_log as wal
from kvbus.core.commands import (
    CancelReplay,
    Command,
    RequestReplay,
    RequestSnapshot,
)
from kvbus.core.events import (
    BatchReceived,
    ClearsEveryTier,
    Oversize,
    RelayEvent,
    ReplayAborted,
    ReplayAsked,
    ReplayReceived,
    SnapshotAsked,
    SnapshotReceived,
    SourceDown,
    SourceUp,
    Subscribed,
    Tick,
)
from kvbus.core.outgoing import Outgoing
from kvbus.core.outputs.output import NewStream, Output, OutputSpec
from kvbus.core.outputs.snapshot import parse_snapshot
from kvbus.core.sequencing.actions import Ask, AskSnapshot, Deliver, Lost, NewEpoch, Stop, Synced
from kvbus.core.source import NOBODY, Source, SourceSpec
from kvbus.core.types import Reason
from kvbus.core.wire import codec
from kvbus.core.wire.frames import SEQ_BYTES, FrameLimits, ReplayEnd, parse_live, parse_replay
from kvbus.core.write_ahead_log import Records

SLICE: Final = 256
"""Batches delivered per event handled: a long catch-up is spread over many, so that the loop stays alive."""


class Relay:
    """The pure core. Call :meth:`handle` for everything that happens and carry out what it returns, in order."""

    def __init__(
        self, sources: Sequence[SourceSpec], outputs: Sequence[OutputSpec], limits: FrameLimits | None = None
    ) -> None:
        self.limits = limits or FrameLimits()
        self.sources: list[Source] = []
        """By slot; a slot that is free has a source that is ``gone``."""
        ranks = [spec.rank for spec in sources]
        self.outputs = [Output(spec, ranks) for spec in outputs]
        self._out = Outgoing(self.sources, self.outputs, self._record)
        self.sources.extend(map(self._source, sources))
        for slot, source in enumerate(self.sources):
            self._out.close(slot, closed=source.gone)

        # What the shell looks at.
        self.backlog = False
        """Work was put off so that the loop stays alive: send a :class:`~kvbus.core.events.Tick` soon."""
        self.records: Records | None = None
        """Where records of the write-ahead log go (:mod:`kvbus.core.write_ahead_log`); None: none are kept."""

        self._handlers: dict[type, Callable[..., None]] = {
            BatchReceived: self._batch,
            Oversize: self._oversize,
            ReplayReceived: self._replayed,
            ReplayAborted: self._replay_aborted,
            SnapshotReceived: self._snapshot_received,
            SourceUp: self._up,
            SourceDown: self._down,
            ReplayAsked: self._out.asked,
            SnapshotAsked: self._out.snapshot_asked,
            Subscribed: self._out.subscribed,
            ClearsEveryTier: self._clears_every_tier,
            Tick: self._tick,
        }

    def handle(self, event: RelayEvent, now: float) -> list[Command]:
        """Take in one event at ``now`` (seconds, monotonic); the commands that follow from it."""
        self._handlers[type(event)](event, now)
        out = self._out
        commands, out.commands = out.commands, []
        return commands

    @property
    def present(self) -> list[Source]:
        """The sources there are; a slot of :attr:`sources` may be free."""
        return [source for source in self.sources if not source.gone]

    def place(self, slot: int, spec: SourceSpec, streams: Sequence[NewStream], now: float) -> list[Command]:
        """Put a source into a slot; one that was there is gone. All others go on as if nothing had happened.

        ``streams`` says for each output how the slot's own stream is to be; a merged output has none. The numbering of
        a slot goes on, whichever source has it.
        """
        if slot < len(self.sources):
            self._remove(slot, now)
        while len(self.sources) <= slot:
            self.sources.append(self._source(NOBODY))
        self.sources[slot] = self._source(spec)
        self._out.welcome(slot, spec.rank, streams, now)
        return self._out.take_commands()

    def remove(self, slot: int, now: float) -> list[Command]:
        """Take a source away: its blocks are cleared downstream, and its slot is free."""
        self._remove(slot, now)
        return self._out.take_commands()

    def _source(self, spec: SourceSpec) -> Source:
        source = Source(spec)
        source.normalizer.names_cleared = self._out.names_cleared
        return source

    def _remove(self, slot: int, now: float) -> None:
        source = self.sources[slot]
        if not source.gone:
            self._clear(slot, source, now)
        self.sources[slot] = self._source(NOBODY)
        self._out.close(slot, closed=True)

    def begin(self, now: float, wall: float = 0.0) -> list[Command]:
        """Call before anything else: a numbering that goes on from a former process opens with AllBlocksCleared."""
        self._record(wal.BEGUN, 0, wall)
        self._out.wall = wall
        self._out.begin(now)
        return self._out.take_commands()

    def apply_record(self, record: Sequence[Any], now: float) -> None:
        """Apply one record of the write-ahead log after a restart. What follows from it was sent before.

        Raises:
            StateError: it is no record of this relay's.
        """
        try:
            kind, slot, *rest = record  # of a heartbeat or of incomplete seqs, ``slot`` is the output's
            source = self.sources[0 if kind in (wal.HEARTBEAT, wal.INCOMPLETE) else slot]
            if kind == wal.DELIVERED:
                seq, source.topic, payload = rest
                source.sequencer.restore_batch(seq, payload)
                self._take(slot, source, payload, now, first_of_epoch=seq == 0)
            elif kind == wal.NEW_EPOCH:
                source.sequencer.restore_epoch(partial=rest[0])
                self._forget(slot, source, now)
            elif kind == wal.LOST:
                source.sequencer.partial = True
                self._lose(slot, source, rest[0], now)
            elif kind == wal.EXPIRED:
                self._expire(slot, source, now)
            elif kind == wal.REANNOUNCED:
                self._reannounce(slot, source, now)
            elif kind == wal.HEARTBEAT:
                self._out.wall = rest[1]
                self._out.heartbeat(slot, rest[0], now)
            elif kind == wal.PARTIAL:
                source.partial_since = rest[0]
            elif kind == wal.CLEARS_EVERY_TIER:
                source.normalizer.clears_every_tier()
            elif kind == wal.INCOMPLETE:
                stream, first, end = rest
                self.outputs[slot].streams[stream].incomplete.add(first, end)
            elif kind == wal.SNAPSHOT:
                source.sequencer.restore_snapshot(rest[0])
                self._take_snapshot(slot, source, rest[1], now)
            elif kind == wal.BEGUN:
                self.begin(now, rest[0])
            else:
                raise wal.StateError(f"unknown record {kind!r}")
        except (LookupError, TypeError, ValueError) as error:
            raise wal.StateError(f"record: {error}") from error
        self._out.commands.clear()

    def resume_at(self, first_seq: Callable[[int, int], int]) -> None:
        """Routers may have got more than this state knows. :meth:`begin` clears them before they get it again.

        Args:
            first_seq: the seq that a stream goes on at, by the number of its output and its place.
        """
        for number, output in enumerate(self.outputs):
            for at, stream in output.open_streams.items():
                stream.resume_at(first_seq(number, at))
        for source in self.present:
            source.expired, source.announced = True, False
            source.sequencer.expire()

    def recovery_finished(self, now: float) -> None:
        """All of the log was applied: every source is away until its connection stands again."""
        for source in self.sources:
            source.sequencer.recovery_finished()
            if source.sequencer.next or len(source.normalizer.index):
                source.down_since = now

    # -- sources ---------------------------------------------------------------------------------------------------

    def _batch(self, event: BatchReceived, now: float) -> None:
        source = self.sources[event.source]
        frames = event.frames
        stats = source.stats
        stats.batches += 1
        if len(frames) == 3 and len(frames[1]) == SEQ_BYTES and source.publisher_id is None:
            topic, number, payload = frames
            max_bytes = self.limits.max_frame_bytes
            seq = int.from_bytes(number, "big")
            fingerprint = None
            if len(payload) <= max_bytes and len(topic) <= max_bytes:
                fingerprint = source.sequencer.accept_in_order(seq, payload, now)
            if fingerprint is not None:
                stats.bytes += len(payload)
                source.topic = topic
                source.down_since = None
                self._deliver(event.source, source, seq, payload, fingerprint, now)
                return
        message = parse_live(frames, self.limits)
        if isinstance(message, Reason):
            stats.rejected[message] += 1
            return
        stats.bytes += len(message.payload)
        source.topic = message.topic
        if message.publisher_id != source.publisher_id:
            if source.publisher_id is not None and message.publisher_id is not None:
                source.sequencer.publisher_changed(now)
            source.publisher_id = message.publisher_id
        source.down_since = None
        source.sequencer.live(message.seq, message.payload, now)
        self._run(event.source, source, now)

    def _replayed(self, event: ReplayReceived, now: float) -> None:
        source = self.sources[event.source]
        message = parse_replay(event.frames, self.limits)
        if isinstance(message, Reason):
            source.stats.rejected[message] += 1
            return
        if isinstance(message, ReplayEnd):
            source.sequencer.replay_ended(event.request, now)
        else:
            source.topic = source.topic if message.topic is None else message.topic
            source.sequencer.replayed(event.request, message.seq, message.payload, now)
        self._run(event.source, source, now)

    def _oversize(self, event: Oversize, now: float) -> None:
        del now
        stats = self.sources[event.source].stats
        stats.batches += 1
        stats.rejected[Reason.FRAME_SIZE] += 1

    def _replay_aborted(self, event: ReplayAborted, now: float) -> None:
        source = self.sources[event.source]
        source.stats.rejected[Reason.FRAME_SIZE] += 1
        source.sequencer.replay_aborted(event.request, now)
        self._run(event.source, source, now)

    def _snapshot_received(self, event: SnapshotReceived, now: float) -> None:
        source = self.sources[event.source]
        snapshot = parse_snapshot(event.frames)
        if snapshot is None:
            source.stats.rejected[Reason.FRAME_COUNT] += 1
            return
        if source.sequencer.snapshot(event.request, snapshot.seq, now):
            source.publisher_id = snapshot.publisher_id
            self._record(wal.SNAPSHOT, event.source, snapshot.seq, snapshot.chunks)
            self._take_snapshot(event.source, source, snapshot.chunks, now)
            source.sequencer.snapshot_applied(now)
        self._run(event.source, source, now)

    def _take_snapshot(self, slot: int, source: Source, chunks: Sequence[bytes], now: float) -> None:
        self._forget(slot, source, now)
        for chunk in chunks:
            self._take(slot, source, chunk, now, first_of_epoch=False)

    def _up(self, event: SourceUp, now: float) -> None:
        source = self.sources[event.source]
        source.down_since = None
        source.sequencer.up(now)
        self._run(event.source, source, now)

    def _down(self, event: SourceDown, now: float) -> None:
        source = self.sources[event.source]
        if source.down_since is None:
            source.down_since = now
        source.sequencer.down(now)
        self._run(event.source, source, now)

    def _tick(self, event: Tick, now: float) -> None:
        self.backlog = False
        self._out.wall = max(self._out.wall, event.wall)
        for slot, source in enumerate(self.sources):
            if source.gone:
                continue
            source.normalizer.merge_overlays()
            source.sequencer.tick(now)
            self._run(slot, source, now)
            if source.down_since is not None and now - source.down_since >= source.spec.timeout:
                self._expire(slot, source, now)
            self._watch_partial(slot, source, event.wall)
        self._out.heartbeats(now)

    def _watch_partial(self, slot: int, source: Source, wall: float) -> None:
        if source.partial != (source.partial_since is not None):
            source.partial_since = wall if source.partial else None
            self._record(wal.PARTIAL, slot, source.partial_since)

    def _clears_every_tier(self, event: ClearsEveryTier, now: float) -> None:
        del now
        self._record(wal.CLEARS_EVERY_TIER, event.source)
        self.sources[event.source].normalizer.clears_every_tier()

    def _run(self, slot: int, source: Source, now: float) -> None:
        """Carry out what the sequencer decided, a slice at a time."""
        actions = source.sequencer.actions
        for _ in range(min(len(actions), SLICE)):
            action = actions.popleft()
            if isinstance(action, Deliver):
                self._deliver(slot, source, action.seq, action.payload, action.fingerprint, now)
            elif isinstance(action, AskSnapshot):
                source.sequencer.sent(action.request, now)
                self._out.commands.append(RequestSnapshot(slot, action.request))
            elif isinstance(action, Ask):
                source.sequencer.sent(action.request, now)
                self._out.commands.append(RequestReplay(slot, action.request, action.start))
            elif isinstance(action, Stop):
                self._out.commands.append(CancelReplay(slot, action.request))
            elif isinstance(action, NewEpoch):
                self._record(wal.NEW_EPOCH, slot, source.sequencer.partial)
                self._forget(slot, source, now)
            elif isinstance(action, Lost):
                self._record(wal.LOST, slot, action.count)
                self._lose(slot, source, action.count, now)
            elif isinstance(action, Synced):
                self._reannounce(slot, source, now)
        if actions:
            self.backlog = True

    def _deliver(self, slot: int, source: Source, seq: int, payload: bytes, fingerprint: int, now: float) -> None:
        if self.records is not None:
            self.records.delivered(slot, seq, source.topic, payload, fingerprint)
        self._take(slot, source, payload, now, first_of_epoch=seq == 0)

    def _record(self, *record: Any) -> None:
        if self.records is not None:
            self.records.heads.append(record)

    def _lose(self, slot: int, source: Source, count: int, now: float) -> None:
        source.lost += count
        if source.spec.on_lost == "clear":
            self._forget(slot, source, now, same_epoch=True)

    def _forget(self, slot: int, source: Source, now: float, *, same_epoch: bool = False) -> None:
        """Forget what was known of this source's cache: it cannot be relied on any more."""
        self._clear(slot, source, now)
        source.normalizer.reset(same_epoch=same_epoch)
        source.ranked = source.ranked and same_epoch
        if not same_epoch:
            source.lost, source.partial_since = 0, None

    def _take(self, slot: int, source: Source, payload: bytes, now: float, *, first_of_epoch: bool) -> None:
        """Decode, normalize and publish one batch of a source."""
        taken = source.normalizer.fast_path(payload)
        if taken is not None:
            plain, unchanged = taken
            source.stats.last_batch = source.ts = plain.ts
            if plain.rank != source.rank or not source.ranked:
                source.see_rank(plain.rank)
                unchanged = unchanged and plain.rank == source.rank
            if source.dialect.name is None:
                source.dialect.see(payload)
            if plain.events and not source.expired:
                source.announced = True
                whole = payload if unchanged else None
                self._out.publish(slot, source, plain.events, now, whole)
                if self._out.fitted:
                    self._out.publish_fitted(slot, source, plain.events, now, whole)
            return
        batch = codec.decode_batch(payload, self.limits.max_events)
        if isinstance(batch, Reason):
            source.stats.rejected[batch] += 1
            return
        source.stats.last_batch = batch.ts
        source.ts = batch.ts
        if batch.rank is not None:
            source.see_rank(batch.rank)
        source.dialect.see(payload)
        events = source.normalizer.apply(batch, first_of_epoch=first_of_epoch)
        if source.normalizer.emptied and source.sequencer.partial:
            source.lost = 0
            source.sequencer.complete(certain=source.normalizer.take_for_empty())
        if source.expired:
            return
        if events:
            source.announced = True
            self._out.publish_all(slot, source, events, now)

    def _expire(self, slot: int, source: Source, now: float) -> None:
        """The engine was gone for too long: its blocks are cleared downstream."""
        if source.expired:
            return
        self._record(wal.EXPIRED, slot)
        source.expired = True
        source.stats.timeouts += 1
        source.sequencer.expire()
        self._clear(slot, source, now)

    def _reannounce(self, slot: int, source: Source, now: float) -> None:
        """The engine is in sync. If it was expired and is in the same epoch, its blocks are announced again."""
        if not source.expired:
            return
        self._record(wal.REANNOUNCED, slot)
        source.expired = False
        self._out.publish_all(slot, source, list(source.normalizer.announce()), now)
        source.announced = len(source.normalizer.index) > 0

    def _clear(self, slot: int, source: Source, now: float) -> None:
        """Clear this source's blocks downstream, if any were announced."""
        if source.announced:
            source.announced = False
            self._out.clear(slot, source, now)
