"""How one publisher is asked and waited for, and the states in which it is shown."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

ATTEMPTS: Final = 2
"""Replay requests made for one gap before it is lost: the first, and one retry."""


class State(StrEnum):
    """What ``/sources`` and ``kvbus_source_state`` show."""

    CONNECTING = "connecting"
    SYNCING = "syncing"
    LIVE = "live"
    GAP = "gap"
    LOST = "lost"
    CONFLICT = "conflict"


class Settings(msgspec.Struct, frozen=True):
    """Times in seconds, sizes in batches."""

    replay: bool = True
    snapshot: bool = False
    """Whether the publisher offers the snapshot protocol: then an epoch begins with one instead of a replay from 0."""
    replay_timeout: float = 2.0
    replay_total_timeout: float = 120.0
    probe_interval: float = 1.0
    reorder_batches: int = 20_000
    reorder_bytes: int = 256 * 1024 * 1024
    trust_unverified: bool = False
    """Whether a publisher that cannot be asked after a reconnection is believed to be in the same epoch."""
    reorder_grace: float = 0.2
    """How long to wait for a batch that another has overtaken, where there is no replay to ask."""

    # What differs between a follower of engines and one of anything that speaks their protocol.
    compacted: bool = False
    """Whether an answer may hold a state in place of batches, as kvbus's does. Then it counts as a whole, live batches
    wait until it has ended, and its content proves nothing about a live batch of the same number. An idle publisher is
    asked more and more rarely from a connection on, whatever comes live: it may have many such followers."""
    from_now: bool = False
    """Whether the first epoch begins with the first live batch, and not with its history."""
    attempts: int = ATTEMPTS
    """Requests made for one gap, or one epoch, before it is given up."""
    snapshot_timeout: float | None = None
    """None for five times ``replay_timeout``: a snapshot is one message, so nothing shows that it is on its way."""
    backfill_pause: float | None = None
    """Before history that nobody answered for is asked for again; None for ``replay_timeout``."""
    late_copies: float = 0.0
    """How long live batches may still come that a compacted answer had already."""

    @property
    def asks(self) -> bool:
        """Whether there is anybody to be asked for what is missing."""
        return self.replay or self.snapshot
