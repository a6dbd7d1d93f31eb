"""A source as it stands: one engine publisher, and examples of what it sent that was refused or left out.

An example says what the first batch or message of a reason was like, and holds none of its tokens. One example is kept
for each reason, so their number is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvbus.core.blocks.index import Index
from kvbus.core.findings import Finding
from kvbus.core.lifetimes import Lifetimes
from kvbus.core.normalizing.normalizer import Normalizer
from kvbus.core.sequencing.phases import State
from kvbus.core.sequencing.sequencer import Sequencer
from kvbus.core.sequencing.topics import Topics
from kvbus.core.source_spec import Place, SourceSpec
from kvbus.core.stats import SourceStats
from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.dialects import Sniffer
from kvbus.core.wire.schema import Batch, BlockStored, Event

MIN_ANSWERS_ALONE: Final = 3
"""A late start takes one answer, and a lost batch at the end of a stream one more."""

_ELSEWHERE: Final[frozenset[str]] = frozenset(
    {
        Reason.FRAME_COUNT,
        Reason.FRAME_SIZE,
        Reason.SEQ_WIDTH,
        Reason.SEQ_RANGE,
        Reason.CONFLICT,
        Reason.OTHER_TOPIC,
        Filtered.OLD_EPOCH,
        Filtered.ORPHAN_PASSED,
        Filtered.OTHER_RANK,
        Filtered.TOPIC,
    }
)
"""Reasons of messages, of numbers, and of batches that are forwarded unchanged. No batch is their example."""

_LONGEST: Final = 24
"""Maximum length of an engine's own word, in characters."""


MAX_SKEW_S: Final = 5.0
"""Seconds that the clocks of engine and kvbus may differ."""
MIN_SKEWED: Final = 3
"""Looks in a row that show another time before the clock is said to be off."""


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
        self.place = Place()
        self.unreachable: Finding | None = None
        """Why there is no connection; None while nobody knows."""
        self.clock_off = 0.0
        """Seconds by which the engine's clock is behind; 0 while it is about right."""
        self._clock_seen = 0, 0
        """How many live batches had come at the last look at the clock, and how many looks in a row showed another."""
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

    def look_at_clock(self, wall: float) -> None:
        """Compare the time of the newest live batch with the time of day, at each tick."""
        batches, skewed = self._clock_seen
        if self.stats.batches == batches or not (wall and self.ts) or self.state is not State.LIVE:
            return
        skew = wall - self.ts
        skewed = skewed + 1 if abs(skew) > MAX_SKEW_S else 0
        self._clock_seen = self.stats.batches, skewed
        self.clock_off = skew if skewed >= MIN_SKEWED else 0.0

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

    def keep_example(self, seq: int, payload: bytes, batch: Batch | Reason) -> None:
        """Keep a batch as the example of the reasons that it has brought up.

        Call it for each batch that is not forwarded unchanged, if there are more reasons than before. Then a reason
        without an example is the batch's own.

        Args:
            seq: its number.
            payload: its bytes.
            batch: the decoded batch; the reason if it cannot be decoded.
        """
        counters = (self.stats.rejected, self.stats.filtered)
        self.reasons = sum(map(len, counters))
        known = _ELSEWHERE.union(self.examples)
        new = [reason for counts in counters for reason in counts if reason not in known]
        if not new:
            return
        name = f"batch {seq}" if seq >= 0 else "a part of the snapshot"
        text = f"{name} of epoch {self.sequencer.epoch}, {len(payload):,} bytes"
        if not isinstance(batch, Reason):
            text = f"{text}: {_events(batch)}"
        self.examples.update((str(reason), text) for reason in new)

    def refuse_message(self, reason: Reason, frames: Sequence[bytes]) -> None:
        """Count a message that is not a batch, and keep the first one of each reason as an example."""
        self.stats.rejected[reason] += 1
        if reason not in self.examples:
            sizes = ", ".join(f"{len(frame):,}" for frame in frames[:4])
            self.examples[str(reason)] = f"{len(frames)} frames, of {sizes}{'…' if len(frames) > 4 else ''} bytes"


def _events(batch: Batch) -> str:
    found: dict[str, int] = {}
    for event in batch.events:
        kind = _kind(event)
        found[kind] = found.get(kind, 0) + 1
    if batch.rejects:
        found["unreadable"] = len(batch.rejects)
    said = [f"{count:,} x {kind}" for kind, count in found.items()]
    return ", ".join(said[:3]) + (f" and {len(said) - 3} more" if len(said) > 3 else "")


def _kind(event: Event) -> str:
    name = type(event).__name__
    if not isinstance(event, BlockStored):
        return name
    blocks = len(event.block_hashes)
    group = f", group {event.group_idx}" if isinstance(event.group_idx, int) else ""
    medium = f" on {event.medium[:_LONGEST]}" if isinstance(event.medium, str) else ""
    return f"{name} of {blocks} x {event.block_size} tokens{medium}{group}"
