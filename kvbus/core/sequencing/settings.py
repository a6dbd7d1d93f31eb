"""How one publisher is asked and waited for, and the states in which it is shown."""

from __future__ import annotations

from enum import StrEnum

import msgspec


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
