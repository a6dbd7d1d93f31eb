"""The configuration of a source: the facts about one engine publisher that the relay needs.

The daemon builds it from the operator's configuration. The fields have the names of the configuration keys.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

from kvbus.core.blocks.index import SMALL

ATTEMPTS: Final = 2
"""Maximum number of replay requests for one gap: the first request and one retry.

After the last of them has failed, the missing batches count as lost.
"""

SNAPSHOT_TIMEOUTS: Final = 5
"""Timeout of a snapshot request, in multiples of ``replay_timeout``.

It is longer than a replay's timeout because the snapshot is one message: kvbus cannot see its progress.
"""

Duplicates = Literal["count", "ignore", "last"]


class SourceLocation(NamedTuple):
    """The names under which findings mention a source: its section of the configuration, and its endpoints."""

    section: str = "sources[]"
    endpoint: str = "its endpoint"
    replay_endpoint: str = "replay_endpoint"


class SourceSpec(msgspec.Struct, frozen=True):
    """The configuration of one engine publisher, which is one rank of a worker.

    Times are in seconds, sizes are in batches, bytes or blocks.
    """

    label: str = ""
    rank: int = 0
    topic: bytes = b""
    """Prefix of the topic under which the engine publishes the source's batches."""
    shared: bool = False
    """Whether another source reads from the same event socket of the engine, or from the same replay socket."""
    numbered: bool = False
    """Whether the source is read from a log (Kafka, NATS, Redis).

    Routers then get the log's records under the log's numbers.
    """
    copied_below: int = SMALL
    """Number of blocks below which a table of the index is copied for a snapshot.

    A larger table is frozen instead: later changes go to an overlay (:mod:`kvbus.core.blocks.index`).
    """

    # Requests to the publisher, and their timeouts and limits.
    replay: bool = True
    """Whether the publisher answers replay requests."""
    snapshot: bool = False
    """Whether the publisher offers the snapshot protocol.

    Then an epoch begins with a snapshot in place of a replay from 0.
    """
    replay_timeout: float = 2.0
    replay_total_timeout: float = 120.0
    probe_interval: float = 1.0
    source_timeout: float = 30.0
    reorder_batches: int = 20_000
    max_held_bytes: int = 256 * 1024 * 1024
    reorder_grace: float = 0.2
    """Seconds that kvbus waits for a missing batch, which may only be late, before it gives the batch up as lost.

    This applies only to a publisher that answers no requests for missing batches.
    """
    on_lost: Literal["clear", "keep"] = "clear"
    """Whether kvbus clears the source's blocks at the routers after batches were lost, or keeps them.

    After kvbus has reconnected to a publisher, it asks whether the epoch is still the same. If it gets no answer,
    ``keep`` also means that it assumes the same epoch.
    """

    # Only the client library, which reads streams of engines and of kvbus, sets the following fields. The daemon leaves
    # them at their defaults.
    compacted: bool = False
    """Whether a replay answer may hold a state in place of old batches, as the answers of another kvbus do.

    kvbus then applies live batches only after the answer has ended, because a state is valid only when it is complete.
    It does not compare a batch of the answer with the live batch of the same seq, because the two may differ within one
    epoch. After a silence, kvbus asks the publisher for its newest batches. The times between such requests grow during
    a connection, and live batches do not shorten them again, so that many readers do not overload one publisher.
    """
    from_now: bool = False
    """Whether kvbus begins the first epoch at the first live batch, and does not request the batches before it."""
    attempts: int = ATTEMPTS
    """Maximum number of requests for one gap, or for the history of one epoch.

    After the last of them has failed, the missing batches count as lost.
    """
    snapshot_timeout: float | None = None
    """Seconds after which a snapshot request counts as failed.

    None means :data:`SNAPSHOT_TIMEOUTS` times ``replay_timeout``.
    """
    backfill_pause: float | None = None
    """Seconds after which kvbus repeats a request for an epoch's older batches that got no answer.

    None means ``replay_timeout``.
    """
    late_copies: float = 0.0
    """Seconds after a replay answer with a state in which kvbus drops live batches whose seqs the answer covers.

    They are late copies of old batches. After this time, such a batch may also come from a publisher that has
    restarted.
    """

    # How kvbus interprets the engine's events, and how many blocks it keeps.
    block_size: int | None = None
    """Number of tokens in each block that routers get. If it is None, kvbus learns the number from the stream."""
    duplicates: Duplicates = "count"
    groups: Literal["prefix", "all"] = "prefix"
    orphans: Literal["pass", "drop"] = "pass"
    without_media: frozenset[str] = frozenset()
    expiring_media: frozenset[str] = frozenset()
    expire_after: float = 3600.0
    clears: Literal["auto", "device", "all"] = "auto"
    max_blocks: int = 20_000_000
    max_groups: int = 64
    max_owners: int = 64
    max_index_bytes: int = 2**32

    @property
    def requests_replay(self) -> bool:
        """Whether kvbus can ask the publisher for missing batches, by replay or by snapshot."""
        return self.replay or self.snapshot
