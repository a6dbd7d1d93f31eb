"""A source: one engine publisher, as configured and as it stands."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvbus.core.blocks.index import Index
from kvbus.core.blocks.overlay import SMALL
from kvbus.core.normalizing.normalizer import Normalizer, Rules
from kvbus.core.sequencing.sequencer import Sequencer
from kvbus.core.sequencing.settings import Settings, State
from kvbus.core.stats import SourceStats
from kvbus.core.types import Filtered
from kvbus.core.wire.dialect import Sniffer
from kvbus.core.wire.profiles import Wire


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
    copied_below: int = SMALL
    """Tables of fewer blocks are copied for a snapshot, see :mod:`kvbus.core.blocks.overlay`."""


NOBODY: Final = SourceSpec("", 0, Settings(), Rules())
"""The source of a place that is free."""


class Source:
    """What the relay knows of one publisher."""

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec
        self.gone = spec is NOBODY
        """Nobody is in this place: it was removed, or the configuration left the slot free."""
        self.stats = SourceStats()
        self.sequencer = Sequencer(spec.settings, self.stats)
        self.normalizer = Normalizer(spec.rules, self.stats, Index(spec.copied_below))
        self.rank = spec.rank
        self.ranked = False
        """The engine has said its rank in this life; it keeps it."""
        self.ts = 0.0
        self.topic = spec.topic
        self.dialect = Sniffer()
        self.publisher_id: bytes | None = None
        self.down_since: float | None = None
        self.lost = 0
        """Batches of this epoch that will never come."""
        self.partial_since: float | None = None
        """The time of day at which :attr:`partial` was first seen to be true; None while it is not."""
        self.announced = False
        """Routers have been told of at least one block that nothing has cleared since."""
        self.expired = False
        """Routers were told that nothing is there while the index is kept, in case the engine comes back."""

    def says(self, wire: Wire) -> bool:
        """Whether batches of this source that need no change are in the words of a wire as they came."""
        return wire.accepts_as_is(bytes_hashes=self.normalizer.bytes_hashes, media=self.normalizer.index.media_names)

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
        """Whether the engine may hold blocks that cannot be known.

        Its history was trimmed, batches were lost, a tier held more than was ever told, or the index is full.
        """
        return self.sequencer.partial or self.normalizer.tiers_unknown or self.normalizer.full
