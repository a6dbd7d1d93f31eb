"""Counters as plain integers: incremented on the hot path, read only when somebody scrapes."""

from __future__ import annotations

from collections import Counter

import msgspec


class SourceStats(msgspec.Struct):
    """What one source has sent and what became of it. ``missing == recovered + lost + pending`` at every moment."""

    batches: int = 0
    bytes: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    gaps: int = 0
    missing: int = 0
    recovered: int = 0
    lost: int = 0
    duplicates: int = 0
    restarts: int = 0
    replays: int = 0
    replay_timeouts: int = 0
    held_overflow: int = 0
    stale_replies: int = 0
    rebuilds: int = 0
    timeouts: int = 0
    last_batch: float = 0.0
    rejected: Counter[str] = msgspec.field(default_factory=Counter)
    filtered: Counter[str] = msgspec.field(default_factory=Counter)

    @property
    def pending(self) -> int:
        """Batches known to be missing whose fate is open."""
        return self.missing - self.recovered - self.lost


class OutputStats(msgspec.Struct):
    """What one output has sent and what it could not send."""

    batches: int = 0
    events: int = 0
    bytes: int = 0
    heartbeats: int = 0
    subscribers: int = 0
    queue_depth: int = 0
    dropped_batches: Counter[str] = msgspec.field(default_factory=Counter)
    dropped_events: Counter[str] = msgspec.field(default_factory=Counter)
    replay_requests: Counter[str] = msgspec.field(default_factory=Counter)
    replay_batches: int = 0
    replay_sessions: int = 0
