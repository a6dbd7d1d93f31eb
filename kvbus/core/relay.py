"""The relay: every source's sequencer and normalizer, every output's streams. Events in, commands out.

Invariants:

* a batch is decoded only when it is the next one of its source;
* an output's seq is dense and never goes back; each number is in the journal before it is sent;
* routers are told (AllBlocksCleared) before anything of a new epoch, or behind a hole, reaches them;
* what a source holds is in its index if and only if the routers of a live source were told so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal
from weakref import WeakValueDictionary

import msgspec

from kvbus.core import codec
from kvbus.core.actions import Ask, Deliver, Lost, NewEpoch, Stop, Synced
from kvbus.core.answer import ReplayAnswer
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, CancelReplay, Command, Publish, RequestReplay
from kvbus.core.compaction import Cut, Part
from kvbus.core.dialect import Sniffer
from kvbus.core.emit import OutEvent
from kvbus.core.encoding import Profile, Wire, encode
from kvbus.core.events import (
    BatchReceived,
    RelayEvent,
    ReplayAsked,
    ReplayReceived,
    SnapshotAsked,
    SourceDown,
    SourceUp,
    Tick,
)
from kvbus.core.frames import Limits, ReplayEnd, parse_live, parse_replay, parse_replay_request
from kvbus.core.index import Index
from kvbus.core.journal import Journal
from kvbus.core.normalize import Normalizer, Rules
from kvbus.core.schema import AllBlocksCleared
from kvbus.core.sequencer import Sequencer, Settings, State
from kvbus.core.snapshot import SnapshotAnswer, parse_snapshot_request
from kvbus.core.stats import OutputStats, SourceStats
from kvbus.core.stream import OutputStream
from kvbus.core.types import Reason

SLICE: Final = 256
"""Batches delivered per event handled: a long catch-up is spread over many, so that the loop stays alive."""

MAX_BATCH_EVENTS: Final = 1024
"""Events in one outgoing batch; more (a whole cache told again) leave as several."""


class SourceSpec(msgspec.Struct, frozen=True):
    """One engine publisher: worker x rank."""

    label: str
    rank: int
    settings: Settings
    rules: Rules
    on_lost: Literal["clear", "keep"] = "clear"
    timeout: float = 30.0


class OutputSpec(msgspec.Struct, frozen=True):
    """One output. ``topics`` has one entry per stream: as many as sources, or one where the layout is merged.

    A topic of None is the source's own. ``first_seqs`` says where each numbering begins, ``publisher_ids`` (16 bytes
    each) puts the snapshot protocol's 24-byte sequence frames on this output.
    """

    name: str
    profile: Profile
    topics: Sequence[bytes | None]
    merged: bool = False
    heartbeat: float = 1.0
    journal_batches: int = 10_000
    journal_bytes: int = 256 * 1024 * 1024
    first_seqs: Sequence[int] = ()
    publisher_ids: Sequence[bytes] = ()


class Source:
    """What the relay knows of one publisher."""

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec
        self.stats = SourceStats()
        self.sequencer = Sequencer(spec.settings, self.stats)
        self.normalizer = Normalizer(spec.rules, self.stats)
        self.rank = spec.rank
        self.ts = 0.0
        self.topic = b""
        self.dialect = Sniffer()
        self.publisher_id: bytes | None = None
        self.down_since: float | None = None
        self.told = False
        """Routers have been told of at least one block that nothing has cleared since."""
        self.withdrawn = False
        """Routers were told that nothing is there while the index is kept, in case the engine comes back."""

    @property
    def state(self) -> State:
        """As ``/sources`` shows it."""
        return self.sequencer.state

    @property
    def partial(self) -> bool:
        """Whether the engine may hold blocks that cannot be known: trimmed history, lost batches, a full index."""
        return self.sequencer.partial or self.normalizer.full


class Output:
    """One output's streams."""

    def __init__(self, spec: OutputSpec, ranks: Sequence[int]) -> None:
        self.spec = spec
        self.stats = OutputStats()
        self.streams = [
            OutputStream(
                topic,
                spec.profile,
                Journal(spec.journal_batches, spec.journal_bytes),
                heartbeat=spec.heartbeat,
                rank=0 if spec.merged else ranks[i],
                publisher_id=spec.publisher_ids[i] if spec.publisher_ids else b"",
                first_seq=spec.first_seqs[i] if spec.first_seqs else 0,
            )
            for i, topic in enumerate(spec.topics)
        ]

        self.cuts: WeakValueDictionary[int, Cut] = WeakValueDictionary()
        """The newest cut of each stream, for as long as an answer holds it."""

    def stream_of(self, source: int) -> int:
        """Which stream a source's batches go to."""
        return 0 if self.spec.merged else source

    def rank_of(self, i: int, source: Source) -> int:
        """The rank in a batch: the engine's own; on a merged stream the source's place, which is unique there."""
        return i if self.spec.merged else source.rank


