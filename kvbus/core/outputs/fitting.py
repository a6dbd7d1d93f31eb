"""Adapt a source's batches for routers that cannot read them unchanged.

Routers that clear by pod forget every rank at an AllBlocksCleared. As long as another rank has blocks, they get
removals of the cleared rank's blocks instead. Routers that keep one copy of a block that several ranks hold get its
store from the first of these ranks, and its removal from the last. Routers that accept one group get no event of
another group. Batches that are too large for a router are divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvbus.core.blocks.announce import blocks_in
from kvbus.core.blocks.compaction import most_blocks
from kvbus.core.blocks.index import Index
from kvbus.core.stats import NumberingStats
from kvbus.core.types import medium_key
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.encoding import changed, hashes_of, is_store, parts, value
from kvbus.core.wire.profiles import Profile
from kvbus.core.wire.schema import AllBlocksCleared

Cleared = Sequence[Callable[[], Sequence[AnyEvent]]]
"""For each clear of a batch, a function that builds the equivalent removals."""

MAX_BATCH_EVENTS: Final = 1024
"""Maximum number of events in an outgoing batch. More events (an announced complete cache) become several batches."""


def fit(
    profile: Profile,
    events: list[AnyEvent],
    cleared: Cleared,
    others: Sequence[Index],
    *,
    merged: bool,
    group: int | None,
    stats: NumberingStats,
) -> list[AnyEvent]:
    """Return a source's events for routers of a family; the same object if nothing changes.

    Args:
        profile: the family.
        events: the events for routers of all families.
        cleared: for each AllBlocksCleared in ``events``, a function that builds the equivalent removals.
        others: the blocks of the other ranks that routers know.
        merged: whether all ranks share the stream.
        group: the only group that is sent if the family accepts one group.
        stats: counts events that are left out.
    """
    shared = profile.clears in {"pod", "connection"} and any(map(len, others))
    if cleared and (shared or profile.clears == "pod or nothing"):
        events = _removals_for_clears(events, cleared)
    if profile.one_group:
        events = _of_group(events, group, stats)
    if profile.one_copy and merged and others:
        events = [each for event in events for each in _first_or_last(event, others)]
    return events


def in_batches(events: list[AnyEvent], block_size: int, named: int) -> list[list[AnyEvent]]:
    """Divide the events, which name ``named`` blocks, into batches that every router accepts."""
    if not events:
        return []
    most = most_blocks(block_size)
    if len(events) <= MAX_BATCH_EVENTS and named <= most:
        return [events]
    found: list[list[AnyEvent]] = []
    batch: list[AnyEvent] = []
    blocks = 0
    for event in events:
        count = blocks_in([event])
        if batch and (len(batch) == MAX_BATCH_EVENTS or blocks + count > most):
            found.append(batch)
            batch, blocks = [], 0
        batch.append(event)
        blocks += count
    return [*found, batch]


def halves(events: list[AnyEvent]) -> list[list[AnyEvent]]:
    """Divide a batch into two; return it unchanged if it cannot be divided."""
    if len(events) > 1:
        middle = len(events) // 2
        return [events[:middle], events[middle:]]
    count = blocks_in(events)
    if count < 2:
        return [events]
    return [[part] for part in parts(events[0], [(0, count // 2), (count // 2, count)])]


def _removals_for_clears(events: list[AnyEvent], cleared: Cleared) -> list[AnyEvent]:
    """Put the equivalent removals in place of each AllBlocksCleared."""
    left = iter(cleared)
    found: list[AnyEvent] = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            found.extend(next(left)())
        else:
            found.append(event)
    return found


def _of_group(events: list[AnyEvent], group: int | None, stats: NumberingStats) -> list[AnyEvent]:
    kept = [event for event in events if isinstance(event, AllBlocksCleared) or value(event, "group_idx") == group]
    if len(kept) == len(events):
        return events
    stats.other_group += len(events) - len(kept)
    return kept


def _first_or_last(event: AnyEvent, others: Sequence[Index]) -> Iterator[AnyEvent]:
    """Yield an event without the blocks that another rank holds."""
    if isinstance(event, AllBlocksCleared):
        yield event
        return
    group, medium = value(event, "group_idx"), medium_key(value(event, "medium")) or ""
    hashes = hashes_of(event)
    ours = [not any(other.announces(group, medium, block) for other in others) for block in hashes]
    if all(ours):
        yield event
        return
    if is_store(event):
        yield from parts(event, list(runs_of(ours)))
    elif any(ours):
        yield changed(event, {"block_hashes": tuple(block for block, own in zip(hashes, ours, strict=True) if own)})


def runs_of(wanted: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the runs ``[first, end)`` of true values."""
    first = None
    for at, want in enumerate((*wanted, False)):
        if want and first is None:
            first = at
        elif not want and first is not None:
            yield first, at
            first = None
