"""One decoded batch: no struct, so that compiled code reads it without a look-up."""

from __future__ import annotations

from kvbus.core.types import Reason
from kvbus.core.wire.schema import Event, Extras


class Batch:
    """One decoded batch.

    Attributes:
        ts: its time.
        events: as they came.
        rank: None where the engine sends none (vLLM 0.9.0).
        canonical: it is exactly ``[ts, events, rank]`` with map events of known fields.
        form: in what form it came: pass it on with the next batch of a stream.
        uniform: its hashes are of one kind, and no event had to be looked at alone.
        extras: by an event's position, fields this version does not know.
        unknown: what those and events of an unknown kind are called, bounded and harmless to show.
        rejects: one reason for each event that was left out.
    """

    __slots__ = ("canonical", "events", "extras", "form", "rank", "rejects", "ts", "uniform", "unknown")

    def __init__(
        self,
        ts: float,
        events: list[Event],
        rank: int | None = None,
        canonical: bool = False,
        form: int = 0,
        uniform: bool = False,
        unknown: set[str] | None = None,
    ) -> None:
        self.ts = ts
        self.events = events
        self.rank = rank
        self.canonical = canonical
        self.form = form
        self.uniform = uniform
        self.extras: dict[int, Extras] | None = None
        self.unknown = unknown
        self.rejects: list[Reason] = []

    def __repr__(self) -> str:
        return f"Batch(ts={self.ts}, events={self.events}, rank={self.rank})"
