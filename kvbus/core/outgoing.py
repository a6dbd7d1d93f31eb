"""The relay's outgoing side: batches are numbered and kept on every output's streams, and who asks is answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvbus.core import write_ahead_log as wal
from kvbus.core.blocks.announce import MOST_BLOCKS, blocks_in
from kvbus.core.blocks.compaction import Part, StateSnapshot
from kvbus.core.blocks.index import Index
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, Command, Publish
from kvbus.core.events import ReplayAsked, SnapshotAsked
from kvbus.core.outputs.output import NewStream, Output
from kvbus.core.outputs.replay_answer import ReplayAnswer
from kvbus.core.outputs.snapshot import SnapshotAnswer, parse_snapshot_request
from kvbus.core.source import Source
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.frames import parse_replay_request
from kvbus.core.wire.profiles import CANONICAL, Wire, encode
from kvbus.core.wire.schema import AllBlocksCleared

Asked = TypeVar("Asked")

MAX_BATCH_EVENTS: Final = 1024
"""Events in one outgoing batch; more (a whole cache told again) leave as several."""


class Outgoing:
    """Every output's streams.

    Args:
        sources: the relay's, in their places.
        outputs: the relay's.
        record: keeps what a restart has to do again (:mod:`kvbus.core.write_ahead_log`).
    """

    def __init__(self, sources: list[Source], outputs: list[Output], record: Callable[..., None]) -> None:
        self._sources = sources
        self._outputs = outputs
        self._record = record
        self.wall = 0.0
        """The time of day, for the ``ts`` of batches no engine sent; nothing is decided by it."""
        self.commands: list[Command] = []
        """What the shell has to do."""

    def take_commands(self) -> list[Command]:
        """The commands so far."""
        commands, self.commands = self.commands, []
        return commands

    # -- streams -----------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Routers of a numbering that goes on from a former process are told to clear."""
        for number, output in enumerate(self._outputs):
            for at, stream in output.open_streams.items():
                if not stream.first_seq:
                    continue
                told = enumerate(self._sources) if output.spec.merged else [(at, self._sources[at])]
                for i, source in told:
                    if source.gone:
                        continue
                    self._tell_to_clear(number, at, output.rank_of(i, source), now)

    def welcome(self, i: int, rank: int, streams: Sequence[NewStream], now: float) -> None:
        """Streams for the source that is new in place ``i``; routers who knew another one there are told to clear."""
        for number, (output, new) in enumerate(zip(self._outputs, streams, strict=True)):
            if output.spec.merged:
                continue
            while len(output.streams) < i:
                output.add_stream(None, 0, 0, b"").closed = True
            if len(output.streams) == i:
                output.add_stream(new.topic, rank, new.first_seq, new.publisher_id)
            stream = output.streams[i]
            stream.closed = False
            stream.rank, stream.topic, stream.keeps_topic = rank, new.topic or b"", new.topic is None
            stream.publisher_id = stream.publisher_id or new.publisher_id
            if not stream.next_seq:  # nobody has been here in this process
                stream.next_seq = stream.first_seq = new.first_seq
            if stream.next_seq:
                self._tell_to_clear(number, i, rank, now)

    def close(self, i: int, *, closed: bool) -> None:
        """Whether nobody is in place ``i``."""
        for output in self._outputs:
            if not output.spec.merged:
                output.streams[i].closed = closed
                output.snapshots.pop(i, None)

    def _tell_to_clear(self, number: int, at: int, rank: int, now: float) -> None:
        stream = self._outputs[number].streams[at]
        payload = encode(stream.profile.wire, [AllBlocksCleared()], self.wall, rank)
        seq = stream.append(payload, now)
        self.commands.append(Publish(number, at, stream.topic, seq, payload, 1, stream.publisher_id))

    # -- batches -----------------------------------------------------------------------------------------------------

    def publish_all(self, i: int, source: Source, events: list[AnyEvent], now: float) -> None:
        """Publish in batches no router chokes on, when a whole cache is told again or large blocks are cut."""
        if 0 < len(events) <= MAX_BATCH_EVENTS and blocks_in(events) <= MOST_BLOCKS:
            self.publish(i, source, events, now)
            return
        batch: list[AnyEvent] = []
        blocks = 0
        for event in events:
            count = blocks_in([event])
            if batch and (len(batch) == MAX_BATCH_EVENTS or blocks + count > MOST_BLOCKS):
                self.publish(i, source, batch, now)
                batch, blocks = [], 0
            batch.append(event)
            blocks += count
        if batch:
            self.publish(i, source, batch, now)

    def publish(
        self, i: int, source: Source, events: Sequence[AnyEvent], now: float, whole: bytes | None = None
    ) -> None:
        """Number and keep one batch on every output. ``whole`` says it already, in the canonical encoding."""
        payloads: dict[tuple[Wire, int], bytes] | None = None
        for number, output in enumerate(self._outputs):
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

    def heartbeats(self, now: float) -> None:
        """An empty batch on every stream that has been silent for long enough."""
        for number, output in enumerate(self._outputs):
            for at, stream in enumerate(output.streams):
                if stream.heartbeat_due(now):
                    self._record(wal.HEARTBEAT, number, at, self.wall)
                    self.heartbeat(number, at, now)

    def heartbeat(self, number: int, at: int, now: float) -> None:
        """An empty batch on one stream."""
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
        """Somebody asks for a replay."""
        del now
        request = self._parsed(event, parse_replay_request)
        if request is None:
            return
        stream = self._outputs[event.output].streams[event.stream]
        answer = ReplayAnswer(stream, request, lambda start: self._cut(event.output, event.stream, start))
        self.commands.append(AnswerReplay(event.output, event.stream, answer))

    def snapshot_asked(self, event: SnapshotAsked, now: float) -> None:
        """Somebody asks for a snapshot."""
        del now
        request = self._parsed(event, parse_snapshot_request)
        if request is None:
            return
        stream = self._outputs[event.output].streams[event.stream]
        published = stream.next_seq > stream.first_seq
        answer = SnapshotAnswer(
            request,
            stream.publisher_id,
            (lambda: self._cut(event.output, event.stream, newest=True)) if published else None,
        )
        self.commands.append(AnswerSnapshot(event.output, event.stream, answer))

    def _parsed(
        self, event: ReplayAsked | SnapshotAsked, parse: Callable[[Sequence[bytes]], Asked | None]
    ) -> Asked | None:
        request = parse(event.frames)
        if request is None:
            self._outputs[event.output].stats.replay_requests["malformed"] += 1
        return request

    def _cut(self, number: int, at: int, start: int = 0, *, newest: bool = False) -> StateSnapshot:
        """The live state of a stream as of its newest batch; a recent one if the journal reaches back to it.

        ``newest`` for snapshots, which have no numbers and no journal behind them. For others the state is told in the
        numbers from ``start`` on: where there are too few for it, empty batches make room. Up to the cut these numbers
        are never answered from the journal again: whoever is cut off in the middle of being told, and asks on from
        where it is, would be given changes to a state it does not have.
        """
        output = self._outputs[number]
        stream = output.streams[at]
        cut = output.snapshots.get(at)
        if cut is not None and cut.seq < stream.next_seq - 1:
            first = stream.journal.first_seq
            if newest or first is None or cut.seq + 1 < first:
                cut = None
        if cut is None or not (newest or cut.seq + 1 - start >= cut.fewest):
            cut = output.snapshots[at] = StateSnapshot(
                stream.next_seq - 1, self._parts(output, at), stream.profile.wire
            )
            while not newest and stream.next_seq - start < cut.fewest:
                self._record(wal.HEARTBEAT, number, at, self.wall)
                self.heartbeat(number, at, stream.idle_since or 0.0)
            cut.seq = stream.next_seq - 1
        if not newest and stream.journal.forget_before(cut.seq + 1):
            self._record(wal.JOURNAL_TRIMMED, number, at, cut.seq + 1)
        return cut

    def _parts(self, output: Output, at: int) -> list[Part]:
        sources = enumerate(self._sources) if output.spec.merged else [(at, self._sources[at])]
        return [
            Part(Index() if source.expired else source.normalizer.index.copy(), output.rank_of(i, source), source.ts)
            for i, source in sources
        ]
