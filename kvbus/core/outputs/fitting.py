"""Adapt a source's batches for routers that cannot read them unchanged.

* Some routers clear by pod: at an AllBlocksCleared they drop the blocks of every rank. While another rank has blocks,
  kvbus sends them removals of the cleared rank's blocks in place of the clear.
* Some routers count a block that several ranks hold as one block. kvbus sends them the block's store from the first of
  these ranks, and its removal from the last of them.
* Some routers accept only one KV-cache group. kvbus sends them no event of another group.
* Batches that are too large for a router are divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvbus.core.blocks.announce import blocks_in
from kvbus.core.blocks.index import Index
from kvbus.core.stats import NumberingStats
from kvbus.core.types import medium_key
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.encoding import changed, hashes_of, is_store, parts, value
from kvbus.core.wire.profiles import Profile
from kvbus.core.wire.schema import AllBlocksCleared

Cleared = Sequence[Callable[[], Sequence[AnyEvent]]]
"""One function for each AllBlocksCleared of a batch.

The function builds removals of the cleared blocks, for routers that must not get the clear.
"""

Others = Sequence[tuple[Index, int | None]]
"""The other ranks whose blocks a router does not distinguish from this rank's: the index of each, and its first group.

The first group is None if the rank's engine does not number its groups. A router that accepts one group gets the blocks
of the first group of each rank, and these groups may differ.
"""

MAX_BATCH_EVENTS: Final = 1024
"""Maximum number of events in an outgoing batch. If there are more events, kvbus divides them into several batches.

For example, there are more events when kvbus announces all blocks of a cache again.
"""


def fit(
    profile: Profile,
    events: list[AnyEvent],
    cleared: Cleared,
    others: Others,
    *,
    merged: bool,
    group: int | None,
    stats: NumberingStats,
) -> list[AnyEvent]:
    """Adapt a source's events to the routers of one profile. Return the list ``events`` itself if no event changes.

    Args:
        profile: the profile of the routers.
        events: the source's events, before kvbus adapts them to a profile.
        cleared: one function for each AllBlocksCleared in ``events``. It builds the removals of the cleared blocks.
        others: the blocks of other ranks that the routers do not distinguish from this rank.
        merged: whether all ranks share the stream.
        group: the only group whose events are sent, if the profile accepts one group.
        stats: the counters of the events that are left out.
    """
    shared = profile.clears in {"pod", "connection"} and any(len(index) for index, _ in others)
    if cleared and (shared or profile.clears == "pod or nothing"):
        events = _removals_for_clears(events, cleared)
    if profile.one_group:
        events = _of_group(events, group, stats)
    if profile.one_copy and merged and others:
        events = [each for event in events for each in _first_or_last(event, others, profile)]
    return events


def in_batches(events: list[AnyEvent], most: int) -> list[list[AnyEvent]]:
    """Divide events into batches that every router accepts.

    Args:
        events: the events, in order.
        most: maximum number of blocks that the events of a batch may store or remove.
    """
    if not events:
        return []
    if len(events) <= MAX_BATCH_EVENTS and blocks_in(events) <= most:
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
    """Divide the events of a batch into two batches of about the same size.

    A single event is divided by its blocks. Return one batch with the same events if they cannot be divided.
    """
    if len(events) > 1:
        middle = len(events) // 2
        return [events[:middle], events[middle:]]
    count = blocks_in(events)
    if count < 2:
        return [events]
    return [[part] for part in parts(events[0], [(0, count // 2), (count // 2, count)])]


def _removals_for_clears(events: list[AnyEvent], cleared: Cleared) -> list[AnyEvent]:
    """Return the events with each AllBlocksCleared replaced by removals of the cleared blocks."""
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


def _first_or_last(event: AnyEvent, others: Others, profile: Profile) -> Iterator[AnyEvent]:
    """Yield an event without those of its blocks that another rank holds. Yield nothing if no block remains.

    So routers get a block's store from the first rank that holds the block, and its removal from the last rank.
    """
    if isinstance(event, AllBlocksCleared):
        yield event
        return
    group, medium = value(event, "group_idx"), medium_key(value(event, "medium")) or ""
    hashes = hashes_of(event)
    known = [(index, first if profile.one_group else group) for index, first in others]
    ours = [not any(index.announces(sent, medium, block) for index, sent in known) for block in hashes]
    if all(ours):
        yield event
        return
    if is_store(event):
        yield from parts(event, list(runs_of(ours)))
    elif any(ours):
        yield changed(event, {"block_hashes": tuple(block for block, own in zip(hashes, ours, strict=True) if own)})


def runs_of(wanted: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the ranges ``[first, end)`` of consecutive true values in ``wanted``."""
    first = None
    for at, want in enumerate((*wanted, False)):
        if want and first is None:
            first = at
        elif not want and first is not None:
            yield first, at
            first = None
