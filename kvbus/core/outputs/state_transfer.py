"""The state of one stream for routers that have just subscribed, or that lost batches: sent to them and nobody else.

The batches of a transfer have the seqs that follow the stream's newest one. Everybody else gets an empty batch for each
of these seqs, so that the numbering is dense for all. AllBlocksCleared comes first: a router may hold blocks that are
gone. The live stream of these routers goes on behind the transfer.
"""

from __future__ import annotations

from kvbus.core.blocks.compaction import SnapshotChunks, StateSnapshot
from kvbus.core.outputs.stream import OutputStream


class StateTransfer:
    """A frozen state, numbered. Several routers share it; each has a :meth:`reader` of its own.

    Args:
        snapshot: the state.
        first_seq: seq of the first batch.
        topic: the stream's topic.
        publisher_id: what follows the seq in each sequence frame; empty unless the output offers snapshots.
    """

    def __init__(self, snapshot: StateSnapshot, first_seq: int, topic: bytes, publisher_id: bytes) -> None:
        self.first_seq = first_seq
        self.topic = topic
        self.publisher_id = publisher_id
        self._snapshot = snapshot
        self._chunks: SnapshotChunks = snapshot.chunks(snapshot.fewest)
        self.end_seq = first_seq + self._chunks.count
        """The seq of the first live batch behind it."""

    def reader(self) -> TransferReader:
        """One router's way through the transfer."""
        return TransferReader(self, self._chunks)


class JournalTransfer:
    """The state of a stream with a log's numbers: its journal, which begins with a state, as it is now.

    Everybody else has had these batches under these seqs.
    """

    def __init__(self, stream: OutputStream) -> None:
        self.topic = stream.topic
        self.publisher_id = stream.publisher_id
        self.end_seq = stream.next_seq
        first = stream.journal.first_seq
        self.first_seq = self.end_seq if first is None else first
        self._batches: list[tuple[int, bytes]] = []
        seq = self.first_seq
        while seq < self.end_seq:
            for begin, payload, count in stream.journal.runs(seq, self.end_seq):
                self._batches += [(number, payload) for number in range(begin, begin + count)]
                seq = begin + count

    def reader(self) -> JournalReader:
        """One router's way through it."""
        return JournalReader(self, self._batches)


class JournalReader:
    """The batches of a :class:`JournalTransfer`, at one router's pace."""

    def __init__(self, transfer: JournalTransfer, batches: list[tuple[int, bytes]]) -> None:
        self.transfer = transfer
        self._batches = batches
        self._at = 0

    @property
    def done(self) -> bool:
        """Every batch was taken."""
        return self._at == len(self._batches)

    def next_batch(self) -> tuple[int, bytes] | None:
        """Take the next batch as seq and payload."""
        batch = self._batches[self._at]
        self._at += 1
        return batch


class TransferReader:
    """The batches of a transfer, at one router's pace."""

    def __init__(self, transfer: StateTransfer, chunks: SnapshotChunks) -> None:
        self.transfer = transfer
        self.seq = transfer.first_seq
        """Seq of the next batch."""
        self._chunks = chunks.reader()

    @property
    def done(self) -> bool:
        """Every batch was taken."""
        return self.seq == self.transfer.end_seq

    def next_batch(self) -> tuple[int, bytes] | None:
        """Take the next batch as seq and payload; None while it is being made (call again)."""
        payload = self._chunks.next_payload()
        if payload is None:
            raise IndexError(f"transfer {self.transfer.first_seq} to {self.transfer.end_seq} is over")
        if not payload:
            return None
        seq = self.seq
        self.seq += 1
        return seq, payload


Transfer = StateTransfer | JournalTransfer
Reading = TransferReader | JournalReader
