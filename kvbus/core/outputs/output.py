"""The streams of an output and their current state."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

from kvbus.core.blocks.compaction import StateSnapshot
from kvbus.core.blocks.index import Index
from kvbus.core.outputs.journal import Journal
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.outputs.view import View
from kvbus.core.source import Source
from kvbus.core.stats import NumberingStats


class Output:
    """One output's streams."""

    def __init__(self, spec: OutputSpec, ranks: Sequence[int]) -> None:
        self.spec = spec
        self.merged = spec.merged
        self.stats = NumberingStats()
        rights = spec.rights
        self.view = View(rights, self.stats) if rights.loras is not None or rights.salts is not None else None
        """The blocks that its routers may read; None: all blocks."""
        self.hidden = set(spec.hidden or ())
        """Slots of sources that its routers may not see."""
        self.streams: list[OutputStream] = []
        for i, topic in enumerate(spec.topics):
            rank = 0 if spec.merged else ranks[i]
            first = spec.first_seqs[i] if spec.first_seqs else 0
            self.add_stream(topic, rank, first, spec.publisher_ids[i] if spec.publisher_ids else b"")
        self.snapshots: WeakValueDictionary[int, StateSnapshot] = WeakValueDictionary()
        """The newest snapshot of each stream, as long as a reader holds it."""

    def add_stream(self, topic: bytes | None, rank: int, first_seq: int, publisher_id: bytes) -> OutputStream:
        """Add a stream after all others; return it."""
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
        """The streams of present sources, by their slot."""
        return {at: stream for at, stream in enumerate(self.streams) if not stream.closed}

    @property
    def as_it_comes(self) -> bool:
        """Whether the output's routers get each batch of a source as exactly one batch."""
        return self.spec.profile.as_it_comes and self.view is None and self.spec.hidden is None

    def index_of(self, i: int, source: Source) -> Index:
        """Return the blocks of a source that routers may know."""
        return source.normalizer.index if self.view is None else self.view.index(i)

    @property
    def served_streams(self) -> dict[int, OutputStream]:
        """The streams that routers can read, by their slot."""
        return {at: stream for at, stream in enumerate(self.streams) if self.serves(stream)}

    def serves(self, stream: OutputStream) -> bool:
        """Return whether routers can read a stream.

        On an output by topic, this includes streams whose source is gone.
        """
        return not stream.closed or (self.spec.by_topic and bool(stream.topic))

    def rank_of(self, i: int, source: Source) -> int:
        """Return the rank in a batch: the engine's own; on a merged stream the source's slot, which is unique there.

        A merged stream for routers that number each rank by itself has only rank 0.
        """
        if not self.spec.merged:
            return source.rank
        return 0 if self.spec.profile.one_rank else i
