"""An output and its streams, as configured and as they stand."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import msgspec

from kvbus.core.blocks.compaction import StateSnapshot
from kvbus.core.outputs.journal import Journal
from kvbus.core.outputs.stream import OutputStream
from kvbus.core.source import Source
from kvbus.core.stats import NumberingStats
from kvbus.core.wire.profiles import Profile


class OutputSpec(msgspec.Struct, frozen=True):
    """One output. ``topics`` has one entry per stream: as many as sources, or one where the layout is merged.

    A topic of None is the source's own. ``first_seqs`` says where each numbering begins. ``publisher_ids`` (16
    bytes each) puts the snapshot protocol's 24-byte sequence frames on this output. ``known_slots`` of a merged output
    is one past the highest slot whose rank its routers may know from a former process.
    """

    name: str
    profile: Profile
    topics: Sequence[bytes | None]
    merged: bool = False
    heartbeat: float = 1.0
    journal_batches: int = 10_000
    journal_bytes: int = 2 * 1024 * 1024
    first_seqs: Sequence[int] = ()
    publisher_ids: Sequence[bytes] = ()
    known_slots: int = 0


class NewStream(msgspec.Struct, frozen=True):
    """How one output's stream of a source that is added shall be; fields as in :class:`OutputSpec`."""

    topic: bytes | None = None
    first_seq: int = 0
    publisher_id: bytes = b""


class Output:
    """One output's streams."""

    def __init__(self, spec: OutputSpec, ranks: Sequence[int]) -> None:
        self.spec = spec
        self.merged = spec.merged
        self.stats = NumberingStats()
        self.streams: list[OutputStream] = []
        for i, topic in enumerate(spec.topics):
            rank = 0 if spec.merged else ranks[i]
            first = spec.first_seqs[i] if spec.first_seqs else 0
            self.add_stream(topic, rank, first, spec.publisher_ids[i] if spec.publisher_ids else b"")
        self.snapshots: WeakValueDictionary[int, StateSnapshot] = WeakValueDictionary()
        """The newest snapshot of each stream, for as long as a reader holds it."""

    def add_stream(self, topic: bytes | None, rank: int, first_seq: int, publisher_id: bytes) -> OutputStream:
        """One more stream, behind the others."""
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
        )
        self.streams.append(stream)
        return stream

    @property
    def open_streams(self) -> dict[int, OutputStream]:
        """The streams that are served, by their place."""
        return {at: stream for at, stream in enumerate(self.streams) if not stream.closed}

    def rank_of(self, i: int, source: Source) -> int:
        """The rank in a batch: the engine's own; on a merged stream the source's place, which is unique there."""
        return i if self.spec.merged else source.rank
