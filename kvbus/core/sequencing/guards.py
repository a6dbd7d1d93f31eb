"""Evaluate the conditions (guards) of the table of phases."""

from __future__ import annotations

from kvbus.core.sequencing.epoch import Epoch
from kvbus.core.sequencing.phases import Guard
from kvbus.core.source_spec import SourceSpec


def holds(guard: Guard, spec: SourceSpec, current: Epoch, *, epoch: int, retries: int, crowded: bool) -> bool:
    """Return whether a guard of the table of phases holds.

    Args:
        guard: the condition.
        spec: the capabilities of the publisher.
        current: what kvbus knows about the current epoch.
        epoch: number of the current epoch.
        retries: how often kvbus has repeated the request of the current phase.
        crowded: whether several publishers send on one endpoint.
    """
    tracker = current.tracker
    match guard:
        case Guard.TRUSTED:
            return not spec.requests_replay and tracker.synced and spec.on_lost == "keep"
        case Guard.UNKNOWN:
            unknown = not spec.replay or (spec.compacted and tracker.fingerprints.newest(tracker.next) < 0)
            return spec.snapshot and tracker.synced and tracker.next > 0 and unknown
        case Guard.DELIVERED:
            return spec.replay and tracker.next > 0
        case Guard.CROWDED:
            return crowded
        case Guard.NO_REPLAY:
            return not spec.replay
        case Guard.FROM_NOW:
            return spec.from_now and epoch == 0
        case Guard.TAIL:
            return spec.compacted and spec.replay
        case Guard.SNAPSHOTS:
            return spec.snapshot
        case Guard.ONCE_MORE:
            return retries < spec.attempts - 1
        case Guard.SYNCED:
            return tracker.synced
        case _:
            return spec.snapshot and (not spec.replay or current.gap_attempts >= spec.attempts)
