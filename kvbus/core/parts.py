"""What a relay is made of: sources and outputs, as configured and as they stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal
from weakref import WeakValueDictionary

import msgspec

from kvbus.core.compaction import Cut
from kvbus.core.dialect import Sniffer
from kvbus.core.encoding import Profile, Wire
from kvbus.core.journal import Journal
from kvbus.core.normalize import Normalizer, Rules
from kvbus.core.sequencer import Sequencer
from kvbus.core.settings import Settings, State
from kvbus.core.stats import OutputStats, SourceStats
from kvbus.core.stream import OutputStream
from kvbus.core.types import Filtered


class SourceSpec(msgspec.Struct, frozen=True):
    """One engine publisher: worker x rank."""

    label: str
    rank: int
    settings: Settings
    rules: Rules
    on_lost: Literal["clear", "keep"] = "clear"
    timeout: float = 30.0
    topic: bytes = b""
    """What is subscribed to: the topic of batches that came by a replay which does not say it."""


NOBODY: Final = SourceSpec("", 0, Settings(), Rules())
"""The source of a place that is free."""


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


class NewStream(msgspec.Struct, frozen=True):
    """How one output's stream of a source that is added shall be; fields as in :class:`OutputSpec`."""

    topic: bytes | None = None
    first_seq: int = 0
    publisher_id: bytes = b""


class Source:
    """What the relay knows of one publisher."""

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec
        self.gone = spec is NOBODY
        """Nobody is in this place: it was removed, or the configuration left the slot free."""
        self.stats = SourceStats()
        self.sequencer = Sequencer(spec.settings, self.stats)
        self.normalizer = Normalizer(spec.rules, self.stats)
        self.rank = spec.rank
        self.ranked = False
        """The engine has said its rank in this life; it keeps it."""
        self.ts = 0.0
        self.topic = spec.topic
        self.dialect = Sniffer()
        self.publisher_id: bytes | None = None
        self.down_since: float | None = None
        self.told = False
        """Routers have been told of at least one block that nothing has cleared since."""
        self.withdrawn = False
        """Routers were told that nothing is there while the index is kept, in case the engine comes back."""

    def says(self, wire: Wire) -> bool:
        """Whether batches of this source that need no change are in the words of a wire as they came."""
        return wire.passes(bytes_hashes=self.normalizer.bytes_hashes, media=self.normalizer.index.media_names)

    def see_rank(self, rank: int) -> None:
        """A batch says this rank. Routers file blocks by it, so the first one of a life holds; others are counted."""
        if not self.ranked:
            self.rank, self.ranked = rank, True
        elif rank != self.rank:
            self.stats.filtered[Filtered.OTHER_RANK] += 1

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
        self.merged = spec.merged
        self.stats = OutputStats()
        self.streams: list[OutputStream] = []
        for i, topic in enumerate(spec.topics):
            rank = 0 if spec.merged else ranks[i]
            first = spec.first_seqs[i] if spec.first_seqs else 0
            self.add_stream(topic, rank, first, spec.publisher_ids[i] if spec.publisher_ids else b"")
        self.cuts: WeakValueDictionary[int, Cut] = WeakValueDictionary()
        """The newest cut of each stream, for as long as an answer holds it."""

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

    def stream_of(self, source: int) -> int:
        """Which stream a source's batches go to."""
        return 0 if self.spec.merged else source

    def rank_of(self, i: int, source: Source) -> int:
        """The rank in a batch: the engine's own; on a merged stream the source's place, which is unique there."""
        return i if self.spec.merged else source.rank
