"""The JSON entries of ``/sources`` and ``/routers``, made from the current readings of sources and routers."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from kvbus.core.sequencing.phases import State
from kvbus.telemetry.readings import RouterReading, SourceReading

T = TypeVar("T", bound=msgspec.Struct)


class Counts(msgspec.Struct):
    """The counters of one source, such as batches and gaps. Always, ``missing = recovered + lost + pending``."""

    batches: int
    bytes: int
    stored: int
    removed: int
    cleared: int
    gaps: int
    missing: int
    recovered: int
    lost: int
    pending: int
    duplicates: int
    restarts: int
    rejected: dict[str, int]
    filtered: dict[str, int]


class SourceEntry(msgspec.Struct):
    """One source in ``/sources``."""

    name: str
    rank: int
    endpoint: str
    replay_endpoint: str | None
    found: str | None
    dialled_in: list[str] | None
    state: State
    partial: bool
    partial_since: float | None
    epoch: int
    last_seq: int
    dialect: str | None
    unknown: list[str]
    block_size: int | None
    queue_depth: int
    unverified: int
    counts: Counts
    examples: dict[str, str]
    blocks: dict[str, int]
    slot: int | UnsetType = UNSET


class RouterEntry(msgspec.Struct):
    """One connection of a router in ``/routers``."""

    output: str
    stream: int
    peer: str
    name: str
    since: float
    topics: list[str]
    subscriptions: int
    state: str
    state_sent: dict[str, float | None]
    queued: int
    bytes: int
    behind_seconds: float
    dropped: dict[str, int]
    left: str | None
    left_at: float | None


def source_entry(
    source: SourceReading,
    endpoint: str,
    replay_endpoint: str | None,
    found: str | None = None,
    dialled_in: list[str] | None = None,
    slot: int | UnsetType = UNSET,
) -> SourceEntry:
    """Return the ``/sources`` entry of a source.

    Args:
        source: the reading of the source.
        endpoint: the endpoint of the engine's live stream.
        replay_endpoint: the endpoint of the engine's replays; None without one.
        found: the discoverer that found the engine, and the place where it found it; None for a configured source.
        dialled_in: the addresses of the engines that have connected to kvbus; None if kvbus dials the engine.
        slot: the source's number. An output with a port for each source sends this source's stream at the output's
            first port plus this number. A merged output has one stream, in which this number is the source's rank.
    """
    stats = source.stats
    return _entry(
        SourceEntry,
        source,
        endpoint=endpoint,
        replay_endpoint=replay_endpoint,
        found=found,
        dialled_in=dialled_in,
        slot=slot,
        counts=_entry(Counts, stats, pending=source.pending),
        blocks={medium: count for medium, count in source.blocks.items() if count},
    )


def router_entry(reading: RouterReading) -> RouterEntry:
    """Return the ``/routers`` entry of a router's connection."""
    router = reading.router
    return _entry(
        RouterEntry,
        router,
        output=reading.output,
        state_sent={"count": router.states_sent, "at": router.state_sent_at},
        queued=router.queued_batches,
        bytes=router.queued_bytes,
        behind_seconds=round(router.behind_seconds, 3),
        dropped={"batches": router.dropped_batches, "events": router.dropped_events},
    )


def _entry(kind: type[T], reading: object, **others: Any) -> T:
    """Return an entry of the class ``kind``.

    A field that is in ``others`` gets its value from there. Any other field gets the value of the attribute of
    ``reading`` with the same name.
    """
    return kind(**{name: getattr(reading, name) for name in kind.__struct_fields__ if name not in others}, **others)