class Relay:
    """The pure core. Call :meth:`handle` for everything that happens and carry out what it returns, in order."""

    def __init__(
        self, sources: Sequence[SourceSpec], outputs: Sequence[OutputSpec], limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits()
        self.sources = [Source(spec) for spec in sources]
        ranks = [spec.rank for spec in sources]
        self.outputs = [Output(spec, ranks) for spec in outputs]
        self.backlog = False
        """Work was put off to keep the loop alive: send a :class:`~kvbus.core.events.Tick` soon."""
        self._wall = 0.0
        self._commands: list[Command] = []
        self._handlers: dict[type, Callable[..., None]] = {
            BatchReceived: self._batch,
            ReplayReceived: self._replayed,
            SourceUp: self._up,
            SourceDown: self._down,
            ReplayAsked: self._asked,
            SnapshotAsked: self._snapshot_asked,
            Tick: self._tick,
        }

    def handle(self, event: RelayEvent, now: float) -> list[Command]:
        """Take in one event at ``now`` (seconds, monotonic); what is to be done."""
        self._handlers[type(event)](event, now)
        commands, self._commands = self._commands, []
        return commands

    def begin(self, now: float, wall: float = 0.0) -> list[Command]:
        """Before anything else: routers of a numbering that goes on from a former process are told to clear."""
        self._wall = wall
        for number, output in enumerate(self.outputs):
            for at, stream in enumerate(output.streams):
                if not stream.first_seq:
                    continue
                told = enumerate(self.sources) if output.spec.merged else [(at, self.sources[at])]
                for i, source in told:
                    payload = encode(stream.profile.wire, [AllBlocksCleared()], self._wall, output.rank_of(i, source))
                    seq = stream.append(payload, now)
                    self._commands.append(Publish(number, at, stream.topic, seq, payload, 1, stream.publisher_id))
        commands, self._commands = self._commands, []
        return commands

    # -- sources ---------------------------------------------------------------------------------------------------

    def _batch(self, event: BatchReceived, now: float) -> None:
        source = self.sources[event.source]
        message = parse_live(event.frames, self.limits)
        stats = source.stats
        stats.batches += 1
        if isinstance(message, Reason):
            stats.rejected[message] += 1
            return
        stats.bytes += len(message.payload)
        source.topic = message.topic
        if message.publisher_id != source.publisher_id:
            if source.publisher_id is not None and message.publisher_id is not None:
                source.sequencer.another_life(now)
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
            source.sequencer.replayed(event.request, message.seq, message.payload, now)
        self._run(event.source, source, now)

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
        self._wall = max(self._wall, event.wall)
        for i, source in enumerate(self.sources):
            source.sequencer.tick(now)
            self._run(i, source, now)
            if source.down_since is not None and now - source.down_since >= source.spec.timeout:
                self._withdraw(i, source, now)
        self._heartbeats(now)

    def _run(self, i: int, source: Source, now: float) -> None:
        """Carry out what the sequencer decided, a slice at a time."""
        actions = source.sequencer.actions
        for _ in range(min(len(actions), SLICE)):
            action = actions.popleft()
            if isinstance(action, Deliver):
                self._deliver(i, source, action, now)
            elif isinstance(action, Ask):
                self._commands.append(RequestReplay(i, action.request, action.start))
            elif isinstance(action, Stop):
                self._commands.append(CancelReplay(i, action.request))
            elif isinstance(action, NewEpoch):
                self._clear(i, source, now)
                source.normalizer.reset()
            elif isinstance(action, Lost):
                if source.spec.on_lost == "clear":
                    self._clear(i, source, now)
                    source.normalizer.reset()
            elif isinstance(action, Synced):
                self._restore(i, source, now)
        if actions:
            self.backlog = True

    def _deliver(self, i: int, source: Source, action: Deliver, now: float) -> None:
        batch = codec.decode_batch(action.payload, self.limits.max_events)
        if isinstance(batch, Reason):
            source.stats.rejected[batch] += 1
            return
        source.stats.last_batch = batch.ts
        source.ts = batch.ts
        if batch.rank is not None:
            source.rank = batch.rank
        source.dialect.see(action.payload)
        events = source.normalizer.apply(batch, first_of_life=action.seq == 0)
        if source.withdrawn:
            return
        if events:
            source.told = True
            self._publish_all(i, source, events, now)

    def _withdraw(self, i: int, source: Source, now: float) -> None:
        """The engine is gone for too long: to the routers its blocks are, too."""
        if source.withdrawn:
            return
        source.withdrawn = True
        source.stats.timeouts += 1
        source.sequencer.lose()
        self._clear(i, source, now)

    def _restore(self, i: int, source: Source, now: float) -> None:
        """The engine is in sync; one that was withdrawn and is still in the same life has its blocks told again."""
        if not source.withdrawn:
            return
        source.withdrawn = False
        self._publish_all(i, source, list(source.normalizer.announce()), now)
        source.told = len(source.normalizer.index) > 0

    def _clear(self, i: int, source: Source, now: float) -> None:
        """Tell the routers that nothing of this source is there any more, if they were ever told of anything."""
        if source.told:
            source.told = False
            self._publish(i, source, [AllBlocksCleared()], now)

    # -- outputs ---------------------------------------------------------------------------------------------------

    def _publish_all(self, i: int, source: Source, events: list[OutEvent], now: float) -> None:
        """Publish in batches no router chokes on, when a whole cache is told again."""
        for at in range(0, len(events), MAX_BATCH_EVENTS):
            self._publish(i, source, events[at : at + MAX_BATCH_EVENTS], now)

    def _publish(self, i: int, source: Source, events: list[OutEvent], now: float) -> None:
        payloads: dict[tuple[Wire, int], bytes] = {}
        for number, output in enumerate(self.outputs):
            at = output.stream_of(i)
            stream = output.streams[at]
            key = (stream.profile.wire, output.rank_of(i, source))
            payload = payloads.get(key)
            if payload is None:
                payload = payloads[key] = encode(key[0], events, source.ts, key[1])
            seq = stream.append(payload, now)
            if stream.keeps_topic:
                stream.topic = source.topic
            self._commands.append(Publish(number, at, stream.topic, seq, payload, len(events), stream.publisher_id))

    def _heartbeats(self, now: float) -> None:
        for number, output in enumerate(self.outputs):
            for at, stream in enumerate(output.streams):
                if not stream.heartbeat_due(now):
                    continue
                source = self.sources[0 if output.spec.merged else at]
                rank = output.rank_of(at, source)
                payload = encode(stream.profile.wire, [], max(self._wall, source.ts), rank)
                seq = stream.append(payload, now, empty=True)
                output.stats.heartbeats += 1
                self._commands.append(Publish(number, at, stream.topic, seq, payload, 0, stream.publisher_id))

    def _asked(self, event: ReplayAsked, now: float) -> None:
        del now
        output = self.outputs[event.output]
        request = parse_replay_request(event.frames)
        if request is None:
            output.stats.replay_requests["malformed"] += 1
            return
        stream = output.streams[event.stream]
        answer = ReplayAnswer(stream, request, lambda: self._cut(output, event.stream))
        self._commands.append(AnswerReplay(event.output, event.stream, answer))

    def _snapshot_asked(self, event: SnapshotAsked, now: float) -> None:
        del now
        output = self.outputs[event.output]
        request = parse_snapshot_request(event.frames)
        if request is None:
            output.stats.replay_requests["malformed"] += 1
            return
        stream = output.streams[event.stream]
        published = stream.next_seq > stream.first_seq
        answer = SnapshotAnswer(
            request, stream.publisher_id, (lambda: self._cut(output, event.stream)) if published else None
        )
        self._commands.append(AnswerSnapshot(event.output, event.stream, answer))

    def _cut(self, output: Output, at: int) -> Cut:
        """The live state of a stream as of its newest batch; a recent one if the journal reaches back to it."""
        stream = output.streams[at]
        cut = output.cuts.get(at)
        first = stream.journal.first_seq
        if cut is None or (cut.seq < stream.next_seq - 1 and (first is None or cut.seq + 1 < first)):
            told = enumerate(self.sources) if output.spec.merged else [(at, self.sources[at])]
            parts = [
                Part(
                    Index() if source.withdrawn else source.normalizer.index.copy(),
                    output.rank_of(i, source),
                    source.ts,
                )
                for i, source in told
            ]
            cut = output.cuts[at] = Cut(stream.next_seq - 1, parts, stream.profile.wire)
        return cut
