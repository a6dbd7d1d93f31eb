"""The state of one stream for routers that have just subscribed or have lost batches. Only these routers get it.

The batches of a transfer have the seqs after the stream's newest one. All other routers get an empty batch for each of
these seqs, so that the numbering is dense for every router. AllBlocksCleared comes first, because a router may hold
blocks that are gone. The live stream of the receiving routers continues after the transfer.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvbus.core.blocks.compaction import StateSnapshot
from kvbus.core.outputs.stream import OutputStream


class StateTransfer:
    """A frozen, numbered state. Several routers share it; each iterates over its own :meth:`batches`.

    Args:
        snapshot: the state.
        first_seq: seq of the first batch.
        topic: the stream's topic.
        publisher_id: the bytes after the seq in each sequence frame; empty unless the output offers snapshots.
    """

    def __init__(self, snapshot: StateSnapshot, first_seq: int, topic: bytes, publisher_id: bytes) -> None:
        self.first_seq = first_seq
        self.topic = topic
        self.publisher_id = publisher_id
        self._snapshot = snapshot
        self._chunks = snapshot.chunks(snapshot.fewest)
        self.end_seq = first_seq + self._chunks.count
        """The seq of the first live batch after it."""

    def batches(self) -> Iterator[tuple[int, bytes] | None]:
        """Yield each batch as seq and payload; None while the next batch is being built."""
        chunks = self._chunks.reader()
        for seq in range(self.first_seq, self.end_seq):
            while not (payload := chunks.next_payload()):
                if payload is None:
                    raise LookupError(f"the state ends before seq {seq}, and {self.end_seq} is next")
                yield None
            yield seq, payload


class JournalTransfer:
    """The state of a stream with a log's numbers: its current journal, which begins with a state.

    All other routers have had these batches under these seqs. The transfer holds the batches themselves: a slow router
    gets all of them even if the journal drops them.
    """

    def __init__(self, stream: OutputStream) -> None:
        self.topic = stream.topic
        self.publisher_id = stream.publisher_id
        self.end_seq = stream.next_seq
        first = stream.journal.first_seq
        self.first_seq = self.end_seq if first is None else first
        self._entries = stream.journal.entries()

    def batches(self) -> Iterator[tuple[int, bytes] | None]:
        """Yield each batch as seq and payload."""
        for entry in self._entries:
            for seq in range(entry.seq, entry.seq + entry.batches):
                yield seq, entry.payload


Transfer = StateTransfer | JournalTransfer
