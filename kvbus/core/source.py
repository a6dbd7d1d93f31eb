"""A source's current state: one engine publisher, and examples of refused or left-out batches.

An example describes the first batch or message with a reason. It contains no tokens. There is one example for each
reason, so their number is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvbus.core.blocks.index import Index
from kvbus.core.findings.finding import Finding
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
"""Consecutive replay answers without a live batch after which kvbus reports that batches come only by replay.

A late start needs one such answer, and a lost last batch another."""

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
"""Reasons that concern messages, numbers, or batches that are forwarded unchanged. No batch is an example of them."""

REANNOUNCED: Final = "reannounced"
"""Name of the count of stores whose blocks were all live. The reasons of refused messages name the other counts."""

_LONGEST: Final = 24
"""Maximum length of a medium's name in an example, in characters. The engine chooses the name."""


MAX_SKEW_S: Final = 5.0
"""Tolerated difference between the clocks of engine and kvbus, in seconds."""
RECENT_S: Final = 600.0
"""Seconds after which a finding about refused messages ends, if no further message is refused."""
MIN_SKEWED: Final = 3
"""Comparisons in a row that must show a difference before the clock counts as wrong."""


class Source:
    """The relay's knowledge about one publisher."""

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec
        self.gone = not spec.label
        """Whether the slot is free: its source was removed, or the configuration has no source for it."""

        # Processing of batches.
        self.stats = SourceStats()
        self.sequencer = Sequencer(spec, self.stats)
        self.topics = Topics(spec.topic, spec.shared, self.sequencer, self.stats)
        self.normalizer = Normalizer(spec, self.stats, Index(spec.copied_below))

        expire = Lifetimes(spec.expiring_media, spec.expire_after, self.normalizer.index)
        self.lifetimes = expire if spec.expiring_media else None

        # Values from the newest batch.
        self.rank = spec.rank
        self.ranked = False
        """Whether the engine has named its rank in this epoch. The first named rank applies to the complete epoch."""
        self.ts = 0.0
        self.topic = spec.topic
        self.dialect = Sniffer()
        self.publisher_id: bytes | None = None

        # Diagnosis.
        self.examples: dict[str, str] = {}
        """For each reason, a description of the first message or batch that was refused or left out for it."""
        self.unknown: set[str] = set()
        """Names of events and fields that this version does not know. Their number is limited."""
        self.reasons = 0
        """Number of counted reasons when kvbus last looked for examples."""
        self.place = Place()
        self.unreachable: Finding | None = None
        """Why there is no connection; None if unknown."""
        self.further_rank: Finding | None = None
        """The finding that the engine has more ranks than configured; None if it was not seen."""
        self.clock_off = 0.0
        """Seconds by which the engine's clock is behind; 0 if it is approximately right."""
        self._clock_seen = 0, 0
        """Number of live batches at the last comparison of clocks, and number of comparisons in a row with a
        difference."""
        self._rises: dict[str, tuple[int, float]] = {}
        """For each counted reason, the count at the last tick and the time of its last rise."""
        self._ticked = 0.0
        self.answers_alone = 0
        """Replay answers in a row that brought missing batches while no live batch came."""
        self._counted = 0, 0
        """Number of live batches and number of recovered batches when the last answer ended."""
        self.down_since: float | None = None
        self.lost = 0
        """Number of batches of this epoch that will never come."""
        self.partial_since: float | None = None
        """The time of day at which :attr:`partial` became true; None while it is false."""

        # What routers know about it.
        self.refused_replays: set[str] = set()
        """Outputs whose routers refuse the newest answer from 0, because it would need too many empty batches."""
        self.needs_tokens = False
        """Whether the routers of some output get only blocks with known tokens."""
        self.announced = False
        """Whether at least one block was announced, and no clear has come since."""
        self.expired = False
        """Whether the blocks were cleared downstream. The index is kept in case the engine comes back."""

    def answer_ended(self) -> None:
        """Record whether the replay answer that ended has brought batches that should have come live."""
        batches, recovered = self._counted
        self._counted = self.stats.batches, self.stats.recovered
        if self.stats.batches > batches:
            self.answers_alone = 0
        elif self.stats.recovered > recovered:
            self.answers_alone += 1

    @property
    def replay_alone(self) -> bool:
        """Whether the engine's batches repeatedly come by replay, and none comes live."""
        return self.answers_alone >= MIN_ANSWERS_ALONE and self.stats.batches == self._counted[0]

    def look_at_clock(self, wall: float) -> None:
        """Compare the time of the newest live batch with the time of day. Called at each tick."""
        batches, skewed = self._clock_seen
        if self.stats.batches == batches or not (wall and self.ts) or self.state is not State.LIVE:
            return
        skew = wall - self.ts
        skewed = skewed + 1 if abs(skew) > MAX_SKEW_S else 0
        self._clock_seen = self.stats.batches, skewed
        self.clock_off = skew if skewed >= MIN_SKEWED else 0.0

    def look_at_counts(self, now: float) -> None:
        """Record which counts have risen. Called at each tick."""
        self._ticked = now
        for reason, count in self._counts():
            if count != self._rises.get(reason, (0, 0.0))[0]:
                self._rises[reason] = count, now

    def recent(self) -> dict[str, int]:
        """Return the count of each reason that was counted in the last `RECENT_S` seconds, or since the last tick."""
        return {
            reason: count
            for reason, count in self._counts()
            if count != (rise := self._rises.get(reason, (0, 0.0)))[0] or self._ticked - rise[1] < RECENT_S
        }

    def _counts(self) -> list[tuple[str, int]]:
        counts = [*self.stats.rejected.items(), (REANNOUNCED, self.stats.reannounced)]
        return [(reason, count) for reason, count in counts if count]

    def see_rank(self, rank: int) -> None:
        """Record the rank in a batch.

        Routers file blocks by it, so an epoch's first rank stays; other ranks are counted.
        """
        if not self.ranked:
            self.rank, self.ranked = rank, True
        elif rank != self.rank:
            self.stats.filtered[Filtered.OTHER_RANK] += 1

    @property
    def state(self) -> State:
        """The state shown by ``/sources``."""
        return self.sequencer.state

    @property
    def partial(self) -> bool:
        """Whether the engine may hold blocks that kvbus cannot know.

        Its history was trimmed, batches were lost, a tier held more blocks than were ever announced, or stores were
        refused.
        """
        normalizer = self.normalizer
        left_out = bool(normalizer.refused) or (self.needs_tokens and normalizer.hash_only)
        return self.sequencer.partial or normalizer.clears.tiers_unknown or left_out

    def keep_example(self, seq: int, payload: bytes, batch: Batch | Reason) -> None:
        """Keep a batch as the example of each reason that it has added.

        Call it for each batch that is not forwarded unchanged, if the number of reasons has grown. Then this batch
        caused every reason without an example.

        Args:
            seq: the batch's seq.
            payload: the batch's bytes.
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
        """Count a message that is not a batch. Keep the first message of each reason as an example."""
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
