"""An example of each reason for which something was refused or left out: what it was like, and none of its tokens.

Only the first of each reason in this process is kept, so examples are bounded, and cost nothing while nothing is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvbus.core.source import Source
from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.schema import Batch, BlockStored, Event

_ELSEWHERE: Final[frozenset[str]] = frozenset(
    {
        Reason.FRAME_COUNT,
        Reason.FRAME_SIZE,
        Reason.SEQ_WIDTH,
        Reason.SEQ_RANGE,
        Reason.CONFLICT,
        Reason.OTHER_TOPIC,
        Filtered.OLD_EPOCH,
        Filtered.ORPHAN_PASSED,
        Filtered.OTHER_RANK,
        Filtered.TOPIC,
    }
)
"""Counted of messages, of numbers, and of batches that leave as they came."""

_LONGEST: Final = 24
"""Characters of an engine's own word."""


def keep_batch(source: Source, seq: int, payload: bytes, batch: Batch | Reason) -> None:
    """Keep a batch as the example of the reasons that it has brought up.

    Call it for every batch that does not leave as it came, if there are more reasons than before: then one without an
    example is the batch's own.

    Args:
        source: whose batch it is.
        seq: its number.
        payload: its bytes.
        batch: it decoded; the reason if it cannot be.
    """
    stats, examples = source.stats, source.examples
    source.reasons = len(stats.rejected) + len(stats.filtered)
    known = _ELSEWHERE.union(examples)
    new = [reason for counts in (stats.rejected, stats.filtered) for reason in counts if reason not in known]
    if not new:
        return
    name = f"batch {seq}" if seq >= 0 else "a part of the snapshot"
    text = f"{name} of epoch {source.sequencer.epoch}, {len(payload):,} bytes"
    if not isinstance(batch, Reason):
        text = f"{text}: {_events(batch)}"
    examples.update((str(reason), text) for reason in new)


def refuse_message(source: Source, reason: Reason, frames: Sequence[bytes]) -> None:
    """Count a message that is no batch, and keep the first one."""
    source.stats.rejected[reason] += 1
    if reason not in source.examples:
        sizes = ", ".join(f"{len(frame):,}" for frame in frames[:4])
        source.examples[str(reason)] = f"{len(frames)} frames, of {sizes}{'…' if len(frames) > 4 else ''} bytes"


def _events(batch: Batch) -> str:
    found: dict[str, int] = {}
    for event in batch.events:
        kind = _kind(event)
        found[kind] = found.get(kind, 0) + 1
    if batch.rejects:
        found["unreadable"] = len(batch.rejects)
    said = [f"{count:,} x {kind}" for kind, count in found.items()]
    return ", ".join(said[:3]) + (f" and {len(said) - 3} more" if len(said) > 3 else "")


def _kind(event: Event) -> str:
    name = type(event).__name__
    if not isinstance(event, BlockStored):
        return name
    blocks = len(event.block_hashes)
    group = f", group {event.group_idx}" if isinstance(event.group_idx, int) else ""
    medium = f" on {event.medium[:_LONGEST]}" if isinstance(event.medium, str) else ""
    return f"{name} of {blocks} x {event.block_size} tokens{medium}{group}"
