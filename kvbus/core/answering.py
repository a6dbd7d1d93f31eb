"""Answers to requests of routers (replays and snapshots), and states for routers that subscribed or lost batches.

A *state* is the live blocks of a stream, as batches. An answer is a generator of messages. It reads the journal and the
state only when the router can receive the next message. So kvbus stores no messages for a router that does not read,
except the state that it is sending to this router.

The batches of a state need seqs. For a router that has just subscribed, they are the seqs after the stream's newest
one. In the answer to a replay request, they are seqs up to the stream's newest one. If the state needs new seqs, all
other routers get an empty batch for each of them. So no router sees a hole in the numbering.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final, TypeVar

from kvbus.core import write_ahead_log as wal
from kvbus.core.blocks.compaction import ClearsWhere, Part, StateSnapshot
from kvbus.core.blocks.index import Index
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, SendState
from kvbus.core.events import ReplayAsked, SnapshotAsked, Subscribed
from kvbus.core.outgoing import Outgoing
from kvbus.core.outputs.output import Output
from kvbus.core.outputs.snapshot import (
    FRAME_BYTES,
    NOTHING_YET,
    UNAVAILABLE,
    SnapshotRequest,
    Unfinished,
    parse_snapshot_request,
    snapshot_head,
)
from kvbus.core.outputs.stream import JournalTransfer, OutputStream, StateTransfer, Transfer
from kvbus.core.source import Source
from kvbus.core.wire.frames import SEQ_BYTES, ReplayRequest, parse_replay_request, replay_data, replay_end
from kvbus.core.wire.profiles import encode

Request = TypeVar("Request", ReplayRequest, SnapshotRequest)

MAX_FILLER: Final = 1_000_000
"""Maximum number of empty batches in one replay answer.

Empty batches fill the seqs between the state and the journal's batches. Routers would time out if kvbus sent more.
"""

_ROOM: Final = 2**62
"""Number of available seqs that kvbus assumes when it divides a state into the batches of a snapshot reply.

