"""The configuration of a source: the facts about one engine publisher that the core needs.

The daemon builds it once from the configuration. Fields are named after their configuration keys.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

from kvbus.core.blocks.index import SMALL

ATTEMPTS: Final = 2
"""Replay requests for one gap before it is lost: the first one and one retry."""

SNAPSHOT_TIMEOUTS: Final = 5
"""Timeout of a snapshot, in multiples of ``replay_timeout``. It is one message, so no progress is visible."""

Duplicates = Literal["count", "ignore", "last"]


class Place(NamedTuple):
    """The position of a source: its section of the configuration, and its endpoints."""

    section: str = "sources[]"
    endpoint: str = "its endpoint"
    replay_endpoint: str = "replay_endpoint"


class SourceSpec(msgspec.Struct, frozen=True):
    """One engine publisher: a worker and one of its ranks. Times are in seconds, sizes in batches, bytes or blocks."""

    label: str = ""
    rank: int = 0
    topic: bytes = b""
    """Prefix of the source's topic."""
    shared: bool = False
    """Whether another source reads the same socket, or the same replay."""
    numbered: bool = False
    """Whether the source is read from a log. Routers get its records under the log's numbers."""
    copied_below: int = SMALL
    """Tables with fewer blocks are copied for a snapshot, see :mod:`kvbus.core.blocks.index`."""

    # Requests to the publisher, and timeouts.
    replay: bool = True
    """Whether the publisher has a replay."""
    snapshot: bool = False
    """Whether the publisher offers the snapshot protocol. Then an epoch begins with a snapshot, not with a replay from
    0."""
    replay_timeout: float = 2.0
    replay_total_timeout: float = 120.0
    probe_interval: float = 1.0
    source_timeout: float = 30.0
    reorder_batches: int = 20_000
    max_held_bytes: int = 256 * 1024 * 1024
    reorder_grace: float = 0.2
    """How long to wait for a batch that another batch has overtaken, if there is no replay to ask."""
    on_lost: Literal["clear", "keep"] = "clear"
    """Whether blocks are cleared after a loss.

    With ``keep``, kvbus also assumes that a publisher that cannot be asked after a reconnection is in the same epoch.
    """

    # Differences between a follower of engines and a follower of other publishers with the same protocol.
    compacted: bool = False
    """Whether an answer may hold a state in place of batches, as the answers of another kvbus do.

    Then the answer is only valid as a unit, live batches wait until it has ended, and its content proves nothing about
    a live batch with the same number. After a connection, an idle publisher is asked less and less often, even if live
    batches come: it may have many such followers.
    """
    from_now: bool = False
    """Whether the first epoch begins with the first live batch, without its history."""
    attempts: int = ATTEMPTS
    """Requests for one gap, or one epoch, before it is given up."""
    snapshot_timeout: float | None = None
    """None means :data:`SNAPSHOT_TIMEOUTS` times ``replay_timeout``."""
    backfill_pause: float | None = None
    """Pause before unanswered history is asked for again. None means ``replay_timeout``."""
    late_copies: float = 0.0
    """How long copies of batches of a compacted answer may still come live."""

    # Interpretation of the events.
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
        """Whether the publisher can be asked for missing batches."""
        return self.replay or self.snapshot
