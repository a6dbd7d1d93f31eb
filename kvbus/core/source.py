"""The current state of one source (one engine publisher), with examples of its refused or left-out batches.

An example describes the first message or batch that was refused for a reason. It contains no tokens. There is at most
one example for each reason, so the number of examples is limited.
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
from kvbus.core.source_spec import SourceLocation, SourceSpec
from kvbus.core.stats import SourceStats
from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.dialects import Sniffer
from kvbus.core.wire.schema import Batch, BlockStored, Event

MIN_ANSWERS_ALONE: Final = 3
"""Number of replay answers in a row without a live batch after which a finding says that batches come only by replay.

A single such answer is normal when kvbus starts later than the engine. A second one is normal after the last batch of
the live stream was lost.
"""

_ELSEWHERE: Final[frozenset[str]] = frozenset(
    {
        Reason.FRAME_COUNT,
        Reason.FRAME_SIZE,
        Reason.MESSAGE_SIZE,
        Reason.ZMTP,
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
"""Reasons of counted refusals for which kvbus keeps no batch as an example.

They concern messages that are not batches, wrong seqs, or batches that kvbus forwards unchanged.
"""

MAX_RANKS: Final = 8
"""Maximum number of ranks that kvbus remembers for a source, whose rank may differ from epoch to epoch."""

REANNOUNCED: Final = "reannounced"
"""Name of a count that :meth:`Source.recent` returns: the number of stores whose blocks were all live already.

The other counts have the names of reasons (:class:`~kvbus.core.types.Reason`).
"""

_LONGEST: Final = 24
"""Maximum number of characters of a medium's name in a finding. The engine chooses the name, so it may be long."""


MAX_SKEW_S: Final = 5.0
"""Tolerated difference between the clocks of engine and kvbus, in seconds. A larger one is reported as a finding."""
RECENT_S: Final = 600.0
"""Seconds without a refused message after which the finding about refused messages ends."""
MIN_SKEWED: Final = 3
"""Number of successive comparisons of kvbus's clock with the engine's that must differ before a finding reports it."""


