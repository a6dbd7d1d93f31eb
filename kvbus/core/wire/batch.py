"""One decoded batch."""

from __future__ import annotations

import msgspec

from kvbus.core.types import Reason
from kvbus.core.wire.schema import Event, Extras


class Batch(msgspec.Struct):
    """One decoded batch.

    Attributes:
        ts: time of the batch, in seconds since 1970.
        events: the events as they came.
        rank: None where the engine sends none (vLLM 0.9.0).
        unknown: the names of unknown fields and events, bounded and harmless to show.
        extras: by an event's position, the fields that this version does not know.
        rejects: one reason for each event that was left out.
    """

    ts: float
    events: list[Event]
    rank: int | None = None
    unknown: set[str] | None = None
    extras: dict[int, Extras] | None = None
    rejects: list[Reason] = []
