"""How long a subscriber waits, how often it asks, how much it keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Patience, in seconds, and how often to ask.

    Attributes:
        connect_s: how long the first replay request waits for the live connection to stand.
        idle_s: silence after which a replay request has failed; engines that idle answer up to 0.1 s late.
        answer_s: the longest one answer may take in all.
        snapshot_s: the longest a snapshot may take; it is one message, and nothing is heard until it is complete.
        retry_s: pause before asking again for what an answer left out.
        attempts: requests in a row without a new batch before the missing ones are lost.
        confirm_s: pause before the last batch is asked for once more after a connection, unless live batches
            come: one published between the answer and the subscription's arrival at the publisher would be
            missed.
        rebuild_s: after batches were lost because nobody answered: pause before asking whether somebody does by now.
        overlap_s: how long after a replay live batches may still come in that it contained already.
    """

    connect_s: float = 0.5
    idle_s: float = 2.0
    answer_s: float = 120.0
    snapshot_s: float = 10.0
    retry_s: float = 0.1
    attempts: int = 3
    confirm_s: float = 0.5
    rebuild_s: float = 5.0
    overlap_s: float = 2.0


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """What may be kept in memory.

    Attributes:
        held_batches: batches held back for order; beyond it the newest are dropped and asked for again.
        held_bytes: the same in payload bytes.
        recent: digests of delivered batches kept to tell a duplicate from a restart.
    """

    held_batches: int = 10_000
    held_bytes: int = 64 * 1024 * 1024
    recent: int = 4096