class Source:
    """The state that the relay keeps about one engine publisher."""

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec
        self.gone = not spec.label
        """Whether the slot of this source is free: the source was removed, or the configuration has no source for the
        slot."""

        # The objects that handle the engine's batches.
        self.stats = SourceStats()
        self.sequencer = Sequencer(spec, self.stats)
        self.topics = Topics(spec.topic, spec.shared, self.sequencer, self.stats)
        self.normalizer = Normalizer(spec, self.stats, Index(spec.copied_below))

        expire = Lifetimes(spec.expiring_media, spec.expire_after, self.normalizer.index)
        self.lifetimes = expire if spec.expiring_media else None

        # Values of the newest batch. Until a batch arrives, they are values of the configuration.
        self.rank = spec.rank
        self.ranked = False
        """Whether the engine has named its rank in this epoch.

        The first rank that the engine names stays the source's rank until the epoch ends.
        """
        self.ranks_announced: list[int] = []
        """The ranks under which kvbus has announced blocks of this source, the latest last, up to :data:`MAX_RANKS`.

        A router that was disconnected when the rank changed may still hold blocks under an earlier rank.
        """
        self.ts = 0.0
        self.topic = spec.topic
        self.dialect = Sniffer()
        self.publisher_id: bytes | None = None
        self.applying: tuple[int, bytes, Batch] | None = None
        """Seq, payload and events of the batch that is being applied in parts; None if the last batch is complete."""

        # Facts from which findings for the operator are made.
        self.examples: dict[str, str] = {}
        """For each reason, a description of the first message or batch that was refused or left out for that reason."""
        self.unknown: set[str] = set()
        """Names of events and fields from the engine that this version of kvbus does not know, up to a maximum
        number."""
        self.reasons = 0
        """Number of different reasons for refused and left-out batches and events, as of the last check.

        If the number has risen, kvbus stores an example of the new reason.
        """
        self.location = SourceLocation()
        self.unreachable: Finding | None = None
        """The finding that explains why kvbus has no connection to the engine; None if there is no explanation."""
        self.further_rank: Finding | None = None
        """The finding that the engine seems to have more ranks than are configured; None if there is no sign of further
        ranks."""
        self.clock_off = 0.0
        """Seconds by which the engine's clock is behind kvbus's clock.

        It is negative if the engine's clock is ahead, and 0 if the difference is tolerable.
        """
        self._clock_seen = 0, 0
        """Two numbers about the comparisons of kvbus's clock with the engine's.

        The first is the number of live batches at the last comparison. The second tells how many comparisons in a row,
        up to the last one, have found too large a difference.
        """
        self._rises: dict[str, tuple[int, float]] = {}
        """For each reason for which kvbus refuses messages or events of the engine: the count at the last tick, and the
        time at which the count last rose."""
        self._ticked = 0.0
        self.answers_alone = 0
        """Number of replay answers in a row that brought missing batches while no batch came on the live stream."""
        self._counted = 0, 0
        """Number of live batches and number of recovered batches when the last replay answer ended."""
        self.down_since: float | None = None
        self.lost = 0
        """Number of batches of this epoch that kvbus has given up."""
        self.partial_since: float | None = None
        """The time of day at which :attr:`partial` became True; None while it is False."""

        # Facts about the routers that read this source, and about the blocks that they have of it.
        self.refused_replays: set[str] = set()
        """Names of the outputs whose routers refuse the newest answer to a replay from seq 0.

        They refuse it because it begins at a later seq. An answer that begins at 0 would need too many empty batches.
        """
        self.needs_tokens = False
        """Whether some output sends only blocks with known tokens, because its routers hash tokens themselves."""
        self.announced = False
        """Whether kvbus has announced blocks of this source to routers since it last sent them a clear."""
        self.expired = False
        """Whether the engine was gone for ``source_timeout``, so that the blocks were cleared at the routers.

        The index is kept in case the engine comes back with the same cache.
        """

    def answer_ended(self) -> None:
        """Record whether the replay answer that has just ended brought missing batches while no live batch came.

        :attr:`replay_alone` uses the record.
        """
        batches, recovered = self._counted
        self._counted = self.stats.batches, self.stats.recovered
        if self.stats.batches > batches:
            self.answers_alone = 0
        elif self.stats.recovered > recovered:
            self.answers_alone += 1

    @property
    def replay_alone(self) -> bool:
        """Whether the engine's batches have repeatedly come by replay while none came on the live stream."""
        return self.answers_alone >= MIN_ANSWERS_ALONE and self.stats.batches == self._counted[0]

    def look_at_clock(self, wall: float) -> None:
        """Compare the time in the newest live batch with the time of day, to detect a wrong clock of the engine.

        Call it at each tick.
        """
        batches, skewed = self._clock_seen
        if self.stats.batches == batches or not (wall and self.ts) or self.state is not State.LIVE:
            return
        skew = wall - self.ts
        skewed = skewed + 1 if abs(skew) > MAX_SKEW_S else 0
        self._clock_seen = self.stats.batches, skewed
        self.clock_off = skew if skewed >= MIN_SKEWED else 0.0

    def look_at_counts(self, now: float) -> None:
        """Record which counts of refused messages have risen since the last call. Call it at each tick."""
        self._ticked = now
        for reason, count in self._counts():
            if count != self._rises.get(reason, (0, 0.0))[0]:
                self._rises[reason] = count, now

    def recent(self) -> dict[str, int]:
        """Return the counts of refused messages for the reasons that occurred recently.

        A reason is recent if a message was refused for it after the last tick, or up to `RECENT_S` seconds before it.
        """
        return {
            reason: count
            for reason, count in self._counts()
            if count != (rise := self._rises.get(reason, (0, 0.0)))[0] or self._ticked - rise[1] < RECENT_S
        }

    def _counts(self) -> list[tuple[str, int]]:
        counts = [*self.stats.rejected.items(), (REANNOUNCED, self.stats.reannounced)]
        return [(reason, count) for reason, count in counts if count]

    def see_rank(self, rank: int) -> None:
        """Set the source's rank to the rank that a batch names, if no earlier batch of the epoch has named a rank.

        Otherwise count the batch if it names another rank. Routers group blocks by rank, so the rank of a source must
        not change after the engine has named it.
        """
        if not self.ranked:
            self.rank, self.ranked = rank, True
        elif rank != self.rank:
            self.stats.filtered[Filtered.OTHER_RANK] += 1

    def begin_announcing(self) -> None:
        """Record that routers now get blocks of this source under its rank."""
        self.announced = True
        ranks = [rank for rank in self.ranks_announced if rank != self.rank]
        self.ranks_announced = [*ranks, self.rank][-MAX_RANKS:]

    @property
    def state(self) -> State:
        """The state of the source as ``/sources`` shows it."""
        return self.sequencer.state

    @property
    def partial(self) -> bool:
        """Whether the engine may hold blocks that kvbus cannot know.

        Possible causes are: the engine's replay buffer had dropped old batches, batches were lost, a memory tier held
        more blocks than were announced, or kvbus refused stores.
        """
        normalizer = self.normalizer
        left_out = bool(normalizer.refused) or (self.needs_tokens and normalizer.hash_only)
        return self.sequencer.partial or normalizer.clears.tiers_unknown or left_out

    def keep_example(self, seq: int, payload: bytes, batch: Batch | Reason) -> None:
        """Keep a batch as the example of each refusal reason that has no example yet.

        Call it after a batch for which a reason was counted for the first time. Every reason without an example then
        comes from this batch.

        Args:
            seq: the batch's seq; -1 for a part of a snapshot.
            payload: the batch's bytes.
            batch: the decoded batch, or the reason why it cannot be decoded.
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
        """Count a message of the engine that is not a batch.

        Keep the sizes of its frames as the example of ``reason`` if that reason has no example yet.
        """
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
    kinds = [f"{count:,} x {kind}" for kind, count in found.items()]
    return ", ".join(kinds[:3]) + (f" and {len(kinds) - 3} more" if len(kinds) > 3 else "")


def _kind(event: Event) -> str:
    name = type(event).__name__
    if not isinstance(event, BlockStored):
        return name
    blocks = len(event.block_hashes)
    group = f", group {event.group_idx}" if isinstance(event.group_idx, int) else ""
    medium = f" on {event.medium[:_LONGEST]}" if isinstance(event.medium, str) else ""
    return f"{name} of {blocks} x {event.block_size} tokens{medium}{group}"
