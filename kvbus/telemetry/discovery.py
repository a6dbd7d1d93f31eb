"""What each entry that finds engines has found and counted: plain values, read at a scrape."""

from __future__ import annotations

from collections import Counter


class DiscoveryStats:
    """What one entry that finds engines has found and counted.

    Args:
        name: the entry's.
        left_out: engines that are no source at the moment, by reason, each of them with 0.
    """

    def __init__(self, name: str, left_out: dict[str, int]) -> None:
        self.name = name
        self.engines = 0
        """Those that it lists now."""
        self.left_out = left_out
        self.changes: Counter[str] = Counter()
        """Sources by what became of them: joined, left, moved to another address; changes that were refused."""
        self.records: Counter[str] = Counter()
        """Records of a log that were not handed on, by reason."""
        self.lag = 0.0
        """Seconds since the newest time of which is known that everything was read that the log had; 0: no log."""
        self.failures = 0
        """Attempts that failed; what was found before stayed in force."""
        self.failing = ""
        """Why the newest attempt failed; empty if it did not."""
