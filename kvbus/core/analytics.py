"""What a planner asks about the blocks of a source: how long they live, how many come and go, and which come back.

A sample of blocks is followed exactly: those whose hash is divisible by ``weight``, a power of three. It begins at 1,
where every block is followed, and grows each time the sample is full. What is counted of the sample counts ``weight``
times. The choice goes by the hash alone, so what one source samples at some weight is what another one samples.

A block is live while any tier or group holds it. One that moves between tiers stays, even if the removal comes first in
the batch. Times are the engine's own, so a replay gives the same ages as the live stream.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from math import exp
from typing import Any, Final

import msgspec

from kvbus.core.blocks.index import Index
from kvbus.core.source_stats import SourceStats
from kvbus.core.stats import Histogram
from kvbus.core.types import Hash
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved

LIMIT: Final = 4096
"""Most live blocks in the sample of a source; it remembers at most as many removed ones."""

STEP: Final = 3
"""An odd number: where hashes are counted up, or are multiples of a power of two, the sample is still one of all."""

WINDOW: Final = 300.0
"""Seconds over which rates are averaged; what is older weighs exponentially less."""

LIFETIMES: Final = (1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 10800.0, 43200.0, 86400.0)


class AnalyticsReading(msgspec.Struct, frozen=True):
    """The blocks of one source; numbers of blocks are estimates once ``weight`` is above 1.

    Attributes:
        weight: one block in so many is followed.
        followed: live blocks that are.
        live: live blocks, each once however many tiers hold it.
        stored: blocks that no tier held and one does now, ever.
        removed: blocks that the last tier has evicted, ever.
        stored_again: those of ``stored`` that a cache of twice the size would still have had, ever.
        stored_per_second: lately.
        removed_per_second: lately.
        lifetimes: from stored to removed, in seconds.
        shared: the share of live blocks that another source holds too.
    """

    weight: int
    followed: int
    live: int
    stored: int
    removed: int
    stored_again: int
    stored_per_second: float
    removed_per_second: float
    lifetimes: Histogram
    shared: float

    @property
    def churn(self) -> float:
        """Blocks stored and removed per second, over live blocks."""
        return (self.stored_per_second + self.removed_per_second) / max(self.live, 1)


class Analytics:
    """Follows the blocks of one source, by the events that leave.

    Args:
        index: the live blocks.
        stats: where clears and rebuilds are counted.
        limit: most live blocks in the sample.
    """

    def __init__(self, index: Index, stats: SourceStats, limit: int) -> None:
        self._index = index
        self._stats = stats
        self._limit = limit
        self._stored = self._removed = self._stored_again = 0
        self._lifetimes = Histogram(LIFETIMES)

        # What was seen.
        self._cleared = self._rebuilds = 0

        # What rates are made of.
        self._lately_stored = self._lately_removed = 0.0
        self._counted = self._ts = self._now = self._idle = 0.0
        """The time of the last batch that counted, of the last one, that time by kvbus's clock, and since then."""

        # The sample.
        self.weight = 1
        self._born: dict[Hash, float | None] = {}
        """The live blocks, each with the time at which it was stored; None where that was not seen."""
        self._more: dict[Hash, int] = {}
        """How many places beyond the first hold a block."""
        self._left: dict[Hash, float | None] = {}
        """Blocks that no place holds any more, while the batch may store them again."""
        self._gone: OrderedDict[Hash, None] = OrderedDict()
        """The blocks removed last, oldest first; at most as many as are live."""

    def begin(self) -> None:
        """Begin a new sample, of what the index holds. Nothing is known of its age, or of what was there before."""
        self._cleared, self._rebuilds = self._stats.cleared, self._stats.rebuilds
        self._forget()
        born, more = self._born, self._more
        for name in self._index.names():
            if hash(name) % self.weight:
                continue
            if name in born:
                more[name] = more.get(name, 0) + 1
                continue
            born[name] = None
            if len(born) > self._limit:
                self._thin()

    def see(self, events: Sequence[AnyEvent], ts: float, now: float) -> None:
        """Take in what leaves of one batch, which the index has already; ``ts`` is its time."""
        stats = self._stats
        if stats.rebuilds != self._rebuilds:  # blocks have got other names
            self.begin()
            return
        stored, removed = self._stored, self._removed
        for event in events:
            if isinstance(event, BlockRemoved):
                if not self._born.keys().isdisjoint(event.block_hashes):
                    self._take(event.block_hashes)
            elif type(event) is AllBlocksCleared:
                self._forget()
            else:
                self._put(event["block_hashes"] if isinstance(event, dict) else event.block_hashes, ts)  # type: ignore[union-attr]
        if self._left:
            self._end(ts, evicted=stats.cleared == self._cleared)
        self._cleared = stats.cleared
        self._ts, self._now, self._idle = ts, now, 0.0
        if self._stored != stored or self._removed != removed:
            faded = exp(-max(0.0, ts - self._counted) / WINDOW)
            self._lately_stored = self._lately_stored * faded + self._stored - stored
            self._lately_removed = self._lately_removed * faded + self._removed - removed
            self._counted = ts

    def tick(self, now: float) -> None:
        """Time passes: an engine that sends nothing has none of its own."""
        self._idle = max(0.0, now - self._now)

    def _forget(self) -> None:
        self.weight = 1
        self._born.clear()
        self._more.clear()
        self._left.clear()
        self._gone.clear()

    def _put(self, hashes: Iterable[Hash], ts: float) -> None:
        weight, born, more, left, gone = self.weight, self._born, self._more, self._left, self._gone
        if weight > 1:
            hashes = [name for name in hashes if not hash(name) % weight]
        for name in hashes:
            if name in born:
                more[name] = more.get(name, 0) + 1
            elif name in left:
                born[name] = left.pop(name)
            else:
                born[name] = ts
                self._stored += weight
                if name in gone:
                    del gone[name]
                    self._stored_again += weight
        while len(born) + len(left) > self._limit:
            self._thin()

    def _take(self, hashes: Iterable[Hash]) -> None:
        born, more, left = self._born, self._more, self._left
        for name in hashes:
            if name not in born:
                continue
            places = more.get(name)
            if places is None:
                left[name] = born.pop(name)
            elif places == 1:
                del more[name]
            else:
                more[name] = places - 1

    def _end(self, ts: float, *, evicted: bool) -> None:
        """The batch ends: what is gone now was removed. In a batch with a clear it was reset, and not evicted."""
        weight = self.weight
        if evicted:
            for name, born in self._left.items():
                self._removed += weight
                if born is not None:
                    self._lifetimes.observe(max(0.0, ts - born), weight)
                self._gone[name] = None
        self._left.clear()
        while len(self._gone) > len(self._born):
            self._gone.popitem(last=False)

    def _thin(self) -> None:
        """Follow a third of the blocks followed so far."""
        self.weight *= STEP
        samples: tuple[dict[Hash, Any], ...] = (self._born, self._more, self._left, self._gone)
        for sample in samples:
            for name in [name for name in sample if hash(name) % self.weight]:
                del sample[name]

    def sample(self, weight: int) -> Collection[Hash]:
        """The live blocks that are followed at this weight, which is at least its own."""
        if weight == self.weight:
            return self._born.keys()
        return [name for name in self._born if not hash(name) % weight]

    def reading(self, shared: float) -> AnalyticsReading:
        """What is known now."""
        lately = exp(-(max(0.0, self._ts - self._counted) + self._idle) / WINDOW) / WINDOW
        return AnalyticsReading(
            weight=self.weight,
            followed=len(self._born),
            live=len(self._born) * self.weight,
            stored=self._stored,
            removed=self._removed,
            stored_again=self._stored_again,
            stored_per_second=self._lately_stored * lately,
            removed_per_second=self._lately_removed * lately,
            lifetimes=self._lifetimes.copy(),
            shared=shared,
        )


def shares(sources: Sequence[Analytics]) -> list[float]:
    """Of each source, the share of its live blocks that another one holds too."""
    weight = max((each.weight for each in sources), default=1)
    samples = [each.sample(weight) for each in sources]
    holders: Counter[Hash] = Counter()
    for sample in samples:
        holders.update(sample)
    return [sum(holders[name] > 1 for name in sample) / max(len(sample), 1) for sample in samples]
