"""A source as configured: what the core has to know of one engine publisher.

The daemon makes it once from the configuration. A field has the name of its configuration key.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

from kvbus.core.blocks.index import SMALL

ATTEMPTS: Final = 2
"""Replay requests made for one gap before it is lost: the first, and one retry."""

SNAPSHOT_TIMEOUTS: Final = 5
"""Times ``replay_timeout`` for a snapshot: it is one message, so nothing shows that it is on its way."""

Duplicates = Literal["count", "ignore", "last"]


class Place(NamedTuple):
    """Where a source stands: its section of the configuration, and its endpoints."""

    section: str = "sources[]"
    endpoint: str = "its endpoint"
    replay_endpoint: str = "replay_endpoint"


class SourceSpec(msgspec.Struct, frozen=True):
    """One engine publisher: a worker and one of its ranks. Times are in seconds, sizes in batches, bytes or blocks."""

    label: str = ""
    rank: int = 0
    topic: bytes = b""
    """What the source's topic begins with."""
    shared: bool = False
    """Another source reads the same socket, or the same replay."""
    numbered: bool = False
    """It is read from a log, and routers get its records under the numbers that they have there."""
    copied_below: int = SMALL
    """Tables of fewer blocks are copied for a snapshot, see :mod:`kvbus.core.blocks.index`."""

    # How the publisher is asked, and how long kvbus waits for it.
    replay: bool = True
    """Whether it has a replay."""
    snapshot: bool = False
    """Whether it offers the snapshot protocol: then an epoch begins with a snapshot instead of a replay from 0."""
    replay_timeout: float = 2.0
    replay_total_timeout: float = 120.0
    probe_interval: float = 1.0
    source_timeout: float = 30.0
    reorder_batches: int = 20_000
    max_held_bytes: int = 256 * 1024 * 1024
    reorder_grace: float = 0.2
    """How long to wait for a batch that another has overtaken, where there is no replay to ask."""
    on_lost: Literal["clear", "keep"] = "clear"
    """After a loss. ``keep`` also believes that a publisher that cannot be asked after a reconnection is in the same
    epoch."""

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
    """None for :data:`SNAPSHOT_TIMEOUTS` times ``replay_timeout``."""
    backfill_pause: float | None = None
    """Before history that nobody answered for is asked for again; None for ``replay_timeout``."""
    late_copies: float = 0.0
    """How long live batches may still come that a compacted answer had already."""

    # What is taken of its events.
    block_size: int | None = None
    """None: learned from the stream."""
    duplicates: Duplicates = "count"
    groups: Literal["prefix", "all"] = "prefix"
    orphans: Literal["pass", "drop"] = "pass"
    without_media: frozenset[str] = frozenset()
    expiring_media: frozenset[str] = frozenset()
    expire_after: float = 3600.0
    clears: Literal["auto", "device", "all"] = "auto"
    max_blocks: int = 20_000_000
    max_groups: int = 64
    max_index_bytes: int = 2**32

    @property
    def asks(self) -> bool:
        """Whether there is anybody to be asked for missing batches."""
        return self.replay or self.snapshot
