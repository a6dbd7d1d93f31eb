"""The live state of one output stream, and the seqs under which routers get it.

A state needs seqs. A router that has just subscribed gets the state under the seqs after the newest one. An answer to a
replay has it under seqs up to the newest one. All other routers get an empty batch for each new seq, so the numbering
is dense for every router.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbus.core import write_ahead_log as wal
from kvbus.core.blocks.compaction import ClearsWhere, Part, StateSnapshot
from kvbus.core.blocks.index import Index
from kvbus.core.outgoing import Outgoing
from kvbus.core.outputs.output import Output
from kvbus.core.outputs.state_transfer import JournalTransfer, StateTransfer, Transfer
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.source import Source


class StreamState:
    """The state of one stream.

    The stream is looked up at each use: an output may be replaced while a router reads an answer.

    Args:
        out: the outgoing side of the relay.
        outputs: the relay's outputs.
        do: keeps a record (:mod:`kvbus.core.write_ahead_log`) and has it applied.
        number: the number of the output.
        at: the slot of the stream.
    """

    def __init__(
        self, out: Outgoing, outputs: list[Output], do: Callable[[wal.Record, float], None], number: int, at: int
    ) -> None:
        self._out = out
        self._outputs = outputs
        self._do = do
        self._number = number
        self._at = at

    @property
    def output(self) -> Output:
        """The current output with this number."""
        return self._outputs[self._number]

    @property
    def stream(self) -> OutputStream:
        """The current stream in this slot."""
        return self.output.streams[self._at]

    @property
    def served(self) -> bool:
        """Whether routers can read the stream."""
        streams = self.output.streams
        return self._at < len(streams) and self.output.serves(streams[self._at])

    def transfer(self) -> Transfer | None:
        """Return the state for routers that have just subscribed or have lost batches; None if there is none yet.

        It uses the seqs after the newest one. The seqs between its batches are not cursors
        (:mod:`kvbus.core.outputs.stream`).
        """
        stream = self.stream
        if stream.numbered:
            return JournalTransfer(stream) if stream.next_seq and stream.whole else None
        if not stream.next_seq:
            # readers recognize SGLang by a batch 0 that begins with AllBlocksCleared
            self._publish_empty()
        transfer = StateTransfer(self.newest(), stream.next_seq, stream.topic, stream.publisher_id)
        for _ in range(transfer.first_seq, transfer.end_seq):
            self._publish_empty()
        self.mark_incomplete(transfer.first_seq + 1, transfer.end_seq)
        return transfer

    def newest(self) -> StateSnapshot:
        """Return the state as of the newest batch."""
        snapshot = self._known()
        if snapshot is None or snapshot.seq < self.stream.changed_seq:
            snapshot = self._make()
        return snapshot

    def ending_after(self, start: int) -> StateSnapshot:
        """Return a state that fits into the seqs from ``start`` to its own.

        Publish empty batches if it needs more seqs. A snapshot that a router still reads is used if the journal has
        every batch after it.
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
        """Record that the seqs from ``first`` to ``end`` are not cursors."""
        if first < end:
            self._do(wal.SeqsIncomplete(self._number, self._at, first, end), self._out.now)

    def mark_refused(self, *, refused: bool) -> None:
        """Record whether the stream's routers refuse the newest answer from 0."""
        name = self.output.spec.name
        for _, source in self._out.sources_of(self.output, self._at):
            if refused:
                source.refused_replays.add(name)
            else:
                source.refused_replays.discard(name)

    def _publish_empty(self) -> None:
        self._do(wal.Heartbeat(self._number, self._at, self._out.wall), self._out.now)

    def _known(self) -> StateSnapshot | None:
        snapshot = self.output.snapshots.get(self._at)
        return snapshot if snapshot is not None and snapshot.clears == self._clears() else None

    def _make(self) -> StateSnapshot:
        output, profile = self.output, self.output.spec.profile
        snapshot = output.snapshots[self._at] = StateSnapshot(
            self.stream.next_seq - 1,
            [self._part(output, i, source) for i, source in self._out.sources_of(output, self._at)],
            profile.wire,
            clears=self._clears(),
            one_copy=profile.one_copy,
            max_blocks=output.spec.max_batch_blocks,
        )
        return snapshot

    def _clears(self) -> ClearsWhere:
        """Return where the state has AllBlocksCleared."""
        if self.output.spec.profile.clears == "rank":
            return "each"
        return "none" if self._out.clears_others(self.output, self._at) else "first"

    def _part(self, output: Output, i: int, source: Source) -> Part:
        index = Index() if source.expired else output.index_of(i, source).copy()
        if output.spec.profile.one_group:
            index.keep_group(source.normalizer.first_group)
        return Part(index, output.rank_of(i, source), source.ts, source.normalizer.block_size or 0)
