"""What is counted of one source, as plain integers: incremented on the hot path, read only when somebody scrapes."""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec


class SourceStats(msgspec.Struct):
    """What one source has sent and what became of it.

    ``missing == recovered + lost + pending`` at every moment. ``pending`` is no counter: the sequencer knows which
    numbers are open.
    """

    # What has come on the live stream.
    batches: int = 0
    bytes: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    last_batch: float = 0.0

    # Sequencing.
    gaps: int = 0
    missing: int = 0
    recovered: int = 0
    lost: int = 0
    duplicates: int = 0
    restarts: int = 0
    replays: int = 0
    replay_timeouts: int = 0
    requests_failed: int = 0
    """Attempts to send a request that failed in this process."""
    requests_waited: int = 0
    """Requests that were not sent at once, because others went first."""
    held_overflow: int = 0
    stale_replies: int = 0
    timeouts: int = 0

    # Normalizing.
    rebuilds: int = 0
    reannounced: int = 0
    """Stores of several blocks from the root on that were all live: hits announced again, or real copies."""
    most_copies: int = 0
    """The most copies of one block beyond its first, ever."""

    # What was not taken, by reason.
    rejected: Counter[str] = msgspec.field(default_factory=Counter)
    filtered: Counter[str] = msgspec.field(default_factory=Counter)
    refused: Counter[str] = msgspec.field(default_factory=Counter)
    """Handshakes of the connection to the engine that failed, by reason."""

    def copy(self) -> SourceStats:
        """Return the counters as they are now."""
        rejected, filtered, refused = self.rejected.copy(), self.filtered.copy(), self.refused.copy()
        return msgspec.structs.replace(self, rejected=rejected, filtered=filtered, refused=refused)


COUNTERS: Final = SourceStats.__struct_fields__
