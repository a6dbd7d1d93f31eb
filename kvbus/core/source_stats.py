"""What is counted of one source, as plain integers: incremented on the hot path, read only when somebody scrapes."""

from __future__ import annotations

from collections import Counter
from typing import Final

COUNTERS: Final = (
    "batches",
    "bytes",
    "cleared",
    "duplicates",
    "filtered",
    "gaps",
    "held_overflow",
    "last_batch",
    "lost",
    "missing",
    "most_copies",
    "reannounced",
    "rebuilds",
    "recovered",
    "refused",
    "rejected",
    "removed",
    "replay_timeouts",
    "replays",
    "requests_failed",
    "requests_waited",
    "restarts",
    "stale_replies",
    "stored",
    "timeouts",
)
"""Every attribute of :class:`SourceStats`."""


class SourceStats:
    """What one source has sent and what became of it.

    ``missing == recovered + lost + pending`` at every moment. ``pending`` is no counter: the sequencer knows which
    numbers are open.
    """

    def __init__(self) -> None:
        # What has come on the live stream.
        self.batches = 0
        self.bytes = 0
        self.stored = 0
        self.removed = 0
        self.cleared = 0
        self.last_batch = 0.0

        # Sequencing.
        self.gaps = 0
        self.missing = 0
        self.recovered = 0
        self.lost = 0
        self.duplicates = 0
        self.restarts = 0
        self.replays = 0
        self.replay_timeouts = 0
        self.requests_failed = 0
        """Attempts to send a request that failed in this process."""
        self.requests_waited = 0
        """Requests that were not sent at once, because others went first."""
        self.held_overflow = 0
        self.stale_replies = 0
        self.timeouts = 0

        # Normalizing.
        self.rebuilds = 0
        self.reannounced = 0
        """Stores of several blocks from the root on that were all live: hits announced again, or real copies."""
        self.most_copies = 0
        """The most copies of one block beyond its first, ever."""

        # What was not taken, by reason.
        self.rejected: Counter[str] = Counter()
        self.filtered: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """By outcome: how often the engine was asked to reset its cache."""

    def copy(self) -> SourceStats:
        """The same, as it is now."""
        copied = SourceStats()
        for name in COUNTERS:
            value = getattr(self, name)
            setattr(copied, name, value.copy() if isinstance(value, Counter) else value)
        return copied
