"""The streams of one output, and the blocks that its routers may know."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

from kvbus.core.blocks.compaction import StateSnapshot
from kvbus.core.blocks.index import Index
from kvbus.core.outputs.journal import Journal
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.outputs.view import TenantIndex
from kvbus.core.source import Source
from kvbus.core.stats import NumberingStats


class Output:
    """One output: its configuration, its streams, and the newest snapshot of each stream."""

    def __init__(self, spec: OutputSpec, ranks: Sequence[int]) -> None:
        self.spec = spec
        self.merged = spec.merged
        self.stats = NumberingStats()
        rights = spec.rights
        limited = rights.loras is not None or rights.salts is not None
        self.view = TenantIndex(rights, self.stats, spec.profile.residencies) if limited else None
        """The blocks that this output's routers may read; None if they may read all blocks."""
        self.hidden = set(spec.hidden or ())
        """Slots of the sources that this output's routers may not see."""
        self.streams: list[OutputStream] = []
        for i, topic in enumerate(spec.topics):
            rank = 0 if spec.merged else ranks[i]
            first = spec.first_seqs[i] if spec.first_seqs else 0
            self.add_stream(topic, rank, first, spec.publisher_ids[i] if spec.publisher_ids else b"")
        self.snapshots: WeakValueDictionary[int, StateSnapshot] = WeakValueDictionary()
        """The newest state snapshot of each stream, by the stream's slot.

        A snapshot is removed when the last router has finished reading it.
        """

    def add_stream(self, topic: bytes | None, rank: int, first_seq: int, publisher_id: bytes) -> OutputStream:
        """Add a stream in the next free slot. Return the stream."""
        spec = self.spec
        journal = Journal(spec.journal_batches, spec.journal_bytes)
        stream = OutputStream(
            topic,
            spec.profile,
            journal,
            heartbeat=spec.heartbeat,
            rank=rank,
            publisher_id=publisher_id,
            first_seq=first_seq,
            numbered=spec.numbered,
        )
        self.streams.append(stream)
        return stream

    @property
    def open_streams(self) -> dict[int, OutputStream]:
        """The streams whose source is present, by slot."""
        return {at: stream for at, stream in enumerate(self.streams) if not stream.closed}

    @property
    def as_it_comes(self) -> bool:
        """Whether the output sends each batch of every source unchanged, as exactly one batch."""
        return self.spec.profile.as_it_comes and self.view is None and self.spec.hidden is None

    def index_of(self, i: int, source: Source) -> Index:
        """Return the index with those blocks of the source in slot ``i`` that this output's routers may read."""
        return source.normalizer.index if self.view is None else self.view.index(i)

    def filed(self, i: int, source: Source) -> Index:
        """Return the index of :meth:`index_of`, with residencies joined that this output's routers take for one."""
        return self.index_of(i, source).filed(self.spec.profile.residencies)

    @property
    def served_streams(self) -> dict[int, OutputStream]:
        """The streams that routers can read, by slot."""
        return {at: stream for at, stream in enumerate(self.streams) if self.serves(stream)}

    def serves(self, stream: OutputStream) -> bool:
        """Return whether routers can read a stream.

        If all streams share one endpoint (``by_topic``), routers can also read the stream of a source that has left.
        """
        return not stream.closed or (self.spec.by_topic and bool(stream.topic))

    def rank_of(self, i: int, source: Source) -> int:
        """Return the rank that this output's batches name for the source in slot ``i``.

        It is the engine's own rank if each source has its own stream. On a merged stream it is the source's slot,
        because several engines may have the same rank. If the routers of a merged stream expect consecutive seqs in
        each rank, it is 0 for every source.
        """
        if not self.merged:
            return source.rank
        return 0 if self.spec.profile.one_rank else i
