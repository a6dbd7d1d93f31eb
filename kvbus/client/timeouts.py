"""A subscriber's settings: timeouts, attempts, buffer limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Timeouts in seconds, and the number of attempts.

    Attributes:
        connect_s: longest wait of the first replay request for the live connection.
        idle_s: silence after which a replay request has failed; idle engines answer up to 0.1 s late.
        answer_s: longest time of one whole answer.
        snapshot_s: longest time of a snapshot; it is one message, so nothing arrives before it is complete.
        attempts: requests in a row without a new batch before the missing batches are lost.
        confirm_s: pause after a connection before one more request for the last batch, unless live batches arrive: it
            finds a batch published between the answer and the subscription's arrival at the publisher.
        rebuild_s: pause before the next request, after batches were lost for want of an answer.
        unreachable_s: time without a connection before the subscriber finds out why and reports it.
        overlap_s: time after a replay in which live batches may still arrive that the replay had already.
    """

    connect_s: float = 0.5
    idle_s: float = 2.0
    answer_s: float = 120.0
    snapshot_s: float = 10.0
    attempts: int = 3
    confirm_s: float = 0.5
    rebuild_s: float = 5.0
    unreachable_s: float = 3.0
    overlap_s: float = 2.0


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Limits of a subscriber's memory.

    Attributes:
        held_batches: batches in the reorder buffer; at the limit the subscriber drops newer ones and asks for them
            again.
        held_bytes: the same limit in payload bytes.
    """

    held_batches: int = 10_000
    held_bytes: int = 64 * 1024 * 1024
