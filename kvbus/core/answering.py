"""What routers ask for: replays, snapshots, and the state that a subscription or a loss calls for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvbus.core import write_ahead_log as wal
from kvbus.core.blocks.compaction import ClearsWhere, Part, StateSnapshot
from kvbus.core.blocks.index import Index
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, SendPart, SendState
from kvbus.core.events import AnswerPulled, ReplayAsked, SnapshotAsked, Subscribed
from kvbus.core.outgoing import Outgoing
from kvbus.core.outputs import replay_answer
from kvbus.core.outputs.output import Output
from kvbus.core.outputs.snapshot import SnapshotAnswer, SnapshotPart, parse_snapshot_request, reply
from kvbus.core.outputs.state_transfer import JournalTransfer, StateTransfer
from kvbus.core.source import Source
from kvbus.core.wire.frames import parse_replay_request

Asked = TypeVar("Asked")


class Answering:
    """Answers the routers of every output.

    Args:
        out: the outgoing side, whose streams they read.
        outputs: the relay's.
        do: keeps a record (:mod:`kvbus.core.write_ahead_log`) and has it applied.
    """

    def __init__(self, out: Outgoing, outputs: list[Output], do: Callable[[wal.Record, float], None]) -> None:
        self._out = out
        self._outputs = outputs
        self._do = do

    # -- answers -----------------------------------------------------------------------------------------------------

    def asked(self, event: ReplayAsked, now: float) -> None:
        """A router asks for a replay."""
        del now
        request = self._parsed(event, parse_replay_request)
        if request is not None:
            stream = self._outputs[event.output].streams[event.stream]
            answer = replay_answer.begin(stream, request, has_state=event.has_state, rebuilds=event.rebuilds)
            self._out.commands.append(AnswerReplay(event.output, event.stream, answer))

    def snapshot_asked(self, event: SnapshotAsked, now: float) -> None:
        """A router asks for a snapshot."""
        del now
        stream = self._outputs[event.output].streams[event.stream]
        request = self._parsed(event, parse_snapshot_request)
        if request is None:
            return
        published = stream.next_seq > stream.first_seq
        answer = SnapshotAnswer(request.envelope, stream.publisher_id, request.valid, published)
        self._out.commands.append(AnswerSnapshot(event.output, event.stream, answer))

    def pulled(self, event: AnswerPulled, now: float) -> None:
        """A router can take more of its answer."""
        number, at, answer = event.output, event.stream, event.answer
        part: replay_answer.Part | SnapshotPart
        stream = self._outputs[number].streams[at]
        if isinstance(answer, SnapshotAnswer):
            part = reply(answer, stream.next_seq - 1, lambda: self._newest_snapshot(number, at))
        elif answer.state:
            part = replay_answer.whole(answer, stream, self._newest_snapshot(number, at))
        else:
            part = replay_answer.next_part(answer, stream, lambda start: self._snapshot_from(number, at, start, now))
            if isinstance(part, replay_answer.StatePart):
                # up to the snapshot's seq the requester's set is not that of the journal at the same seq
                self._incomplete(number, at, part.first + 1, part.end, now)
            if answer.seq == 0 and not answer.takes_late:
                self._see_refused(self._outputs[number], at, refused=part.answer.outcome == "late")
        self._out.commands.append(SendPart(number, at, part))

    def _see_refused(self, output: Output, at: int, *, refused: bool) -> None:
        """Note whether the stream's routers refuse the newest answer from 0."""
        for _, source in self._out.sources_of(output, at):
            if refused:
                source.refused_replays.add(output.spec.name)
            else:
                source.refused_replays.discard(output.spec.name)

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
        if stream.numbered:
            if stream.next_seq and stream.whole:  # else there is no state yet, and they ask again
                self._out.commands.append(SendState(number, at, event.routers, JournalTransfer(stream)))
            return
        if not stream.next_seq:
            # a batch 0 that begins with AllBlocksCleared is how readers recognize SGLang
            self._publish_empty(number, at, now)
        snapshot = self._newest_snapshot(number, at)
        transfer = StateTransfer(snapshot, stream.next_seq, stream.topic, stream.publisher_id)
        for _ in range(transfer.first_seq, transfer.end_seq):
            self._publish_empty(number, at, now)
        self._incomplete(number, at, transfer.first_seq + 1, transfer.end_seq, now)
        self._out.commands.append(SendState(number, at, event.routers, transfer))

    def _publish_empty(self, number: int, at: int, now: float) -> None:
        self._do(wal.Heartbeat(number, at, self._out.wall), now)

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

    def _known_snapshot(self, output: Output, at: int) -> StateSnapshot | None:
        snapshot = output.snapshots.get(at)
        return snapshot if snapshot is not None and snapshot.clears == self._clears(output, at) else None

    def _snapshot_of(self, output: Output, at: int) -> StateSnapshot:
        profile = output.spec.profile
        return StateSnapshot(
            output.streams[at].next_seq - 1,
            [self._part(output, i, source) for i, source in self._out.sources_of(output, at)],
            profile.wire,
            clears=self._clears(output, at),
            one_copy=profile.one_copy,
            max_blocks=output.spec.max_batch_blocks,
        )

    def _clears(self, output: Output, at: int) -> ClearsWhere:
        """Where a state of this stream has AllBlocksCleared."""
        if output.spec.profile.clears == "rank":
            return "each"
        return "none" if self._out.clears_others(output, at) else "first"

    def _part(self, output: Output, i: int, source: Source) -> Part:
        index = Index() if source.expired else output.index_of(i, source).copy()
        if output.spec.profile.one_group:
            index.keep_group(source.normalizer.first_group)
        return Part(index, output.rank_of(i, source), source.ts, source.normalizer.block_size or 0)
