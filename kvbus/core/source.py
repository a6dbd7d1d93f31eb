"""A source as it stands: one engine publisher."""

from __future__ import annotations

from typing import Final

from kvbus.core.blocks.index import Index
from kvbus.core.lifetimes import Lifetimes
from kvbus.core.normalizing.normalizer import Normalizer
from kvbus.core.sequencing.phases import State
from kvbus.core.sequencing.sequencer import Sequencer
from kvbus.core.sequencing.topics import Topics
from kvbus.core.source_spec import SourceSpec
from kvbus.core.source_stats import SourceStats
from kvbus.core.types import Filtered
from kvbus.core.wire.dialects import Sniffer

MIN_ANSWERS_ALONE: Final = 3
"""A late start takes one answer, and a lost batch at the end of a stream one more."""


class Source:
    """What the relay knows of one publisher."""

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec
        self.gone = not spec.label
        """The slot is free: its source was removed, or the configuration has none for it."""

        # What takes the batches in.
        self.stats = SourceStats()
        self.sequencer = Sequencer(spec, self.stats)
        self.topics = Topics(spec.topic, spec.shared, self.sequencer, self.stats)
        self.normalizer = Normalizer(spec, self.stats, Index(spec.copied_below))

        expire = Lifetimes(spec.expiring_media, spec.expire_after, self.normalizer.index)
        self.lifetimes = expire if spec.expiring_media else None

        # As the newest batch has it.
        self.rank = spec.rank
        self.ranked = False
        """The engine has said its rank in this epoch, and keeps it."""
        self.ts = 0.0
        self.topic = spec.topic
        self.dialect = Sniffer()
        self.publisher_id: bytes | None = None

        # What is wrong with it.
        self.examples: dict[str, str] = {}
        """By reason, what the first thing was like that was refused or left out for it."""
        self.unknown: set[str] = set()
        """Names of events and fields that this version does not know, as far as there is room."""
        self.reasons = 0
        """How many reasons had been counted when examples were last looked for."""
        self.unreachable = ""
        """Why there is no connection, in words of the shell; empty while it does not know."""
        self.answers_alone = 0
        """Replay answers in a row that brought missing batches while no live batch came."""
        self._counted = 0, 0
        """How many live batches had come, and how many were recovered, when the last answer ended."""
        self.down_since: float | None = None
        self.lost = 0
        """Batches of this epoch that will never come."""
        self.partial_since: float | None = None
        """The time of day at which :attr:`partial` was first seen to be true; None while it is not."""

        # What routers know of it.
        self.refused_replays: set[str] = set()
        """Outputs whose routers refuse the newest answer from 0: it would have needed too many empty batches."""
        self.needs_tokens = False
        """Some output's routers get no block without its tokens."""
        self.announced = False
        """At least one block was announced, and nothing has cleared it since."""
        self.expired = False
        """The blocks were cleared downstream, and the index is kept in case the engine comes back."""

    def answer_ended(self) -> None:
        """Note whether a replay answer has brought batches that should have come live."""
        batches, recovered = self._counted
        self._counted = self.stats.batches, self.stats.recovered
        if self.stats.batches > batches:
            self.answers_alone = 0
        elif self.stats.recovered > recovered:
            self.answers_alone += 1

    @property
    def replay_alone(self) -> bool:
        """Whether the engine's batches come by its replay, again and again, and none comes live."""
        return self.answers_alone >= MIN_ANSWERS_ALONE and self.stats.batches == self._counted[0]

    def see_rank(self, rank: int) -> None:
        """A batch says this rank. Routers file blocks by it, so the first one of an epoch holds; others are counted."""
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

        Its history was trimmed, batches were lost, a tier held more than was ever announced, or stores were refused.
        """
        normalizer = self.normalizer
        left_out = bool(normalizer.refused) or (self.needs_tokens and normalizer.hash_only)
        return self.sequencer.partial or normalizer.clears.tiers_unknown or left_out