These batches have no seqs. So the number is higher than any state needs, and does not limit the number of batches.
"""


class StreamState:
    """The state (live blocks) of one output stream, from which answers to routers are made.

    The stream is looked up at each use, because an output may be replaced while a router reads an answer.

    Args:
        out: the outgoing side of the relay.
        outputs: the relay's outputs.
        do: function that keeps a record for the write-ahead log (:mod:`kvbus.core.write_ahead_log`) and applies it.
        output_id: position of the output in ``outputs``.
        stream_slot: slot of the stream in the output.
    """

    def __init__(
        self,
        out: Outgoing,
        outputs: list[Output],
        do: Callable[[wal.Record, float], None],
        output_id: int,
        stream_slot: int,
    ) -> None:
        self._out = out
        self._outputs = outputs
        self._do = do
        self._output_id = output_id
        self._stream_slot = stream_slot

    @property
    def output(self) -> Output:
        """The output at position ``output_id`` of the relay's outputs, for which this object was created.

        It changes when the output is replaced.
        """
        return self._outputs[self._output_id]

    @property
    def stream(self) -> OutputStream:
        """The output's stream in the slot for which this object was created.

        It changes when the output is replaced.
        """
        return self.output.streams[self._stream_slot]

    @property
    def served(self) -> bool:
        """Whether the stream exists and routers can read it."""
        streams = self.output.streams
        return self._stream_slot < len(streams) and self.output.serves(streams[self._stream_slot])

    def transfer(self) -> Transfer | None:
        """Prepare the transfer of the state to routers that have just subscribed or lost batches.

        Return None if there is no state yet. The state's batches have the seqs after the stream's newest one. A router
        that has received only some of them cannot continue by a replay from the next seq, so these seqs are marked
        (:meth:`mark_incomplete`).
        """
        stream = self.stream
        if stream.numbered:
            return JournalTransfer(stream) if stream.next_seq and stream.holds_state else None
        if not stream.next_seq:
            # routers recognize SGLang by a batch 0 that begins with AllBlocksCleared, so batch 0 must not begin a state
            self._publish_empty()
        transfer = StateTransfer(self.newest(), stream.next_seq, stream.topic, stream.publisher_id)
        for _ in range(transfer.first_seq, transfer.end_seq):
            self._publish_empty()
        self.mark_incomplete(transfer.first_seq + 1, transfer.end_seq)
        return transfer

    def newest(self) -> StateSnapshot:
        """Return the state as of the stream's newest batch.

        All routers that request the state share one snapshot until the live blocks change.
        """
        snapshot = self._known()
        if snapshot is None or snapshot.seq < self.stream.changed_seq:
            snapshot = self._make()
        return snapshot

    def ending_after(self, start: int) -> StateSnapshot:
        """Return a snapshot for an answer that begins at the seq ``start``. Its batches end at the snapshot's own seq.

        Use the snapshot that other routers are reading if the journal has every batch after it, and if its batches fit
        between ``start`` and its seq. Otherwise take a new one. If the batches of the new snapshot do not fit between
        ``start`` and the stream's newest seq, publish empty batches first, until they do.
        """
        stream = self.stream
        snapshot = self._known()
        if snapshot is not None and snapshot.seq < stream.next_seq - 1:
            first = stream.journal.first_seq
            if first is None or snapshot.seq + 1 < first:
                snapshot = None
        if snapshot is None or snapshot.seq + 1 - start < snapshot.fewest:
            snapshot = self._make()
            while stream.next_seq - start < snapshot.fewest:
                self._publish_empty()
            snapshot.seq = stream.next_seq - 1
        return snapshot

    def mark_incomplete(self, first: int, end: int) -> None:
        """Mark the seqs ``[first, end)`` as incomplete.

        A router that has read up to one of these seqs may hold only a part of a state. So a replay that begins at one
        of them begins with the complete state, not with the journal's batches.
        """
        if first < end:
            self._do(wal.SeqsIncomplete(self._output_id, self._stream_slot, first, end), self._out.now)

    def mark_refused(self, *, refused: bool) -> None:
        """Record, for each source of the stream, whether routers refuse the newest answer to a replay from seq 0.

        A finding shows the record to the operator.
        """
        name = self.output.spec.name
        for _, source in self._out.sources_of(self.output, self._stream_slot):
            if refused:
                source.refused_replays.add(name)
            else:
                source.refused_replays.discard(name)

    def _publish_empty(self) -> None:
        self._out.publish_empty(self._output_id, self._stream_slot, self._out.now)

    def _known(self) -> StateSnapshot | None:
        snapshot = self.output.snapshots.get(self._stream_slot)
        return snapshot if snapshot is not None and snapshot.clears == self._clears() else None

    def _make(self) -> StateSnapshot:
        output, profile = self.output, self.output.spec.profile
        snapshot = output.snapshots[self._stream_slot] = StateSnapshot(
            self.stream.next_seq - 1,
            [
                part
                for source_slot, source in self._out.sources_of(output, self._stream_slot)
                for part in self._parts(output, source_slot, source)
            ],
            profile.wire,
            clears=self._clears(),
            one_copy=profile.one_copy,
            max_blocks=output.spec.max_batch_blocks,
        )
        return snapshot

    def _clears(self) -> ClearsWhere:
        """Return where a state contains AllBlocksCleared.

        "each" is before the blocks of each source, "first" is before the first block, and "none" is nowhere.
        """
        if self.output.spec.profile.clears == "rank":
            return "each"
        return "none" if self._out.clears_others(self.output, self._stream_slot) else "first"

    def _parts(self, output: Output, source_slot: int, source: Source) -> list[Part]:
        """Return the part of a state with the source's blocks, after an empty part for each earlier rank of the source.

        An empty part clears the blocks that a router may still hold under that rank.
        """
        residencies = output.spec.profile.residencies
        index = Index() if source.expired else output.index_of(source_slot, source).copy(residencies)
        if output.spec.profile.one_group:
            index.keep_group(source.normalizer.first_group)
        parts = [Part(index, output.rank_of(source_slot, source), source.ts, source.normalizer.block_size or 0)]
        for rank in () if output.merged else source.ranks_announced:
            if rank != source.rank:
                parts.insert(0, Part(Index(), rank, source.ts))
        return parts


class ReplayAnswer:
    """The answer to a router's replay request; an :class:`~kvbus.core.commands.Answer`.

    If the journal holds the batch with the requested seq ``start``, and the router has the complete state there
    (:meth:`_is_complete_before`), the answer consists of the journal's batches. Otherwise it begins with a snapshot
    (AllBlocksCleared and the live blocks), and the journal's batches follow. The output's profile decides which seqs
    the snapshot's batches get:

    *The snapshot's own seqs*. The last of them is the newest seq at the time of the snapshot. The answer then begins
    later than ``start``. This is used for every ``start`` if the profile does not need a contiguous answer, and for
    start 0 if the requester accepts an answer that begins late. The length of the answer does not depend on the length
    of the stream.

    *The seqs from ``start`` on*, with empty batches between the live blocks and the journal. This is used for all other
    requests. The length of the answer depends on the number of batches that the router missed. If more than
    ``MAX_FILLER`` empty batches were needed, the snapshot gets its own seqs.

    The answer consists of END alone if ``start`` is after the newest batch. A subscribed router that refuses an answer
    that begins late (llm-d) gets END alone in two more cases: instead of a state from 0, which it gets on its live
    connection (:attr:`repeats_state`), and instead of more than ``MAX_FILLER`` empty batches. In the second case it
    drops its blocks, and later requests a replay from 0.

    The last batch of an answer is the stream's newest batch when the answer began, or when its snapshot was sent. Later
    batches are on the live stream. If the journal drops a batch before a slow requester could receive it, a newer
    snapshot replaces that batch.

    The outcome, for metrics, is ``subscription`` for END in place of a state, ``compacted`` for an answer with a
    snapshot, ``late`` for an answer that begins later than requested, ``malformed`` for a request that cannot be
    parsed, and otherwise ``complete``.

    Args:
        state: the state of the stream that the router reads.
        request: the router's request.
        gets_states: whether the requester may be a subscribed router that gets states on its live connection.
        alone: whether no other subscribed router has the requester's address and key.
        rebuilds: whether the requester is another kvbus. It rebuilds its blocks from the answer, and accepts an answer
            that begins later than requested.
    """

    def __init__(
        self,
        state: StreamState,
        request: ReplayRequest,
        *,
        gets_states: bool = False,
        alone: bool = True,
        rebuilds: bool = False,
    ) -> None:
        self.envelope = request.envelope
        self.outcome = "complete" if request.well_formed else "malformed"
        self.finished = False
        self.state = state
        self._request = request
        stream = state.stream
        self._framing = stream.profile.framing
        self._takes_late = stream.profile.late_replay or rebuilds
        self._refuses_late = request.start == 0 and not self._takes_late
        # kvbus cannot repeat a state that it reads from a log, because its batches keep the log's numbers
        self._gets_states = gets_states and not self._takes_late and not stream.numbered
        self._end = stream.next_seq
        """The seq after the last batch of the answer."""
        length = 0 if stream.journal.find(0) is not None else self._end
        self.repeats_state = self._gets_states and request.start == 0 and length > (0 if alone else MAX_FILLER)
        """Whether END is the answer to a request from 0, and the router gets the state on its live connection.

        llm-d accepts this answer, and then the next live batch, whatever the batch's seq. That batch need not be the
        first one of a state. So a router that has its state already must get the state again. If several routers have
        the requester's address, each of them gets the state again, because kvbus cannot tell which one asks. To avoid
        that, an answer with empty batches is preferred while it is possible.
        """

    def messages(self) -> Iterator[list[bytes]]:
        """Yield the messages of the answer, and END as the last one.

        Yield ``[]`` while the next batch is being built, so that the caller can do other work.
        """
        yield from self._state_alone() if self._request.state else self._batches()
        self.finished = True
        yield self.refusal()

    def refusal(self) -> list[bytes]:
        """Return END without any batch, the answer to a request that kvbus refuses.

        So the requester need not wait until its timeout.
        """
        return replay_end(self._framing, self.envelope)

    def _batches(self) -> Iterator[list[bytes]]:
        """Yield the answer's batches, from the requested seq to the newest one.

        They come from the journal. If the journal lacks a batch, the answer has the current state in place of that
        batch and all batches before it.
        """
        state, seq = self.state, self._request.start
        begun = False
        # Keep a reference to the snapshot until this answer has sent the journal's batches after it. Until then, other
        # requesters can use the same snapshot.
        snapshot: StateSnapshot | None = None
        if self._refuses_late:
            state.mark_refused(refused=False)
        while seq < self._end:
            stream = state.stream
            entry = stream.journal.find(seq) if begun or self._is_complete_before(seq) else None
            if entry is not None:
                begun = True
                yield self._message(stream.topic, seq, stream.publisher_id, entry.payload)
                seq += 1
                continue
            snapshot = None if self.repeats_state else (yield from self._state_at(seq, begun=begun))
            if snapshot is None:
                self.outcome = "subscription"
                return
            begun, seq = True, snapshot.seq + 1
            if seq < self._end:
                self._end = state.stream.next_seq

    def _is_complete_before(self, seq: int) -> bool:
        """Return whether a router that requests a replay from ``seq`` has the complete state before this seq.

        If so, the journal's batches from ``seq`` on are enough. llm-d counts seqs from any live batch on
        (:attr:`repeats_state`), so its seq does not say what it has.
        """
        return seq == 0 or not (self._gets_states or seq in self.state.stream.incomplete)

    def _state_at(self, first: int, *, begun: bool) -> Generator[list[bytes], None, StateSnapshot | None]:
        """Yield the batches of a state under the seqs from ``first`` on, and then empty batches up to the state's seq.

        The state's seq is the newest seq of the stream at the time of the snapshot. If too many empty batches were
        needed, the answer begins later than ``first``. How many are too many depends on ``begun``, which says whether
        batches of the answer were already sent (:meth:`_begins_late`). Return the snapshot that holds the state, or
        None if the answer must end here, because the router would refuse an answer that begins late.
        """
        state, stream = self.state, self.state.stream
        snapshot = state.ending_after(first)  # this call may publish empty batches, which change the stream's next_seq
        end = snapshot.seq + 1
        chunks = snapshot.chunks(end - first)
        if self._begins_late(first, end - first - chunks.count, begun=begun):
            if self._gets_states:
                return None
            first = end - chunks.count
        # The answer may break off between two batches of the state. The requester then holds only part of the state, so
        # its next request must get the complete state, not the journal's batches from the requested seq on.
        state.mark_incomplete(first + 1, end)
        topic, publisher_id = stream.topic, stream.publisher_id
        empty = encode(stream.wire, [], 0.0, stream.rank)
        reader = chunks.reader()
        for seq in range(first, end):
            while (payload := reader.next_payload()) == b"":
                yield []
            yield self._message(topic, seq, publisher_id, empty if payload is None else payload)
        return snapshot

    def _begins_late(self, first: int, filler: int, *, begun: bool) -> bool:
        """Decide whether the answer begins late, that is, at a later seq than the requester needs. Set :attr:`outcome`.

        If the answer does not begin late, the batches of the state have the seqs from ``first`` on. Empty batches with
        the following seqs then fill the answer up to the seq of the snapshot.

        Args:
            first: the seq that the requester needs next.
            filler: number of empty batches that such an answer needs.
            begun: whether batches of the answer were already sent.

        Returns:
            True if the answer begins late. The state then has the seqs that end at the newest seq at the time of the
            snapshot, and the answer has no empty batches.
        """
        own_seqs = not begun and (not self.state.stream.profile.filled_replay or (first == 0 and self._takes_late))
        if filler <= (0 if own_seqs else MAX_FILLER):
            self.outcome = "late" if self.outcome == "late" else "compacted"
            return False
        self.outcome = "late"
        if self._refuses_late and not begun:
            self.state.mark_refused(refused=True)
        return True

    def _state_alone(self) -> Iterator[list[bytes]]:
        """Yield the batches of the state, without the journal's batches.

        Each of them has the seq of the next live batch, as vllm#50134 proposes.
        """
        stream, snapshot = self.state.stream, self.state.newest()
        self.outcome = "compacted"
        topic, seq, publisher_id = stream.topic, stream.next_seq, stream.publisher_id
        reader = snapshot.chunks(snapshot.fewest).reader()
        while (payload := reader.next_payload()) is not None:
            yield self._message(topic, seq, publisher_id, payload) if payload else []

    def _message(self, topic: bytes, seq: int, publisher_id: bytes, payload: bytes) -> list[bytes]:
        frame = seq.to_bytes(SEQ_BYTES, "big") + publisher_id
        return replay_data(self._framing, self.envelope, topic, frame, payload)


class SnapshotAnswer:
    """The answer to a router's snapshot request: one message with the state of a stream.

    It is an :class:`~kvbus.core.commands.Answer`. A state may be large, so kvbus builds and sends the message frame by
    frame. All requesters share the state, and kvbus never stores a complete message for a requester that does not read.
    """

    def __init__(self, state: StreamState, request: SnapshotRequest) -> None:
        self.envelope = request.envelope
        self.outcome = "compacted" if request.valid else "malformed"
        self.finished = False
        self.state = state
        self._valid = request.valid
        self._published = state.stream.next_seq > state.stream.first_seq
        self._publisher_id = state.stream.publisher_id

    def messages(self) -> Iterator[list[bytes]]:
        """Yield the message in parts. Each part except the last one is an :class:`Unfinished`.

        Yield ``[]`` while the next part is being built, so that the caller can do other work.
        """
        if not self._valid or not self._published:
            self.finished = True
            yield self._head(NOTHING_YET if self._valid else UNAVAILABLE)
            return
        # The newest seq is right even if the state was taken at an earlier seq. newest() takes a new state after each
        # change of the live blocks, so all batches after the state's seq are empty.
        seq, snapshot = self.state.stream.next_seq - 1, self.state.newest()
        chunks = snapshot.chunks(_ROOM, FRAME_BYTES)
        reader, left = chunks.reader(), chunks.count
        self.finished = not left
        yield Unfinished(self._head(seq)) if left else self._head(seq)
        while left:
            payload = reader.next_payload()
            if payload is None:
                raise LookupError(f"the state lacks {left} of the batches that the reply has to contain")
            if payload:
                left -= 1
                self.finished = not left
                piece = [self.envelope[0], payload]
                yield Unfinished(piece) if left else piece
            else:
                yield []

    def refusal(self) -> list[bytes]:
        """Return the snapshot reply which says that kvbus can send no snapshot now."""
        return self._head(UNAVAILABLE)

    def _head(self, seq: int) -> list[bytes]:
        return [*self.envelope, *snapshot_head(seq, self._publisher_id)]


class RouterRequests:
    """The handlers of requests from routers of all outputs. Each handler adds a command to the relay's commands.

    The command makes the daemon send the answer.

    Args:
        out: the outgoing side of the relay. It has the streams, and collects the commands.
        outputs: the outputs of the relay.
        do: function that keeps a record for the write-ahead log (:mod:`kvbus.core.write_ahead_log`) and applies it.
    """

    def __init__(self, out: Outgoing, outputs: list[Output], do: Callable[[wal.Record, float], None]) -> None:
        self._out = out
        self._outputs = outputs
        self._do = do

    def _state_of(self, output_id: int, stream_slot: int) -> StreamState:
        return StreamState(self._out, self._outputs, self._do, output_id, stream_slot)

    def asked_replay(self, event: ReplayAsked, now: float) -> None:
        """Start the answer to a router's replay request."""
        del now
        request = self._parsed(event, parse_replay_request)
        if request is not None:
            state = self._state_of(event.output, event.stream)
            answer = ReplayAnswer(
                state, request, gets_states=bool(event.routers), alone=event.alone, rebuilds=event.rebuilds
            )
            again = event.routers if answer.repeats_state else ()
            self._out.commands.append(AnswerReplay(event.output, event.stream, answer, again))

    def asked_snapshot(self, event: SnapshotAsked, now: float) -> None:
        """Start the answer to a router's snapshot request."""
        del now
        request = self._parsed(event, parse_snapshot_request)
        if request is not None:
            answer = SnapshotAnswer(self._state_of(event.output, event.stream), request)
            self._out.commands.append(AnswerSnapshot(event.output, event.stream, answer))

    def _parsed(
        self, event: ReplayAsked | SnapshotAsked, parse: Callable[[Sequence[bytes]], Request | None]
    ) -> Request | None:
        request = parse(event.frames)
        if request is None:
            self._outputs[event.output].stats.malformed += 1
        return request

    def subscribed(self, event: Subscribed, now: float) -> None:
        """Command the daemon to send the stream's state to routers that need it, if the stream has a state.

        If it has none yet, do nothing: the daemon reports the same routers again later.
        """
        del now
        state = self._state_of(event.output, event.stream)
        transfer = state.transfer() if state.served else None
        if transfer is not None:
            self._out.commands.append(SendState(event.output, event.stream, event.routers, transfer))
